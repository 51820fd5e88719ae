"""From a file to a checked state, the same one on every rank."""

import errno
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from hooktrain.checkpoint.sources import check_digest
from hooktrain.checkpoint.storage import CorruptCheckpointError, load_file
from hooktrain.utils import comm
from hooktrain.utils.names import did_you_mean

__all__ = ["Found", "read_checkpoint", "read_on_all_ranks"]

logger = logging.getLogger(__name__)

Found = tuple[str, dict[str, Any]]
"""The path of a checkpoint and its content."""


def read_checkpoint(path: str, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Load and check a file; the result has the model's state under ``"model"``.

    A bare state dict (tensors by name) is taken as the model's, and so is ``"state_dict"``, its
    name in the files of MMEngine and Lightning. A digest in the name of the file is compared with
    its content; see :func:`digest_in_name`.

    Args:
        path: of the file.
        map_location: the device on which the tensors arrive.

    Raises:
        CorruptCheckpointError: if it is broken, or holds no model's state.
        FileNotFoundError: if there is none; other ``OSError`` if it cannot be opened.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"No such file{_nearest(path)}", path)
    check_digest(path)
    state = load_file(path, map_location)
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


def read_on_all_ranks(find: Callable[[], Found | None]) -> Found | None:
    """Let the main process find and read a checkpoint, and the others read the same file.

    Ranks that cannot read it (a disk of another machine) get the main process's copy. Collective.

    Args:
        find: called on the main process only.

    Returns:
        What ``find`` returned, on every rank.

    Raises:
        Exception: whatever ``find`` raised, on every rank.
    """
    if comm.get_world_size() == 1:
        return find()
    found, error = None, None
    if comm.is_main_process():
        try:
            found = find()
        except Exception as problem:  # raised below, once the others know
            error = problem
    path, error = comm.broadcast((found[0] if found else "", error))
    if error is not None:
        raise error
    if not path:
        return None
    failure = ""
    if not comm.is_main_process():
        try:
            found = (path, read_checkpoint(path))
        except (OSError, CorruptCheckpointError) as problem:
            failure = str(problem)
    failures = {rank: text for rank, text in enumerate(comm.all_gather(failure)) if text}
    if failures:
        logger.warning(
            "Sending %s from the main process, as ranks cannot read it: %s", path, failures
        )
        sent = comm.broadcast(found)
        found = sent if failure else found
    return found
