"""Loads and converts MMEngine's checkpoints."""

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
        model: see that function.
        filename: see that function.
        map_location: see that function; None is the device of each saved tensor.
        strict: see that function.
        logger: not used. This package's logger warns about mismatches.
        args: see that function.
        kwargs: see that function.
    """
    return checkpoint.load_checkpoint(
        model, filename, map_location, strict, *args, **kwargs
    )


def from_mmengine(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint of MMEngine, or of a strategy, to a trainer's.

    Save the result, and resume the run from it by ``checkpointer.load(path)``. Entries with other
    objects (``"message_hub"``, most of ``"meta"``) are dropped. If MMEngine's
    EMAHook has saved the average as the model, the result has the raw weights as the
    model, and the average in the state of the hook ``EMA``.

    Args:
        state: the checkpoint, which is not changed. Its ``meta["iter"]`` is the number of finished
            iterations.

    Raises:
        KeyError: if the model, the optimizer or ``meta["iter"]`` is missing.
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
    """Convert a checkpoint of a trainer or a strategy to MMEngine's, which strategies load too.

    Save the result; MMEngine's ``Runner(..., load_from=path, resume=True)`` resumes from it,
    unless its optimizer has a ``paramwise_cfg``, and thus a group for each parameter.

    Args:
        state: the checkpoint, which is not changed.
        epoch_length: ``len(loader)``, which MMEngine's runner needs.
        ema: whether to save an average as the model, as MMEngine's EMAHook does. False drops the
            average, as for a strategy.
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
    """Swap the raw weights and the averaged ones."""
    for name, value in model.items():
        key = f"module.{name}"
        model[name] = average[key]
        average[key] = value
