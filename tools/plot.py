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
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from hooktrain.utils.events import load_json_metrics

Points = list[tuple[int, float]]
Panels = dict[str, dict[str, Points]]  # by title, then by the name of the line

TITLES = ["losses", "results", "others", "rates", "times in seconds"]
MARKS = "*+o#x@%&"


def panel_of(metric: str) -> str:
    """The title of the panel that a metric belongs to."""
    if "loss" in metric.lower():
        return "losses"
    if metric.rpartition(".")[2] in ("lr", "momentum"):
        return "rates"
    if metric.endswith(("time", "_seconds")):
        return "times in seconds"
    return "results" if "/" in metric else "others"


def read(runs: list[Path], wanted: list[str], window: int) -> Panels:
    """The lines of all panels.

    Args:
        runs: folders, or files that JSONWriter has written.
        wanted: the metrics to show; none shows all but the remaining time, and a loss that is the
            total loss.
        window: each point becomes the mean of this many, the last of which it is.
    """
    panels: Panels = defaultdict(dict)
    for run in runs:
        lines: dict[str, Points] = defaultdict(list)
        for row in load_json_metrics(run / "metrics.json" if run.is_dir() else run):
            for name in wanted or row.keys() - {"iteration", "eta_seconds"}:
                if name in row:
                    lines[name].append((row["iteration"], row[name]))
        for name, points in sorted(lines.items()):
            if wanted or name == "total_loss" or points != lines.get("total_loss"):
                label = f"{run.name}: {name}" if len(runs) > 1 else name
                panels[panel_of(name)][label] = smoothed(sorted(points), window)
    return {title: panels[title] for title in TITLES if title in panels}


def smoothed(points: Points, window: int) -> Points:
    """The mean of the last ``window`` points at each point; fewer at the beginning."""
    values = [value for _, value in points]
    means = [
        fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]
    return [
        (iteration, mean) for (iteration, _), mean in zip(points, means, strict=True)
    ]


def spans_decades(lines: dict[str, Points]) -> bool:
    """Whether a logarithmic scale shows more: nothing is negative, and much is small."""
    values = [
        value
        for points in lines.values()
        for _, value in points
        if math.isfinite(value)
    ]
    positive = [value for value in values if value > 0] or [1.0]
    return min(values, default=-1) >= 0 and max(positive) > 10 * min(positive)


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
            ax.plot(
                *zip(*points, strict=True),
                ".-" if len(points) < 30 else "-",
                label=name,
            )
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
    path.write_text(
        f"<!doctype html>\n<title>{path.stem}</title>\n{again}{drawing.getvalue()}"
    )


def text(panels: Panels, log: bool, columns: int, rows: int) -> str:
    """All panels for a terminal of that size, with the same iterations in each column."""
    everything = [lines for panel in panels.values() for lines in panel.values()]
    iterations = [iteration for points in everything for iteration, _ in points]
    ends = min(iterations), max(iterations)
    height = max(5, (rows - len(everything)) // len(panels) - 3)
    size = columns - 12, height
    return "\n\n".join(
        characters(t, lines, log, ends, size) for t, lines in panels.items()
    )


def characters(
    title: str,
    lines: dict[str, Points],
    log: bool,
    ends: tuple[int, int],
    size: tuple[int, int],
) -> str:
    """A panel of so many columns and rows: a mark is the mean of a line's points in its column."""
    (first, last), (width, height), log = ends, size, log and spans_decades(lines)
    means: dict[str, dict[int, float]] = {}
    for name, points in lines.items():
        column: dict[int, list[float]] = defaultdict(list)
        for iteration, value in points:
            if math.isfinite(value) and (value > 0 or not log):
                place = (iteration - first) * (width - 1) // max(last - first, 1)
                column[place].append(math.log10(value) if log else value)
        means[name] = {x: fmean(ys) for x, ys in column.items()}
    shown = [y for column in means.values() for y in column.values()] or [0.0]
    low, high = min(shown), max(shown)
    grid = [[" "] * width for _ in range(height)]
    for mark, column in zip(MARKS * len(means), means.values(), strict=False):
        for x, y in column.items():
            grid[round((high - y) / ((high - low) or 1) * (height - 1))][x] = mark
    labels = {
        y: f"{10**v if log else v:.4g}" for y, v in ((height - 1, low), (0, high))
    }
    drawn = [
        f"{labels.get(y, ''):>10} |{''.join(row)}".rstrip()
        for y, row in enumerate(grid)
    ]
    legend = [
        f"{'':10}  {MARKS[i % len(MARKS)]} {name}" for i, name in enumerate(means)
    ]
    axis = f"{'':10} +{f' iterations {first} to {last} ':-^{width}}"
    return "\n".join([f"{'':12}{title}", *drawn, axis, *legend])


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
