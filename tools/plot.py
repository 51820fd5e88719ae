"""Draw the metrics of one run or of several: a picture, or characters without matplotlib.

    python tools/plot.py output/digits_cnn                     # output/digits_cnn/metrics.png
    python tools/plot.py RUN RUN --metrics total_loss lr --smooth 10 --out compared.svg
    python tools/plot.py RUN --watch                           # again every ten seconds

A run is its folder, or its metrics.json. There is a panel for losses, results, rates and times.
"""

import argparse
import math
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

MARKS = "*+o#x@%&"
WIDTH, HEIGHT = 78, 12


def panel_of(metric: str) -> str:
    """The title of the panel that a metric belongs to."""
    if "loss" in metric.lower():
        return "losses"
    if metric.rpartition(".")[2] in ("lr", "momentum"):
        return "rates"
    return "times" if metric.endswith(("time", "_seconds")) else "results"


def read(runs: list[Path], wanted: list[str], window: int) -> Panels:
    """The lines of all panels.

    Args:
        runs: folders, or files that JSONWriter has written.
        wanted: the metrics to show; none shows all but the remaining time.
        window: each point becomes the mean of this many, the last of which it is.
    """
    panels: Panels = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in load_json_metrics(run / "metrics.json" if run.is_dir() else run):
            for name in wanted or row.keys() - {"iteration", "eta_seconds"}:
                if name in row:
                    line = f"{run.name}: {name}" if len(runs) > 1 else name
                    panels[panel_of(name)][line].append((row["iteration"], row[name]))
    found = {title: panels[title] for title in sorted(panels)}
    return {
        title: {name: smoothed(sorted(points), window) for name, points in sorted(lines.items())}
        for title, lines in found.items()
    }


def smoothed(points: Points, window: int) -> Points:
    """The mean of the last ``window`` points at each point; fewer at the beginning."""
    values = [value for _, value in points]
    means = [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    return [(iteration, mean) for (iteration, _), mean in zip(points, means, strict=True)]


def picture(panels: Panels, path: Path, log: bool) -> None:
    """Draw into a file: .png, .svg, .pdf, or .html with the drawing in it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3 * len(panels)), layout="constrained")
    axes: Any = figure.subplots(len(panels), squeeze=False)
    for ax, (title, lines) in zip(axes[:, 0], panels.items(), strict=True):
        for name, points in lines.items():
            ax.plot(*zip(*points, strict=True), ".-" if len(points) < 30 else "-", label=name)
        ax.set(title=title, xlabel="iteration", yscale="log" if log else "linear")
        ax.grid(alpha=0.3)
        ax.legend(fontsize="small")
    if path.suffix != ".html":
        figure.savefig(path, dpi=120)
        return
    drawing = StringIO()
    figure.savefig(drawing, format="svg")
    path.write_text(f"<!doctype html>\n<title>{path.stem}</title>\n{drawing.getvalue()}")


def characters(title: str, lines: dict[str, Points], log: bool) -> str:
    """A panel for a terminal: a mark is the mean of a line's points in its column."""
    columns: dict[str, dict[int, list[float]]] = {}
    iterations = [iteration for points in lines.values() for iteration, _ in points]
    first, length = min(iterations), max(max(iterations) - min(iterations), 1)
    for name, points in lines.items():
        columns[name] = defaultdict(list)
        for iteration, value in points:
            if math.isfinite(value) and (value > 0 or not log):
                place = (iteration - first) * (WIDTH - 1) // length
                columns[name][place].append(math.log10(value) if log else value)
    means = {name: {x: fmean(ys) for x, ys in column.items()} for name, column in columns.items()}
    shown = [y for column in means.values() for y in column.values()] or [0.0]
    low, high = min(shown), max(shown)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, column in zip(MARKS * len(means), means.values(), strict=False):
        for x, y in column.items():
            grid[round((high - y) / ((high - low) or 1) * (HEIGHT - 1))][x] = mark
    ends = [f"{10**y if log else y:.4g}" for y in (high, low)]
    rows = ["|" + "".join(row) for row in grid]
    legend = [f"  {MARKS[i % len(MARKS)]} {name}" for i, name in enumerate(means)]
    axis = f"+{f' iterations {first} to {max(iterations)} ':-^{WIDTH}}"
    return "\n".join([f"{title}, from {ends[1]} to {ends[0]}", *rows, axis, *legend])


def main(arguments: list[str] | None = None) -> int:
    """Draw, once or again and again; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="output folders, or files metrics.json")
    add("--metrics", nargs="+", default=[], help="what to show; all by default")
    add("--smooth", type=int, default=1, metavar="N", help="show means of N points")
    add("--log", action="store_true", help="logarithmic scale")
    add("--out", type=Path, help="the picture: .png, .svg, .pdf or .html")
    add("--text", action="store_true", help="characters in the terminal, and no picture")
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
    while True:
        try:
            panels = read(args.runs, args.metrics, args.smooth)
            if not panels:
                what = f"none of {args.metrics}" if args.metrics else "no metrics"
                raise ValueError(f"{what} in {[*map(str, args.runs)]}")
            if not is_text:
                picture(panels, path, args.log)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        if is_text:
            print("\n\n".join(characters(t, lines, args.log) for t, lines in panels.items()))
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
