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
        "optimizer": state["optimizer"],
        "hooks": hooks,
        "seed": meta.get("seed"),
    }
    return {"model": model, "trainer": trainer, "iteration": last}


def to_mmengine(
    state: Mapping[str, Any],
    epoch_length: int | None = None,
    *,
    paramwise_cfg: bool = False,
    ema: bool = True,
) -> dict[str, Any]:
    """A checkpoint of a trainer or of a strategy as MMEngine's, which strategies load too.

    Save the result; ``Runner(..., load_from=path, resume=True)`` of MMEngine goes on with it.

    Args:
        state: is not changed.
        epoch_length: ``len(loader)``. MMEngine's runner needs it.
        paramwise_cfg: whether the optimizer there has one, and so a group for each parameter.
        ema: an average is saved as its EMAHook does, as the model. False leaves it out, as
            for a strategy.
    """
    if "trainer" not in state:
        state = from_mmengine(state)
    trainer = state["trainer"]
    model = dict(state["model"])
    converted: dict[str, Any] = {"state_dict": model}
    if ema and "EMA" in trainer["hooks"]:
        average = dict(trainer["hooks"]["EMA"])
        converted["ema_state_dict"] = average
        _swap(model, average)
    optimizer = dict(trainer["optimizer"])
    if "grad_scaler" in optimizer:
        optimizer["loss_scaler"] = optimizer["grad_scaler"]
    hook = trainer["hooks"].get("LRScheduler", {})
    schedulers = hook.get("schedulers", {})
    schedulers = schedulers.get("", schedulers)
    if paramwise_cfg:
        groups = _groups_of_one(optimizer["param_groups"], model)
        optimizer["param_groups"] = [group for _, group in groups]
        homes = [home for home, _ in groups]
        schedulers = [_for_groups(each, homes) for each in schedulers]
    done = trainer["iteration"] + 1
    meta = {"iter": done, "seed": trainer.get("seed")}
    if epoch_length is not None:
        meta["epoch"] = done // epoch_length
    return {
        **converted,
        "optimizer": optimizer,
        "param_schedulers": schedulers,
        "message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}},
        "meta": meta,
    }


def _swap(model: dict[str, Any], average: dict[str, Any]) -> None:
    """Exchange the raw weights and the averaged ones."""
    for name, value in model.items():
        key = f"module.{name}"
        model[name] = average[key]
        average[key] = value


def _groups_of_one(
    groups: Sequence[dict[str, Any]], model: Mapping[str, Any]
) -> list[tuple[int, dict[str, Any]]]:
    """A group for each parameter, in the model's order, with the place of its old one."""
    split = {}
    for home, group in enumerate(groups):
        for name in group["params"]:
            split[name] = home, {**group, "params": [name]}
    return [split[name] for name in model if name in split]


def _for_groups(scheduler: Mapping[str, Any], homes: Sequence[int]) -> dict[str, Any]:
    state = dict(scheduler)
    for key in ("base_values", "_last_value"):
        values = state[key]
        state[key] = [values[home] for home in homes]
    return state
