"""Draw the metrics of one run or of several: a picture, or characters without matplotlib.

    python tools/plot.py output/digits_cnn                     # output/digits_cnn/metrics.png
    python tools/plot.py RUN RUN --metrics total_loss lr --smooth 10 --out compared.svg
    python tools/plot.py RUN --watch                           # again every ten seconds

A run is its folder, or its metrics.json. There is a panel for losses, results of evaluations, other
metrics, rates and times.
"""

import argparse
import math
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from hooktrain.events import load_json_metrics
from hooktrain.utils.names import is_loss

Points = list[tuple[int, float]]
Panels = dict[str, dict[str, Points]]  # by title, then by the name of the line

TITLES = ["losses", "results", "others", "rates", "times in seconds"]
MARKS = "*+o#x@%&"


def panel_of(metric: str) -> str:
    """The title of the panel that a metric belongs to."""
    if is_loss(metric):
        return "losses"
    if metric.rpartition(".")[2] in ("lr", "momentum"):
        return "rates"
    if metric.endswith(("time", "_seconds")):
        return "times in seconds"
    return "results" if "/" in metric else "others"


def read(runs: list[Path], wanted: list[str], count: int) -> Panels:
    """The lines of all panels.

    Args:
        runs: folders, or files that JSONWriter has written.
        wanted: the metrics to show; none shows all but the remaining time, and a loss that is the
            total loss.
        count: each point becomes the mean of this many, the last of which it is.
    """
    panels: Panels = defaultdict(dict)
    for run in runs:
        lines = read_run(run, wanted)
        total = lines.get("total_loss")
        for name, points in sorted(lines.items()):
            is_total = points == total and name != "total_loss"
            if is_total and not wanted:
                continue
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            panels[panel_of(name)][label] = smoothed(sorted(points), count)
    return {title: panels[title] for title in TITLES if title in panels}


def read_run(run: Path, wanted: list[str]) -> dict[str, Points]:
    """The points of each metric of one run."""
    lines: dict[str, Points] = defaultdict(list)
    file = run / "metrics.json" if run.is_dir() else run
    for row in load_json_metrics(file):
        iteration = row.pop("iteration")
        row.pop("eta_seconds", None)
        for name, value in row.items():
            if not wanted or name in wanted:
                lines[name].append((iteration, value))
    return lines


def smoothed(points: Points, count: int) -> Points:
    """The mean of the last ``count`` points at each point; fewer at the beginning."""
    means: Points = []
    for end, (iteration, _) in enumerate(points, 1):
        last = points[max(0, end - count) : end]
        means.append((iteration, fmean(value for _, value in last)))
    return means


def spans_decades(lines: dict[str, Points]) -> bool:
    """Whether a logarithmic scale shows more: nothing is negative, and much is small."""
    values = [value for points in lines.values() for _, value in points]
    finite = [value for value in values if math.isfinite(value)]
    positive = [value for value in finite if value > 0] or [1.0]
    is_wide = max(positive) > 10 * min(positive)
    return is_wide and min(finite) >= 0


def picture(
    panels: Panels, path: Path, log: bool, refresh: float | None = None
) -> None:
    """Draw into a file: .png, .svg, .pdf, or .html with the drawing in it.

    A browser loads the .html again every ``refresh`` seconds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.5 * len(panels)), layout="constrained")
    axes: Any = figure.subplots(len(panels), squeeze=False, sharex=True)
    for ax, (title, lines) in zip(axes[:, 0], panels.items(), strict=True):
        for name, points in lines.items():
            style = ".-" if len(points) < 30 else "-"
            ax.plot(*zip(*points, strict=True), style, label=name)
        ax.set(title=title, yscale="log" if log and spans_decades(lines) else "linear")
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


def text(panels: Panels, log: bool, columns: int, rows: int) -> str:
    """All panels for a terminal of that size, with the same iterations in each column."""
    everything = [points for panel in panels.values() for points in panel.values()]
    iterations = [iteration for points in everything for iteration, _ in points]
    height = max(5, (rows - len(everything)) // len(panels) - 3)
    grid = Grid(min(iterations), max(iterations), columns - 12, height)
    drawn = [grid.draw(title, lines, log) for title, lines in panels.items()]
    return "\n\n".join(drawn)


@dataclass
class Grid:
    """The characters of a panel, from the first to the last iteration."""

    first: int
    last: int
    width: int
    height: int

    def draw(self, title: str, lines: dict[str, Points], log: bool) -> str:
        """A panel: a mark is the mean of a line's points in its column."""
        log = log and spans_decades(lines)
        means = [self.means(points, log) for points in lines.values()]
        shown = [y for column in means for y in column.values()] or [0.0]
        low = min(shown)
        high = max(shown)
        rows = [[" "] * self.width for _ in range(self.height)]
        for mark, column in zip(cycle(MARKS), means, strict=False):
            for x, y in column.items():
                part = (high - y) / ((high - low) or 1)
                rows[round(part * (self.height - 1))][x] = mark
        labels = [""] * self.height
        labels[-1] = f"{10**low if log else low:.4g}"
        labels[0] = f"{10**high if log else high:.4g}"
        drawn = [f"{'':12}{title}"]
        for label, row in zip(labels, rows, strict=True):
            drawn.append(f"{label:>10} |{''.join(row)}".rstrip())
        range_ = f" iterations {self.first} to {self.last} "
        drawn.append(f"{'':10} +{range_:-^{self.width}}")
        for mark, name in zip(cycle(MARKS), lines, strict=False):
            drawn.append(f"{'':12}{mark} {name}")
        return "\n".join(drawn)

    def means(self, points: Points, log: bool) -> dict[int, float]:
        """The mean of the points in each column, or of their logarithms."""
        columns: dict[int, list[float]] = defaultdict(list)
        for iteration, value in points:
            is_shown = math.isfinite(value) and (value > 0 or not log)
            if is_shown:
                length = max(self.last - self.first, 1)
                x = (iteration - self.first) * (self.width - 1) // length
                columns[x].append(math.log10(value) if log else value)
        return {x: fmean(values) for x, values in columns.items()}


def main(arguments: list[str] | None = None) -> int:
    """Draw, once or again and again; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="output folders, or files metrics.json")
    add("--metrics", nargs="+", default=[], help="what to show; all by default")
    add("--smooth", type=int, default=1, metavar="N", help="show means of N points")
    add(
        "--log",
        action="store_true",
        help="logarithmic scale where values differ tenfold",
    )
    add("--out", type=Path, help="the picture: .png, .svg, .pdf or .html")
    add(
        "--text", action="store_true", help="characters in the terminal, and no picture"
    )
    again = "draw again every so many seconds, 10 by default"
    add("--watch", nargs="?", type=float, const=10.0, metavar="SECONDS", help=again)
    args = parser.parse_args(arguments)
    if args.smooth < 1:
        parser.error(f"--smooth must be at least 1, got {args.smooth}")
    is_text = args.text or find_spec("matplotlib") is None
    if is_text and args.out:
        parser.error("a picture needs matplotlib: pip install 'hooktrain[plot]'")
    first: Path = args.runs[0]
    path = args.out or (first if first.is_dir() else first.parent) / "metrics.png"
    clear = "" if args.watch is None or not sys.stdout.isatty() else "\033[H\033[2J"
    while True:
        try:
            panels = read(args.runs, args.metrics, args.smooth)
            if not panels:
                what = f"none of {args.metrics}" if args.metrics else "no metrics"
                raise ValueError(f"{what} in {[*map(str, args.runs)]}")
            if not is_text:
                picture(panels, path, args.log, args.watch)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        if is_text:
            columns, rows = shutil.get_terminal_size((80, 60))
            print(clear + text(panels, args.log, columns, rows))
        else:
            print(path)
        if args.watch is None:
            return 0
        try:
            time.sleep(args.watch)
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
