"""What a checkpoint is on the disk and what it holds, from any library."""

from copy import copy
from typing import Any

import torch
from torch import nn

from hooktrain.checkpoint.agreement import on_all_ranks, on_main_process
from hooktrain.checkpoint.files import CorruptCheckpointError, is_folder, load_file, verify_file
from hooktrain.utils import comm

State = dict[str, Any]


def verify_checkpoint(path: str) -> None:
    """Read all of a file or a folder, and compare it with its checksums.

    Raises:
        CorruptCheckpointError: if it is broken.
        OSError: if it cannot be opened.
    """
    if is_folder(path):
        from hooktrain.checkpoint.folders import verify_folder

        verify_folder(path)
    else:
        verify_file(path)


def read_checkpoint(path: str, map_location: str | torch.device = "cpu") -> State:
    """Verify and load a file or a folder; the result has the model's state under ``"model"``.

    That is ``"state_dict"`` in the files of MMEngine and Lightning. A bare state dict (tensors by
    name) is taken as the model's.

    Args:
        path: of the file or folder. This process reads it alone.
        map_location: the device on which the tensors arrive.

    Raises:
        CorruptCheckpointError: if it is broken, or holds no model's state.
        FileNotFoundError: if there is none; other ``OSError`` if it cannot be opened.
    """
    if is_folder(path):
        from hooktrain.checkpoint.folders import read_folder

        verify_checkpoint(path)
        return with_model(read_folder(path, map_location=map_location), path)
    return with_model(load_file(path, map_location), path)


def read_on_all_ranks(path: str, model: nn.Module) -> State:
    """Verify and load a file or a folder on every rank; see :func:`read_checkpoint`. Collective.

    Args:
        path: every rank must be able to read it. The main process decides what it is.
        model: of a folder, each rank verifies a part of the files, and reads no more than its
            shards of what this model has sharded.

    Raises:
        CorruptCheckpointError: on every rank, if it is broken, or holds no model's state.
        OSError: on every rank, if one cannot open it.
    """
    states: list[State] = []
    if on_main_process(lambda: is_folder(path)):
        from hooktrain.checkpoint.folders import read_folder, verify_folder

        part = slice(comm.get_rank(), None, comm.get_world_size())
        on_all_ranks(lambda: verify_folder(path, part))
        on_all_ranks(lambda: states.append(with_model(read_folder(path, model), path)))
    else:
        on_all_ranks(lambda: states.append(read_checkpoint(path)))
    return states[0]


def parts_of_trainer(state: State) -> State:
    """A checkpoint as strategies and MMEngine have it, if it is a trainer's; else as it is."""
    if "optimizer" not in (trainer := state.get("trainer", {})):
        return state
    schedulers = trainer.get("hooks", {}).get("LRScheduler", {}).get("schedulers", {})
    meta = {"iter": trainer["iteration"] + 1, "seed": trainer.get("seed")}
    parts = {"optimizer": trainer["optimizer"], "meta": meta}
    parts["param_schedulers"] = schedulers.get("", schedulers)
    return {key: value for key, value in state.items() if key != "iteration"} | parts


def with_trainer(state: State) -> State:
    """A checkpoint with a trainer's state, if it is a strategy's or MMEngine's; else as it is."""
    if "optimizer" not in state or "iter" not in state.get("meta", {}):
        return state
    state, hooks = split_average(state)
    meta, schedulers = state["meta"], state.get("param_schedulers")
    if schedulers:
        by_name = schedulers if isinstance(schedulers, dict) else {"": schedulers}
        hooks["LRScheduler"] = {"schedulers": by_name}
    trainer = {"iteration": meta["iter"] - 1, "optimizer": state["optimizer"], "hooks": hooks}
    return {"trainer": trainer | {"seed": meta.get("seed")}, **state}


def split_average(state: State) -> tuple[State, State]:
    """A checkpoint with the raw weights, and the state of the hook ``EMA`` by its name, if any.

    MMEngine's EMAHook saves the average as the model, and the raw weights in its own place.
    """
    if "ema_state_dict" not in state:
        return state, {}
    state = dict(state)
    average = dict(state.pop("ema_state_dict"))
    model = state["model"] = copy(state["model"])
    for name, averaged in model.items():
        model[name] = average[f"module.{name}"]
        average[f"module.{name}"] = averaged
    return state, {"EMA": average}


def with_model(state: Any, path: str) -> State:
    """What was read, with the model's state under ``"model"``; see :func:`read_checkpoint`."""
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}")
    if isinstance(state.get("model"), dict):
        return state
    if isinstance(state.get("state_dict"), dict):
        return {"model" if key == "state_dict" else key: item for key, item in state.items()}
    # Modules may keep what they like under the second name (Module.get_extra_state).
    if state and all(
        isinstance(value, torch.Tensor) or str(name).endswith("_extra_state")
        for name, value in state.items()
    ):
        return {"model": state}
    needs = "'model', 'state_dict', or tensors only"
    raise CorruptCheckpointError(f"{path} is no checkpoint: no {needs}, but {list(state)[:10]!r}")
