"""From a file to a checked state, the same one on every rank."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from hooktrain.checkpoint.storage import CorruptCheckpointError, load_file
from hooktrain.utils import comm

__all__ = ["Found", "read_checkpoint", "read_on_all_ranks"]

logger = logging.getLogger(__name__)

Found = tuple[str, dict[str, Any]]
"""The path of a checkpoint and its content."""


def read_checkpoint(path: str) -> dict[str, Any]:
    """Load and check a file; the result has the model's state under ``"model"``.

    A bare state dict (tensors by name) is taken as the model's.

    Raises:
        CorruptCheckpointError: if it is broken, or holds no model's state.
        FileNotFoundError: if there is none; other ``OSError`` if it cannot be opened.
    """
    state = load_file(path)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}")
    if isinstance(state.get("model"), dict):
        return state
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        return {"model": state}
    raise CorruptCheckpointError(
        f"{path} is no checkpoint: it has no dict under 'model' and is no dict of tensors; "
        f"its keys are {list(state)[:10]!r}"
    )


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
