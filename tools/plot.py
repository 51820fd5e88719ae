"""Plot the metrics of one or several runs, as a picture or as text in the terminal.

    python tools/plot.py output/digits_cnn                     # output/digits_cnn/metrics.png
    python tools/plot.py RUN RUN --metrics total_loss lr --smooth 10 --out compared.svg
    python tools/plot.py RUN --watch                           # again every ten seconds

RUN is the folder of a run, or a file metrics.json. The results of `hooktrain eval --follow`, in
eval/metrics.json in the folder, are drawn with the run's. A single run has panels for losses,
results of evaluations, other metrics, learning rates and times. Several runs have a panel for each
metric, in which a run always has the same colour.
"""

import argparse
import math
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from hooktrain.events import load_json_metrics
from hooktrain.utils.names import did_you_mean, is_loss

Points = list[tuple[int, float]]


@dataclass
class Line:
    """The values of a metric of a run, and the points that are drawn."""

    values: Points
    count: int = 1  # each point is drawn as the mean of this many points, up to itself
    run: int | None = None  # the run whose colour and mark it has; None for its own

    @property
    def points(self) -> Points:
        """The points that are drawn: iterations, and means of the finite values."""
        means: Points = []
        for end, (iteration, _) in enumerate(self.values, 1):
            last = self.values[max(0, end - self.count) : end]
            finite = [value for _, value in last if math.isfinite(value)]
            means.append((iteration, fmean(finite) if finite else math.nan))
        return means

    def describe(self, label: str) -> str:
        """The label, with the number of values that cannot be drawn."""
        missing = sum(not math.isfinite(value) for _, value in self.values)
        if not missing:
            return label
        return f"{label} ({missing} of {len(self.values)} not finite)"


Panel = dict[str, Line]  # by label
Panels = dict[str, Panel]  # by title

TITLES = ["losses", "results", "others", "rates", "times in seconds"]
MARKS = "*+o#x@%&"
ROWS = 10  # the height of a text panel
DERIVED = ("eta_seconds", "mean_loss")  # metrics that are shown only on demand


def panel_of(metric: str, is_seldom: bool) -> str:
    """The title of the panel that a metric belongs to."""
    if is_loss(metric):
        return "losses"
    if metric.rpartition(".")[2] in ("lr", "momentum"):
        return "rates"
    if metric.endswith(("time", "_seconds")):
        return "times in seconds"
    return "results" if is_seldom or "/" in metric else "others"


def read(runs: list[Path], wanted: list[str], count: int) -> Panels:
    """The lines of all panels: for one run by kind of metric, for several runs by metric.

    Args:
        runs: folders, or files written by JSONWriter.
        wanted: the metrics to show; if empty, all except the remaining time, and losses that equal
            the total loss or its mean.
        count: the number of values over which to smooth training losses.

    Raises:
        ValueError: if there are no metrics, or no run has one of the wanted metrics.
    """
    panels: Panels = defaultdict(dict)
    kinds = {}
    found = [read_run(run) for run in runs]
    refuse_missing(wanted, {name for metrics in found for name in metrics}, runs)
    for number, (metrics, name_of_run) in enumerate(
        zip(found, names_of(runs), strict=True)
    ):
        total = metrics.get("total_loss", [])
        losses = [metrics[name] for name in metrics if is_training_loss(name)]
        of_training = total or max(losses, key=len, default=[])
        for name, points in sorted(metrics.items()):
            is_total = points == total and name != "total_loss"
            is_derived = name in DERIVED or is_total
            if name not in wanted if wanted else is_derived:
                continue
            # Training metrics are written together, results of evaluations one by one.
            is_seldom = bool(of_training) and not is_written_with(points, of_training)
            is_smooth = is_loss(name) and not is_seldom
            line = Line(points, count if is_smooth else 1)
            title = kind = panel_of(name, is_seldom)
            label = name
            if len(runs) > 1:
                title, label, line.run = name, name_of_run, number
            kinds.setdefault(title, TITLES.index(kind))
            panels[title][label] = line
    return {title: panels[title] for title in sorted(kinds, key=lambda t: kinds[t])}


def refuse_missing(wanted: list[str], there: set[str], runs: list[Path]) -> None:
    """Raise a ValueError if no run has one of the wanted metrics, or any metric."""
    where = [*map(str, runs)]
    if not there:
        raise ValueError(f"no metrics in {where}")
    for name in wanted:
        if name not in there:
            hint = did_you_mean(name, sorted(there))
            raise ValueError(f"no metric {name!r} in {where}{hint}")


def is_training_loss(name: str) -> bool:
    """Whether a metric has the name of a training loss."""
    return is_loss(name) and "val" not in name and "/" not in name


def is_written_with(points: Points, loss: Points) -> bool:
    """Whether a metric has as many values as a training loss, and none after its last."""
    has_as_many = len(loss) - 1 <= len(points) <= len(loss)
    return has_as_many and points[-1][0] <= loss[-1][0]


def names_of(runs: list[Path]) -> list[str]:
    """The names of the folders, or their paths if two names are the same."""
    folders = [run if run.is_dir() else run.parent for run in runs]
    names = [folder.resolve().name for folder in folders]
    return names if len({*names}) == len(names) else [*map(str, folders)]


def read_run(run: Path) -> dict[str, Points]:
    """The points of each metric of one run.

    A row may lack a metric or have null for it. Values that are not numbers are skipped, and
    reported once per metric.

    Raises:
        ValueError: if the file is not a file of metrics.
    """
    points: dict[str, Points] = defaultdict(list)
    left_out = {}
    file = run / "metrics.json" if run.is_dir() else run
    beside = run / "eval" / "metrics.json"
    files = [each for each in (file, beside) if each.exists()] or [file]
    for file in files:
        refuse_other_file(file)
        for row in load_json_metrics(file):
            iteration = int(row.pop("iteration"))
            for name, value in row.items():
                if isinstance(value, int | float):
                    points[name].append((iteration, float(value)))
                elif value is not None:
                    left_out.setdefault(name, (value, iteration, file))
    for name, (value, iteration, file) in left_out.items():
        what = f"{name!r} is {value!r:.80} in iteration {iteration}"
        print(f"{file}: skipped, since it is not a number: {what}", file=sys.stderr)
    # The run and the process beside it may both have evaluated a checkpoint.
    return {name: sorted({*points[name]}) for name in points}


def refuse_other_file(file: Path) -> None:
    """Raise a ValueError for a file without any row of metrics, such as a checkpoint."""
    with file.open("rb") as lines:
        is_of_metrics = any(b'"iteration"' in line for line in lines)
    if not is_of_metrics:
        raise ValueError(
            f"{str(file)!r} has no line of JSON with an 'iteration' and metrics: pass the folder "
            "of a run, or its metrics.json"
        )


def spans_decades(panel: Panel) -> bool:
    """Whether a logarithmic scale suits the values: none is negative, and many are small."""
    values = [value for line in panel.values() for _, value in line.values]
    finite = [value for value in values if math.isfinite(value)]
    positive = [value for value in finite if value > 0] or [1.0]
    is_wide = max(positive) > 10 * min(positive)
    return is_wide and min(finite) >= 0


def picture(
    panels: Panels, title: str, path: Path, log: bool, refresh: float | None = None
) -> None:
    """Draw to a file: .png, .svg, .pdf, or .html that contains the drawing.

    A browser reloads the .html every ``refresh`` seconds.
    """
    os.environ.pop("MPLBACKEND", None)  # a backend for windows, which may not exist
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.5 * len(panels) + 0.3), layout="constrained")
    figure.suptitle(title)
    axes: Any = figure.subplots(len(panels), squeeze=False, sharex=True)
    for ax, (heading, panel) in zip(axes[:, 0], panels.items(), strict=True):
        for place, (label, line) in enumerate(panel.items()):
            style = ".-" if len(line.values) < 30 else "-"
            color = f"C{place if line.run is None else line.run}"
            points = zip(*line.points, strict=True)
            # If lines are equal, the first one is on top.
            ax.plot(
                *points,
                style,
                color=color,
                label=line.describe(label),
                zorder=3 - place / 1000,
            )
            if line.count > 1:
                single = zip(*replace(line, count=1).points, strict=True)
                ax.plot(*single, color=color, alpha=0.25)
        scale = "log" if log and spans_decades(panel) else "linear"
        ax.set(title=heading, yscale=scale)
        ax.grid(alpha=0.3)
        ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    ax.set_xlabel("iteration")
    if path.suffix != ".html":
        figure.savefig(path, dpi=120)
        return
    drawing = StringIO()
    figure.savefig(drawing, format="svg")
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    head = f"<!doctype html>\n<title>{path.stem}</title>\n{again}"
    path.write_text(head + drawing.getvalue())


def text(panels: Panels, title: str, log: bool, columns: int) -> str:
    """All panels as text for a terminal, with the same iterations in each column."""
    lines = [line for panel in panels.values() for line in panel.values()]
    iterations = [iteration for line in lines for iteration, _ in line.values]
    grid = Grid(min(iterations), max(iterations), columns - 13)
    drawn = [grid.draw(heading, panel, log) for heading, panel in panels.items()]
    return "\n\n".join([f"{'':12}{title}", *drawn])


@dataclass
class Grid:
    """A text panel, from the first to the last iteration."""

    first: int
    last: int
    width: int

    def draw(self, heading: str, panel: Panel, log: bool) -> str:
        """Draw a panel, in which a mark is the mean of a line's points in its column."""
        log = log and spans_decades(panel)
        marks = [
            MARKS[(place if line.run is None else line.run) % len(MARKS)]
            for place, line in enumerate(panel.values())
        ]
        means = [self.means(line.points, log) for line in panel.values()]
        shown = [y for column in means for y in column.values()] or [0.0]
        low = min(shown)
        high = max(shown)
        rows = [[" "] * self.width for _ in range(ROWS)]
        for mark, column in reversed([*zip(marks, means, strict=True)]):
            for x, y in column.items():  # if marks are equal, the first one is on top
                part = (high - y) / ((high - low) or 1)
                rows[round(part * (ROWS - 1))][x] = mark
        drawn = [f"{'':12}{heading}"]
        for index, row in enumerate(rows):
            y = high - (high - low) * index / (ROWS - 1)
            has_tick = index % 3 == 0 and (high > low or index == 0)
            label = f"{10**y if log else y:.4g}" if has_tick else ""
            drawn.append(f"{label:>10} {'+' if label else '|'}{''.join(row)}".rstrip())
        drawn += self.axis()
        for mark, (label, line) in zip(marks, panel.items(), strict=True):
            drawn.append(f"{'':12}{mark} {line.describe(label)}")
        return "\n".join(drawn)

    def axis(self) -> list[str]:
        """The line below a panel, and round iterations at its ticks."""
        rough = max((self.last - self.first) // 5, 1)
        power = 10 ** (len(str(rough)) - 1)
        step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough)
        line = ["-"] * self.width
        numbers = ""
        for tick in range(-(-self.first // step) * step, self.last + 1, step):
            x = self.column(tick)
            line[x] = "+"
            x = min(x, self.width - len(str(tick)))
            numbers = f"{numbers:<{x}}{tick} "
        return [f"{'':10} +{''.join(line)}", f"{'':12}{numbers.rstrip()}"]

    def column(self, iteration: int) -> int:
        """The column of an iteration."""
        length = max(self.last - self.first, 1)
        return (iteration - self.first) * (self.width - 1) // length

    def means(self, points: Points, log: bool) -> dict[int, float]:
        """The mean of the points in each column, or of their logarithms."""
        columns: dict[int, list[float]] = defaultdict(list)
        for iteration, value in points:
            is_shown = math.isfinite(value) and (value > 0 or not log)
            if is_shown:
                y = math.log10(value) if log else value
                columns[self.column(iteration)].append(y)
        return {x: fmean(values) for x, values in columns.items()}


def main(arguments: list[str] | None = None) -> int:
    """Draw, once or repeatedly; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("HOOKTRAIN_COMMAND"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="output folders, or files metrics.json")
    add("--metrics", nargs="+", default=[], help="the metrics to show; all by default")
    smooth = "show losses as means of N points, with their values faintly behind"
    add("--smooth", type=int, default=1, metavar="N", help=smooth)
    add(
        "--log",
        action="store_true",
        help="use a logarithmic scale if values differ tenfold",
    )
    add("--out", type=Path, help="the picture: .png, .svg, .pdf or .html")
    add("--text", action="store_true", help="draw text in the terminal, not a picture")
    again = "draw again every N seconds, 10 by default"
    add("--watch", nargs="?", type=float, const=10.0, metavar="SECONDS", help=again)
    args = parser.parse_args(arguments)
    if args.smooth < 1:
        parser.error(f"--smooth must be at least 1, got {args.smooth}")
    is_text = args.text or find_spec("matplotlib") is None
    if is_text and args.out:
        parser.error("a picture needs matplotlib: pip install 'hooktrain[plot]'")
    first: Path = args.runs[0]
    path = args.out or (first if first.is_dir() else first.parent) / "metrics.png"
    title = ", ".join(names_of(args.runs))
    clear = "" if args.watch is None or not sys.stdout.isatty() else "\033[H\033[2J"

    def draw() -> None:
        panels = read(args.runs, args.metrics, args.smooth)
        if is_text:
            columns, _ = shutil.get_terminal_size()
            print(clear + text(panels, title, args.log, columns))
            if not args.text:
                print("\nA picture needs matplotlib: pip install 'hooktrain[plot]'")
        else:
            picture(panels, title, path, args.log, args.watch)
            print(path)

    try:
        while True:
            try:
                draw()
            except (ArithmeticError, OSError, ValueError) as error:
                if args.watch is None:
                    parser.error(str(error))
                # A run that has just begun has no metrics so far.
                print(f"{clear}{parser.prog}: {error}")
            if args.watch is None:
                return 0
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(
            signal.SIGPIPE, signal.SIG_DFL
        )  # "| head" ends it, without an error
    sys.exit(main())
