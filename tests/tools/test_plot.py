"""tools/plot.py, run in this process: what it reads, draws and says."""

import json
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
    assert panels["losses"] == {"total_loss": losses}
    assert panels["results"] == {"classification/accuracy": [(3, 50.0)]}
    assert list(panels["others"]) == ["grad_norm"]
    assert plot.read([run], ["loss"], count=2) == {"losses": {"loss": losses}}


def test_a_picture_has_the_format_of_its_name(run: Path) -> None:
    begins = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.html": b"<!doctype html>\n"}
    for name, begin in begins.items():
        assert plot.main([str(run), "--out", str(run / name), "--log"]) == 0
        assert (run / name).read_bytes().startswith(begin)


def test_in_a_terminal_it_is_drawn_by_characters() -> None:
    panels = {
        "losses": {"a": [(0, 1.0), (10, 100.0)], "b": [(5, 10.0), (5, float("nan"))]},
        "results": {"c": [(10, 98.0), (10, 98.0), (5, 99.0)]},
    }
    assert plot.text(panels, log=True, columns=33, rows=19).splitlines() == [
        "            losses",
        "       100 |                    *",
        "           |",
        "           |          +",
        "           |",
        "         1 |*",
        "           + iterations 0 to 10 -",
        "            * a",
        "            + b",
        "",
        "            results",
        "        99 |          *",
        "           |",
        "           |",
        "           |",
        "        98 |                    *",
        "           + iterations 0 to 10 -",
        "            * c",
    ]


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
