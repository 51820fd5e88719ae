"""Which settings of an optimizer a checkpoint overrules."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

__all__ = ["overrule_settings"]

logger = logging.getLogger(__name__)


# Settings of torch's optimizers that choose a kernel, not what it computes. How to compute is a
# matter of the device here, not of the run.
IMPLEMENTATION = ("foreach", "fused", "capturable")


def overrule_settings(
    built: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The parameter groups to load; logs a table of the settings that the checkpoint changes.

    Args:
        built: the parameter groups of the optimizer.
        saved: those of the checkpoint, in the same order.
    """
    rows = []
    for i, (ours, theirs) in enumerate(zip(built, saved, strict=True)):
        # A schedule moves lr all the time; initial_lr is what the configuration said.
        moving = {"params", "param_names", *(["lr"] if "initial_lr" in theirs else [])}
        base = {"initial_lr": ours.get("initial_lr", ours["lr"])} if "lr" in ours else {}
        for key, value in {**ours, **base}.items():
            if key not in (*moving, *IMPLEMENTATION) and theirs.get(key, value) != value:
                rows.append([i, key, value, theirs[key]])
    if rows:
        table = tabulate(rows, ["group", "setting", "configured", "checkpoint (used)"], "pipe")
        logger.warning("The checkpoint overrules settings of the optimizer:\n%s", table)
    return [
        {**theirs, **{key: ours[key] for key in IMPLEMENTATION if key in ours}}
        for ours, theirs in zip(built, saved, strict=True)
    ]
