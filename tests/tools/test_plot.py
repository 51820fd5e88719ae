"""tools/plot.py, run in this process: what it reads, draws and says."""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loading import load_tool

plot = load_tool("plot")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    losses = [8.0 / (i + 1) for i in range(4)]
    rest = {"lr": 0.1, "time": 1.0, "grad_norm": 2.0}
    rows = [
        {"iteration": i, "total_loss": x, "loss": x, **rest}
        for i, x in enumerate(losses)
    ]
    rows.append({"iteration": 3, "classification/accuracy": 50.0, "eta_seconds": 3.0})
    (folder / "metrics.json").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return folder


def test_metrics_are_put_into_panels(run: Path) -> None:
    panels = plot.read([run], [], count=2)
    assert list(panels) == ["losses", "results", "others", "rates", "times in seconds"]
    losses = [(0, 8.0), (1, 6.0), (2, (4 + 8 / 3) / 2), (3, (8 / 3 + 2) / 2)]
    assert list(panels["losses"]) == ["total_loss"]
    assert panels["losses"]["total_loss"].points == losses
    assert panels["results"]["classification/accuracy"].points == [(3, 50.0)]
    assert list(panels["others"]) == ["grad_norm"]
    (chosen,) = plot.read([run], ["loss"], count=2).values()
    assert chosen["loss"].points == losses


@pytest.mark.parametrize(
    ("period", "last", "total"),
    [(3, 9, "total_loss"), (3, 8, "loss_c"), (1, 9, "total_loss"), (2, 8, "loss_c")],
    ids=["at the end", "while it runs", "often", "with each line"],
)
def test_what_comes_from_evaluations_is_a_result(
    period: int, last: int, total: str, tmp_path: Path
) -> None:
    rows: list[dict[str, float]] = []
    for i in range(last + 1):
        row: dict[str, float] = {"iteration": i}
        if i % 2 == 1 and i < 9:
            row |= {total: 3.0, "loss_a": 2.0, "loss_b": 1.0, "grad_norm": i}
        if i % period == period - 1:
            row |= {"nll": i, "val_loss": i}
        rows.append(row)
    if last == 8:
        rows.append({"iteration": 10, "nll": 1.0, "val_loss": 1.0})
    file = tmp_path / "metrics.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if len(row) > 1))
    panels = plot.read([tmp_path], [], count=9)
    assert {title: [*panel] for title, panel in panels.items()} == {
        "losses": ["loss_a", "loss_b", total, "val_loss"],
        "results": ["nll"],
        "others": ["grad_norm"],
    }
    counts = [line.count for panel in panels.values() for line in panel.values()]
    assert counts == [9, 9, 9, 1, 1, 1]


def test_results_of_a_process_beside_the_run_are_drawn_with_it(run: Path) -> None:
    rows = [
        {"iteration": i, "classification/accuracy": 40.0 + 10 * (i == 3)}
        for i in (1, 3)
    ]
    (run / "eval").mkdir()
    (run / "eval" / "metrics.json").write_text("\n".join(map(json.dumps, rows)))
    accuracy = plot.read([run], [], count=1)["results"]["classification/accuracy"]
    assert accuracy.points == [(1, 40.0), (3, 50.0)]  # the last one is also the run's
    (run / "metrics.json").unlink()
    assert [*plot.read([run], [], count=1)] == ["results"]


def test_a_mean_is_of_finite_values_and_the_others_are_counted(run: Path) -> None:
    losses = [6.0, "inf", "-inf", 2.0, "nan", "nan", "nan", "nan"]
    rows = [{"iteration": i, "total_loss": x} for i, x in enumerate(losses)]
    file = run / "metrics.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    panels = plot.read([run], [], count=4)
    points = panels["losses"]["total_loss"].points
    assert [y for _, y in points[:7]] == [6.0, 6.0, 6.0, 4.0, 2.0, 2.0, 2.0]
    assert math.isnan(points[7][1])
    counted = "total_loss (6 of 8 not finite)"
    assert counted in plot.text(panels, "run", log=True, columns=60)
    legends = []
    with pytest.MonkeyPatch.context() as patch:
        legend = "matplotlib.axes.Axes.legend"
        patch.setattr(legend, lambda ax, **_: legends.extend(ax.lines))
        plot.picture(panels, "run", run / "a.png", log=True)
    mean, single = legends
    assert mean.get_label() == counted
    # matplotlib draws -inf on a logarithmic scale as a line down.
    assert not any(map(math.isinf, single.get_ydata()))


@pytest.mark.parametrize("options", [[], ["--text"]], ids=["picture", "text"])
def test_a_metric_that_is_never_finite_is_drawn(run: Path, options: list[str]) -> None:
    (run / "metrics.json").write_text('{"iteration": 1, "total_loss": "nan"}')
    assert plot.main([str(run), "--log", *options]) == 0


def test_rows_of_other_writers_are_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"iteration": 1.0, "total_loss": 2, "acc": None, "text": "abc", "lr": [1, 2]},
        {"iteration": 3.0, "total_loss": 1, "acc": 0.5, "text": "d", "lr": {"a": 1}},
    ]
    file = run / "metrics.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert plot.read_run(run) == {"total_loss": [(1, 2.0), (3, 1.0)], "acc": [(3, 0.5)]}
    assert capsys.readouterr().err.splitlines() == [
        f"{file}: skipped, since it is not a number: 'text' is 'abc' in iteration 1",
        f"{file}: skipped, since it is not a number: 'lr' is [1, 2] in iteration 1",
    ]
    assert plot.main([str(run), "--text"]) == 0


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04\n\n\n", b'{"step": 1}\n'])
def test_a_file_of_another_kind_is_one_error(
    content: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "model_final.pth"
    file.write_bytes(content)
    with pytest.raises(SystemExit):
        plot.main([str(file), "--text"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"'{file}' has no line of JSON with an 'iteration'" in error
    assert caplog.messages == []


def test_the_remaining_time_and_the_mean_of_the_loss_are_drawn_on_demand(
    run: Path,
) -> None:
    wanted = ["eta_seconds", "mean_loss"]
    row = {"iteration": 5, "mean_loss": 1.0}
    with (run / "metrics.json").open("a") as file:
        file.write(json.dumps(row))
    shown = plot.read([run], wanted, count=1)
    assert {title: [*panel] for title, panel in shown.items()} == {
        "losses": ["mean_loss"],
        "times in seconds": ["eta_seconds"],
    }
    names = {name for panel in plot.read([run], [], count=1).values() for name in panel}
    assert names.isdisjoint(wanted)


def test_runs_are_told_apart(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "run"
    shutil.copytree(run, other)
    assert plot.names_of([tmp_path, other / "metrics.json"]) == [tmp_path.name, "run"]
    both = plot.read([run, other], ["lr"], count=1)
    assert [*both["lr"]] == [str(run), str(other)]


def test_of_several_runs_each_metric_has_a_panel_and_each_run_one_colour(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    rows = [{"iteration": i, "total_loss": 2.0, "nll": 1.0} for i in range(3)]
    (other / "metrics.json").write_text("\n".join(map(json.dumps, rows)))
    panels = plot.read([run, other], [], count=1)
    assert {title: [*panel] for title, panel in panels.items()} == {
        "total_loss": ["run", "other"],
        "classification/accuracy": ["run"],
        "grad_norm": ["run"],
        "nll": ["other"],
        "lr": ["run"],
        "time": ["run"],
    }
    colours = set()
    monkeypatch.setattr(
        "matplotlib.axes.Axes.legend",
        lambda ax, **_: colours.update(
            (line.get_label(), line.get_color()) for line in ax.lines
        ),
    )
    plot.picture(panels, "both", tmp_path / "both.png", log=False)
    assert colours == {("run", "C0"), ("other", "C1")}
    text = plot.text(panels, "both", log=False, columns=60)
    assert [text.count(key) for key in ("* run", "+ other")] == [5, 2]


def test_a_picture_has_the_format_of_its_name(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    begins = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.html": b"<!doctype html>\n"}
    for name, begin in begins.items():
        arguments = [str(run), "--out", str(run / name), "--log", "--smooth", "2"]
        assert plot.main(arguments) == 0
        assert (run / name).read_bytes().startswith(begin)


def test_in_a_terminal_it_is_drawn_by_characters() -> None:
    panels = {
        "losses": {
            "a": plot.Line([(0, 1.0), (10, 1000.0)]),
            "b": plot.Line([(5, 10.0), (5, float("nan"))]),
        },
        "results": {"c": plot.Line([(5, 99.0), (10, 98.0), (10, 98.0)])},
    }
    losses, results = plot.text(panels, "run", log=True, columns=34).split("\n\n")[1:]
    assert losses.splitlines() == [
        "            losses",
        "      1000 +                    *",
        "           |",
        "           |",
        "       100 +",
        "           |",
        "           |",
        "        10 +          +",
        "           |",
        "           |",
        "         1 +*",
        "           ++---+---+---+---+---+",
        "            0   2   4   6   8  10",
        "            * a",
        "            + b (1 of 2 not finite)",
    ]
    assert results.splitlines()[0].strip() == "results"
    assert results.splitlines()[1] == "        99 +          *"


@pytest.mark.parametrize("options", [[], ["--text"]])
def test_without_matplotlib_it_says_what_a_picture_needs(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert plot.main([str(run), *options]) == 0
    printed = capsys.readouterr().out
    assert "* total_loss" in printed
    assert ("pip install 'hooktrain[plot]'" in printed) == (not options)


def test_of_equal_lines_the_first_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [(0, 1.0), (10, 2.0)]
    panels = {"results": {"AP": plot.Line(line), "APs": plot.Line(line)}}
    drawn = plot.text(panels, "run", log=False, columns=34).split("* AP")[0]
    assert drawn.count("*") == 2
    heights = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.legend",
        lambda ax, **_: heights.extend(line.get_zorder() for line in ax.lines),
    )
    plot.picture(panels, "run", tmp_path / "run.png", log=False)
    assert heights[0] > heights[1]


def test_a_closed_pipe_is_no_error(run: Path) -> None:
    command = f"{sys.executable} {plot.__file__} {run} --text | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "No such file or directory: 'nowhere'"),
        (["RUN", "--metrics", "lr", "grad_nrom"], "did you mean 'grad_norm'?"),
        (["RUN", "--metrics", "xyz"], "there is 'classification/accuracy', "),
        (["RUN", "--smooth", "0"], "--smooth must be at least 1, got 0"),
        (["RUN", "--text", "--out", "a.png"], "a picture needs matplotlib"),
    ],
)
def test_a_mistake_is_a_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        plot.main([each.replace("RUN", str(run)) for each in arguments])
    assert text in capsys.readouterr().err


def test_it_is_drawn_again_until_the_user_ends_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert plot.main([str(run), "--text", "--watch", "5"]) == 0
    assert waited == [5.0, 5.0]
    assert capsys.readouterr().out.count("losses") == 2
    waited.clear()
    assert plot.main([str(run), "--watch", "--out", str(run / "a.html")]) == 0
    assert '<meta http-equiv="refresh" content="10.0">' in (run / "a.html").read_text()


def test_a_run_without_metrics_so_far_is_waited_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "metrics.json"
    steps = [
        lambda: file.rename(run / "later"),
        lambda: file.touch(),
        lambda: (run / "later").replace(file),
    ]

    def sleep(_: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr(time, "sleep", sleep)
    assert plot.main([str(run), "--text", "--watch"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("* total_loss") == 2
    assert printed.count("No such file") == printed.count("has no line of JSON") == 1


def test_the_user_ends_it_while_it_draws(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "text", interrupted)
    assert plot.main([str(run), "--text", "--watch"]) == 0
