"""tools/plot.py, run in this process: what it reads, draws and says."""

import json
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
        "            + b",
    ]
    assert results.splitlines()[0].strip() == "results"
    assert results.splitlines()[1] == "        99 +          *"


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
        (["RUN", "--metrics", "acuracy"], "none of ['acuracy'] in"),
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
