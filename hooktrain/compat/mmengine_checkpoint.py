"""Checkpoints of MMEngine, loaded and converted."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hooktrain import checkpoint
from hooktrain.utils.file_io import AnyPath


def load_checkpoint(
    model: nn.Module,
    filename: AnyPath,
    map_location: Any = None,
    strict: bool = False,
    logger: Any = None,
    revise_keys: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """:func:`hooktrain.checkpoint.load_checkpoint` with MMEngine's arguments.

    Args:
        model: see there.
        filename: see there.
        map_location: see there; None is where each tensor was.
        strict: see there.
        logger: not used. This package's logger warns of what does not fit.
        revise_keys: see there.
    """
    return checkpoint.load_checkpoint(
        model, filename, map_location, strict, revise_keys
    )


def from_mmengine(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of MMEngine, or of a strategy, as a trainer's.

    Save the result, and ``checkpointer.load(path)`` goes on with the run. What pickles
    other objects (``"message_hub"``, most of ``"meta"``) is left out. Where MMEngine's
    EMAHook has saved the average as the model, the result has the raw weights as the
    model, and the average in the state of the hook ``EMA``.

    Args:
        state: is not changed. Its ``meta["iter"]`` is the number of finished iterations.

    Raises:
        KeyError: if it lacks the model, the optimizer or ``meta["iter"]``.
    """
    key = "model" if "model" in state else "state_dict"
    model = dict(state[key])
    hooks: dict[str, Any] = {}
    if "ema_state_dict" in state:
        average = dict(state["ema_state_dict"])
        for name, averaged in model.items():
            key = f"module.{name}"
            model[name] = average[key]
            average[key] = averaged
        hooks["EMA"] = average
    schedulers = state.get("param_schedulers")
    if isinstance(schedulers, list):
        schedulers = {"": schedulers}
    if schedulers:
        hooks["LRScheduler"] = {"schedulers": schedulers}
    meta = state["meta"]
    last = meta["iter"] - 1
    trainer = {
        "iteration": last,
        "optimizer": state["optimizer"],
        "hooks": hooks,
        "seed": meta.get("seed"),
    }
    return {"model": model, "trainer": trainer, "iteration": last}


def to_mmengine(state: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's checkpoint as MMEngine's, which strategies load too.

    Args:
        state: is not changed.
    """
    trainer = state["trainer"]
    hook = trainer["hooks"].get("LRScheduler", {})
    schedulers = hook.get("schedulers", {})
    return {
        "state_dict": state["model"],
        "optimizer": trainer["optimizer"],
        "param_schedulers": schedulers.get("", schedulers),
        "meta": {"iter": trainer["iteration"] + 1, "seed": trainer.get("seed")},
    }
