"""Checkpoints of MMEngine, loaded and converted."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hooktrain import checkpoint
from hooktrain.compat.mmengine.optim_wrapper import with_our_names
from hooktrain.utils.file_io import AnyPath


def load_checkpoint(
    model: nn.Module,
    filename: AnyPath,
    map_location: Any = None,
    strict: bool = False,
    logger: Any = None,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """:func:`hooktrain.checkpoint.load_checkpoint` with MMEngine's arguments.

    Args:
        model: see there.
        filename: see there.
        map_location: see there; None is where each tensor was.
        strict: see there.
        logger: not used. This package's logger warns of what does not fit.
        args: see there.
        kwargs: see there.
    """
    return checkpoint.load_checkpoint(
        model, filename, map_location, strict, *args, **kwargs
    )


def from_mmengine(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of MMEngine, or of a strategy, as a trainer's.

    Save the result, and ``checkpointer.load(path)`` goes on with the run. Entries with other
    objects (``"message_hub"``, most of ``"meta"``) are left out. Where MMEngine's
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
        _swap(model, average)
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
        "optimizer": with_our_names(state["optimizer"]),
        "hooks": hooks,
        "seed": meta.get("seed"),
    }
    return {"model": model, "trainer": trainer, "iteration": last}


def to_mmengine(
    state: Mapping[str, Any], epoch_length: int | None = None, *, ema: bool = True
) -> dict[str, Any]:
    """A checkpoint of a trainer or of a strategy as MMEngine's, which strategies load too.

    Save the result; ``Runner(..., load_from=path, resume=True)`` of MMEngine goes on with it,
    unless its optimizer has a ``paramwise_cfg``, and so a group for each parameter.

    Args:
        state: is not changed.
        epoch_length: ``len(loader)``. MMEngine's runner needs it.
        ema: an average is saved as its EMAHook does, as the model. False leaves it out, as
            for a strategy.
    """
    if "trainer" not in state:
        state = from_mmengine(state)
    trainer = state["trainer"]
    done = trainer["iteration"] + 1
    meta = {"iter": done, "seed": trainer.get("seed")}
    if epoch_length is not None:
        meta["epoch"] = done // epoch_length
    optimizer = dict(trainer["optimizer"])
    if "grad_scaler" in optimizer:
        optimizer["loss_scaler"] = optimizer["grad_scaler"]
    hooks = trainer["hooks"]
    schedulers = hooks.get("LRScheduler", {}).get("schedulers", {})
    schedulers = schedulers.get("", schedulers)
    converted = {
        "meta": meta,
        "message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}},
        "state_dict": dict(state["model"]),
        "optimizer": optimizer,
        "param_schedulers": schedulers,
    }
    if ema and "EMA" in hooks:
        average = converted["ema_state_dict"] = dict(hooks["EMA"])
        _swap(converted["state_dict"], average)
    return converted


def _swap(model: dict[str, Any], average: dict[str, Any]) -> None:
    """Exchange the raw weights and the averaged ones."""
    for name, value in model.items():
        key = f"module.{name}"
        model[name] = average[key]
        average[key] = value
