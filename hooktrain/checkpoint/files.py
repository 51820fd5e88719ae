"""Checkpoint files: written atomically, verified before they are trusted.

A file is torch's zip container. ``torch.load`` ignores its checksums, so a flipped bit loads as
another number; :func:`verify_file` compares them. Loading runs no code (``weights_only=True``).
"""

import copy
import re
import reprlib
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.serialization import config

from hooktrain.utils.file_io import AnyPath, atomic_write
from hooktrain.utils.names import Keys, State, dotted
from hooktrain.utils.tensors import (
    Device,
    Tensors,
    is_sharded,
    map_leaves,
    shard_for,
    shards_of,
)

# The files by which a folder of shards is recognised.
MANIFEST = "manifest.pth"
STATE = "state.pth"

_PLAIN_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Size,
)
# The beginning of files from before torch's zip container.
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."


# NumPy scalars, which other libraries save beside the weights, run no code.
_SCALAR, _ = np.float64().__reduce__()
torch.serialization.add_safe_globals(
    [
        np.dtype,
        (_SCALAR, "numpy.core.multiarray.scalar"),
        (_SCALAR, "numpy._core.multiarray.scalar"),
        *(type(np.dtype(code)) for code in "?bhilqBHILQefdFD"),
    ]
)


class CorruptCheckpointError(RuntimeError):
    """A checkpoint that cannot be trusted: truncated, altered, foreign, or asking to run code."""


def is_folder(path: AnyPath) -> bool:
    """Whether a path is a folder of shards, intact or not.

    A hidden folder does not count, nor does the ``lost+found`` of a disk, which only root can read.
    """
    path = Path(path)
    if path.name.startswith((".", "lost+found")):
        return False
    return any((path / name).is_file() for name in (STATE, MANIFEST))


def save_file(state: State, path: AnyPath) -> None:
    """Write a state to a file. An old file of that name is replaced once the new one is on disk.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets.
        path: the path of the file.

    Raises:
        TypeError: if a value could not be loaded back.
        OSError: if the disk is full or fails. The old file is unchanged.
    """
    write_file(storable(state), path)


def write_file(state: State, path: AnyPath) -> None:
    """Write a state that :func:`storable` has returned; see :func:`save_file`."""
    crc = config.patch("save.compute_crc32", True)  # type: ignore[attr-defined]
    with crc, atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch fails a second time when it closes the file.
            first = error.__context__
            if isinstance(first, OSError):
                raise first from None
            raise


def verify_file(path: AnyPath) -> None:
    """Read the whole file and compare every checksum in it (at several GB/s).

    A file without checksums, such as a ``.safetensors`` file, passes if its structure is right.

    Raises:
        CorruptCheckpointError: if it is broken, compressed, or not a torch file.
        OSError: if it cannot be opened.
    """
    if _is_safetensors(path):
        _load_safetensors(path, "cpu")  # reads no data, and refuses a truncated file
        return
    with open(path, "rb") as file, reading(path):
        check_container(file)


def load_file(path: AnyPath, map_location: Device = "cpu") -> Any:
    """Verify a file, then load it without running any code that it may hold.

    Args:
        path: the path of the file.
        map_location: the device on which the tensors arrive.

    Raises:
        CorruptCheckpointError: if it is broken, or holds more than tensors and plain types.
        MemoryError: if it does not fit into memory; torch raises RuntimeError as well.
        OSError: if it cannot be opened.
    """
    verify_file(path)
    return load_verified(path, map_location)


def load_verified(
    path: AnyPath, map_location: Device = "cpu", *, mapped: bool = False
) -> Any:
    """Load a file that has been verified; see :func:`load_file`.

    Args:
        path: the path of the file.
        map_location: the device on which the tensors arrive.
        mapped: whether the tensors stay in the file, whose pages all processes of a machine share.
            Writes to such a tensor are private to this process. The file may be replaced or deleted
            meanwhile, as saves do, but not written to. If the disk fails after the file was
            verified, a signal (SIGBUS) ends the process, so map nothing that a run keeps.
    """
    if _is_safetensors(path):
        return _load_safetensors(path, map_location)
    load = partial(torch.load, path, map_location, weights_only=True)
    with reading(path):
        if mapped:
            # Some file systems cannot map, and torch maps no files from before its zip container.
            with suppress(RuntimeError):
                return load(mmap=True)
        return load()


def _is_safetensors(path: AnyPath) -> bool:
    return ".safetensors" in Path(path).name  # also in the temporary name of a download


def _load_safetensors(path: AnyPath, map_location: Device) -> Any:
    """The tensors of a ``.safetensors`` file, which stay in the mapped file."""
    from safetensors import torch as safetensors

    with reading(path):
        tensors = safetensors.load_file(path)
        return {name: tensor.to(map_location) for name, tensor in tensors.items()}


@contextmanager
def reading(path: AnyPath) -> Iterator[None]:
    """Turn any error but a lack of memory into a CorruptCheckpointError."""
    try:
        yield
    except (CorruptCheckpointError, MemoryError):
        raise
    except Exception as error:  # zipfile alone raises nine types of them
        if "allocate memory" in str(error):
            raise
        raise CorruptCheckpointError(
            f"{path} is not an intact checkpoint: {_reason(error)}"
        ) from error


def storable(value: Any, name: str = "") -> Any:
    """Copy a state, and refuse values that ``torch.load(weights_only=True)`` would refuse.

    Args:
        value: the state, or a part of it.
        name: the dotted key of the part, for the message.

    Returns:
        The copy. It has the same tensors, but views of larger ones are copied into host memory,
        and NumPy scalars become Python numbers.

    Raises:
        TypeError: if a value is refused; the message has its dotted key.
    """
    if is_sharded(value):
        return value

    def inside(key: object, item: Any) -> Any:
        return storable(item, f"{name}.{key}".removeprefix("."))

    # torch saves attributes too, such as the ``_metadata`` of a state dict.
    for attribute, item in getattr(value, "__dict__", {}).items():
        inside(attribute, item)
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        copied = copy.copy(value)  # with its attributes
        copied.clear()
        for key, item in value.items():
            copied[inside(key, key)] = inside(key, item)
        return copied
    if kind in (list, tuple, set):
        return kind(inside(index, item) for index, item in enumerate(value))
    if isinstance(value, np.number | np.bool_):
        return value.item()
    if not _is_storable_leaf(value):
        raise TypeError(
            f"cannot save {name} of type {kind.__module__}.{kind.__qualname__}: "
            "use only tensors with data, and plain Python types"
        )
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if value.untyped_storage().nbytes() <= value.nbytes:
        return value
    # For a view torch would save all of its memory. Host-device synchronisation.
    return value.detach().to("cpu", copy=True)


def _is_storable_leaf(value: Any) -> bool:
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return not value.is_meta
    # torch's unpickler refuses empty bytes.
    return kind in _PLAIN_TYPES and value != b""


def check_container(file: IO[bytes]) -> None:
    """Check the structure of an open torch file, and compare all checksums in it, if any.

    Args:
        file: the file, at its beginning.

    Raises:
        ValueError: if it is not intact; other errors of :mod:`zipfile`.
    """
    if file.read(len(_LEGACY_MAGIC)) == _LEGACY_MAGIC:
        return
    with zipfile.ZipFile(file) as container:
        parts = container.infolist()
        for part in parts:
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{part.filename} is compressed, and might fill the memory"
                )
            # torch would read nothing, and leave the tensor uninitialised.
            if part.external_attr & 0x10:
                raise ValueError(f"{part.filename} is marked as a folder")
        if any(part.CRC for part in parts):
            altered = container.testzip()
            if altered:
                raise ValueError(f"the checksum of its part {altered!r} does not match")


def _reason(error: Exception) -> str:
    """The line of a long torch message that gives the reason."""
    _, _, message = str(error).rpartition("WeightsUnpickler error:")
    asked = re.search(r"GLOBAL (\S+)", message)
    if asked:
        return (
            f"it needs {asked[1]!r}, which could run code. Nothing was run. If you trust it, call "
            f"torch.serialization.add_safe_globals([{asked[1]}]); if it is a whole model, save the "
            "weights: torch.save(torch.load(path, weights_only=False)['model'].state_dict(), ...)"
        )
    first_line, _, _ = message.strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


@dataclass
class CheckpointFile:
    """A checkpoint in one file, which every rank reads as a whole.

    Attributes:
        path: the path of the file.
        ending: the size of the file, and the checksum of its last bytes, in which torch keeps the
            checksums of the parts. Ranks that see equal files have the same ``ending``.
    """

    path: AnyPath
    ending: tuple[int, ...] = ()

    def verify(
        self, part: int = 0, parts: int = 1, *, sizes_only: bool = False
    ) -> None:
        """Compare the checksums in the file, always all of them.

        Args:
            part: which part of a folder to verify, from 0, if the ranks divide the work.
            parts: the number of parts.
            sizes_only: whether only the sizes of shards in a folder are compared, since the data of
                tensors will not be read.

        Raises:
            CorruptCheckpointError: if it is broken.
            OSError: if it cannot be opened.
        """
        verify_file(self.path)

    def read(
        self, model: nn.Module | None, map_location: Device = "cpu", key: str = ""
    ) -> State:
        """Load the verified file, with the model's state under ``"model"``. Not collective.

        Args:
            model: the model that will load the state. Tensors that are copied into it, and tensors
                of which a rank takes a shard, stay in the mapped file. All others are copied into
                memory, since the object that loads them may keep them.
            map_location: the device on which the tensors arrive.
            key: see :func:`hooktrain.checkpoint.load_checkpoint`.

        Raises:
            CorruptCheckpointError: if it is broken, or holds no model state.
        """
        mapped = model is not None or map_location == "meta"
        content = load_verified(self.path, map_location, mapped=mapped)
        state = with_model(content, self.path, key)
        return state if model is None else _copy_kept(state, shards_of(model))


def _copy_kept(state: State, shards: Tensors) -> State:
    """Copy the tensors that an object may keep when it loads the state."""

    def copy(keys: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = dotted(keys)
        is_of_model = keys[0] == "model" and "_extra_state" not in name
        if is_of_model or shard_for(leaf, name, shards) is not None:
            return leaf
        return leaf.clone()

    copied: State = map_leaves(copy, state)
    return copied


def with_model(state: Any, path: AnyPath, key: str = "") -> State:
    """The content of a checkpoint, with the model's state under ``"model"``.

    Files of MMEngine and Lightning have it under ``"state_dict"``. A bare state dict (tensors by
    name) is taken for the model's state.

    Args:
        state: the content.
        path: the path that it was read from, for the error.
        key: the name of the model's state, if it is another one.

    Raises:
        CorruptCheckpointError: if it holds no model state.
    """
    content = state if isinstance(state, dict) else {}
    dicts = [name for name in content if isinstance(content[name], dict)]
    for name in [key] if key else ["model", "state_dict"]:
        if name in dicts:
            rest = {
                each: content[each] for each in content if each not in (name, "model")
            }
            return {"model": content[name], **rest}
    # The extra state of a module may be anything (Module.get_extra_state).
    names = [name for name in content if not str(name).endswith("_extra_state")]
    if names and not key and all(torch.is_tensor(content[name]) for name in names):
        return {"model": content}
    raise CorruptCheckpointError(
        f"{path} is not a checkpoint: it has no {key or 'model'!r} and no 'state_dict', and is not "
        f"a dict of tensors, but {reprlib.repr(state)}. If the weights have another name, use "
        f"load_checkpoint(..., key=...) with one of {dicts}"
    )
