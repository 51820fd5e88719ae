"""From a file or a folder to a checked state, the same one on every rank."""

import errno
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooktrain.checkpoint.agreement import on_main_process
from hooktrain.checkpoint.folder import is_sharded
from hooktrain.checkpoint.manifest import verify_folder
from hooktrain.checkpoint.sharded_loading import load_sharded, read_sharded
from hooktrain.checkpoint.sources import check_digest
from hooktrain.checkpoint.storage import CorruptCheckpointError, load_file, verify_file
from hooktrain.checkpoint.targets import shard_targets
from hooktrain.utils import comm
from hooktrain.utils.registry import did_you_mean

__all__ = ["read_checkpoint", "read_on_all_ranks", "verify_checkpoint"]

logger = logging.getLogger(__name__)

State = dict[str, Any]


def verify_checkpoint(path: str) -> None:
    """Read all of a file or a folder, and compare it with its checksums.

    Raises:
        CorruptCheckpointError: if it is broken.
        FileNotFoundError: if there is none; other ``OSError`` if it cannot be opened.
    """
    if is_sharded(path):
        verify_folder(path)
    else:
        verify_file(path)


def read_checkpoint(path: str, map_location: str | torch.device = "cpu") -> State:
    """Load and check a file or a folder; the result has the model's state under ``"model"``.

    A bare state dict (tensors by name) is taken as the model's, and so is ``"state_dict"``, its
    name in the files of MMEngine and Lightning. A digest in the name of the file is compared with
    its content; see :func:`digest_in_name`.

    Args:
        path: of the file or folder. It is read by this process alone.
        map_location: the device on which the tensors arrive.

    Raises:
        CorruptCheckpointError: if it is broken, or holds no model's state.
        FileNotFoundError: if there is none; other ``OSError`` if it cannot be opened.
    """
    if is_sharded(path):
        return _with_model(read_sharded(path, map_location), path)
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"No such file{_nearest(path)}", path)
    check_digest(path)
    return _with_model(load_file(path, map_location), path)


def _with_model(state: Any, path: str) -> State:
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}")
    if isinstance(state.get("model"), dict):
        return state
    if isinstance(state.get("state_dict"), dict):
        return {"model" if key == "state_dict" else key: item for key, item in state.items()}
    if state and all(_is_state(name, value) for name, value in state.items()):
        return {"model": state}
    raise CorruptCheckpointError(
        f"{path} is no checkpoint: it has no dict under 'model' or 'state_dict', and is no dict of "
        f"tensors; its keys are {list(state)[:10]!r}"
    )


def _is_state(name: object, value: object) -> bool:
    # Modules may keep what they like under the second name (Module.get_extra_state).
    return isinstance(value, torch.Tensor) or str(name).endswith("_extra_state")


def _nearest(path: str) -> str:
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f", nor a folder {folder!r}"
    return did_you_mean(name, sorted(os.listdir(folder or ".")))


def read_on_all_ranks(path: str, model: nn.Module) -> State:
    """Load and check a file or a folder, as :func:`read_checkpoint` does. Collective.

    Of a folder, each rank reads no more than its shards of what ``model`` has sharded. A file is
    read by each rank; those that cannot (a disk of another machine) get the main process's copy.

    Args:
        path: which of the two it is, the main process decides.
        model: without a wrapper; it is not changed.

    Raises:
        CorruptCheckpointError: on every rank, if it is broken, or holds no model's state.
        FileNotFoundError: on every rank, if the main process finds none; other ``OSError`` if it
            cannot be opened.
    """
    if on_main_process(lambda: is_sharded(path)):
        return _with_model(load_sharded(Path(path), partial(shard_targets, model)), path)
    state: State | None = None

    def read() -> None:
        nonlocal state
        state = read_checkpoint(path)

    on_main_process(read)
    if comm.get_world_size() > 1:
        state = _read_behind_main(path, state)
    assert state is not None
    return state


def _read_behind_main(path: str, state: State | None) -> State | None:
    """The state on every rank, when the main process has read it."""
    failure = ""
    if state is None:
        try:
            state = read_checkpoint(path)
        except (OSError, CorruptCheckpointError) as problem:
            failure = str(problem)
    if comm.any_rank(bool(failure)):
        failures = {rank: text for rank, text in enumerate(comm.all_gather(failure)) if text}
        logger.warning(
            "Sending %s from the main process, as ranks cannot read it: %s", path, failures
        )
        sent = comm.broadcast(state)
        state = sent if failure else state
    return state
