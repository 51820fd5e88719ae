"""Checkpoints that are folders, of which each process reads and writes its part."""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.checkpoint.agreement import on_main_process
from hooktrain.checkpoint.discovery import POINTER
from hooktrain.checkpoint.reading import Found
from hooktrain.checkpoint.sharded import is_sharded, load_sharded, read_structure
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.utils.file_io import atomic_write

__all__ = ["read_sharded", "sharded_candidates", "tag_sharded"]

State = dict[str, Any]
Path = str | os.PathLike[str]


def read_sharded(
    folder: Path, model: nn.Module, optim_wrapper: OptimWrapper | OptimWrapperDict | None
) -> Found:
    """The path and the content of a folder. A collective.

    Of what the model and the optimizer have sharded, each rank reads its shards only.

    Args:
        folder: the checkpoint.
        model: is not changed, and neither is the optimizer.
        optim_wrapper: the optimizer, if there is one.

    Raises:
        CorruptCheckpointError: on every rank, if a file is missing, truncated or altered.
        FileNotFoundError: if there is no such folder; other ``OSError`` if it cannot be read.
    """
    saved = on_main_process(lambda: read_structure(folder))
    name = "state_dict" if "state_dict" in saved else "model"
    weights = saved.get(name, {})
    ours = model.state_dict()
    into: State = {
        name: {k: torch.empty_like(v) for k, v in ours.items() if _alike(v, weights.get(k))},
        "optimizer": _optimizer_targets(optim_wrapper, saved.get("optimizer", {})),
    }
    state = load_sharded(folder, into)
    return os.fspath(folder), {"state_dict" if k == name else k: v for k, v in state.items()}


def _optimizer_targets(
    optim_wrapper: OptimWrapper | OptimWrapperDict | None, saved: Mapping[str, Any]
) -> State:
    """Room for the shards of each parameter's state, where it was saved with the same shape."""
    if optim_wrapper is None:
        return {}
    if isinstance(optim_wrapper, OptimWrapperDict):
        items = optim_wrapper.items()
        return {key: _optimizer_targets(item, saved.get(key, {})) for key, item in items}
    parameters = [p for group in optim_wrapper.optimizer.param_groups for p in group["params"]]
    state: State = {}
    for k, values in saved.get("state", {}).items():
        if k < len(parameters):
            state[k] = {
                name: torch.empty_like(parameters[k], dtype=value.dtype, requires_grad=False)
                for name, value in values.items()
                if _alike(value, parameters[k])
            }
    return {"state": state}


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape


def sharded_candidates(work_dir: str) -> list[str]:
    """The folders to resume from, best first. A collective.

    The one that the pointer names, then the others by the number at the end of their names. None,
    if the pointer names a file.
    """
    return on_main_process(lambda: _candidates(work_dir))


def _candidates(work_dir: str) -> list[str]:
    pointed = ""
    if os.path.isfile(pointer := os.path.join(work_dir, POINTER)):
        with open(pointer, errors="replace") as file:
            pointed = os.path.join(work_dir, os.path.basename(file.read(4096).strip()))
        if os.path.isfile(pointed):
            return []
    names = os.listdir(work_dir) if os.path.isdir(work_dir) else []
    paths = [os.path.join(work_dir, name) for name in sorted(names)]
    found = [path for path in paths if is_sharded(path)]
    return sorted(found, key=lambda path: (path == pointed, _number(path)), reverse=True)


def _number(path: str) -> int:
    digits = re.search(r"(\d+)(\.\w+)?$", os.path.basename(path))
    return int(digits.group(1)) if digits else -1


def tag_sharded(folder: Path) -> None:
    """Make a folder the one to resume from, in the folder that it is in. A collective."""
    parent, name = os.path.split(os.path.abspath(folder))

    def write() -> None:
        with atomic_write(os.path.join(parent, POINTER), "w") as file:
            file.write(name)

    on_main_process(write)
