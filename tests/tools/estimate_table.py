"""Print the table of docs/estimate.md: estimates beside the peaks of real trainings.

python tests/tools/estimate_table.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from estimating import BF16, MODELS, configuration, lowest_peak, samples, sharded
from loading import load_tool
from tabulate import tabulate

COMMON = ("train.accumulative_counts=2", "train.ema.enabled=True")
PRECISIONS: dict[str, tuple[str, ...]] = {"float32": (), "bfloat16": BF16}
UNITS = {"MLP": "Linear", "CNN": "Conv2d"}


def settings(model: str, ranks: int, is_sharded: bool) -> list[str]:
    """The changes of the configuration: samples for each rank, the units that are recomputed and
    sharded."""
    unit = UNITS.get(model, "Block")
    changes = [samples(model, ranks), f"train.activation_checkpointing=['{unit}']"]
    if is_sharded:
        changes.append(sharded(unit))
    return changes


def measured(
    model: str, ranks: int, is_sharded: bool, precision: str
) -> tuple[str, ...]:
    """The real peak, the estimate, and how they differ."""
    tool = load_tool("estimate_rank")
    changes = [*settings(model, ranks, is_sharded), *COMMON, *PRECISIONS[precision]]
    with tool.pretended(ranks, "cpu") as (fakes, watch):
        tool.Rank(configuration(model, *changes), fakes, watch).parts_at_peak()
        peak = watch.peak
    real = lowest_peak(model, ranks, changes, peak)
    return f"{real / 2**20:.2f}", f"{peak / 2**20:.2f}", f"{peak / real - 1:+.1%}"


def main() -> None:
    """Measure and print."""
    rows = []
    for model in MODELS:
        for ranks, is_sharded in (
            (1, False),
            (2, False),
            (2, True),
            (4, False),
            (4, True),
        ):
            row = [model, ranks, "sharded" if is_sharded else "whole"]
            for precision in PRECISIONS:
                row += measured(model, ranks, is_sharded, precision)
            rows.append(row)
    columns = ["MiB", "estimate", "differs"]
    headers = ["model", "ranks", "", *(f"{p} {c}" for p in PRECISIONS for c in columns)]
    print(tabulate(rows, headers, tablefmt="github"))  # noqa: T201


if __name__ == "__main__":
    main()
