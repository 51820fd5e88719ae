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
    bytearray,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Size,
)
# The beginning of files from before torch's zip container.
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."


# Numbers of numpy, which others save beside the weights, run no code.
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
    """Whether there is a folder of shards, intact or not.

    A hidden one does not count, nor does the ``lost+found`` of a disk, which only root can read.
    """
    path = Path(path)
    if path.name.startswith((".", "lost+found")):
        return False
    return any((path / name).is_file() for name in (STATE, MANIFEST))


def save_file(state: State, path: AnyPath) -> None:
    """Write a state to a file. A file of that name is replaced when the new one is on the disk.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets.
        path: of the file.

    Raises:
        TypeError: if something could not be loaded back.
        OSError: if the disk is full or fails. The old file is as it was.
    """
    write_file(storable(state), path)


def write_file(state: State, path: AnyPath) -> None:
    """Write a state that :func:`storable` has returned; see :func:`save_file`."""
    crc = config.patch("save.compute_crc32", True)  # type: ignore[attr-defined]
    with crc, atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch fails again as it closes the file.
            first = error.__context__
            if isinstance(first, OSError):
                raise first from None
            raise


def verify_file(path: AnyPath) -> None:
    """Read the whole file and compare every checksum in it (some GB/s).

    A file without checksums, such as a ``.safetensors`` file, passes if its structure is right.

    Raises:
        CorruptCheckpointError: if it is broken, compressed, or no file of torch.
        OSError: if it cannot be opened.
    """
    if _is_safetensors(path):
        _load_safetensors(path, "cpu")  # reads no data, and refuses what is cut
        return
    with open(path, "rb") as file, reading(path):
        problem = find_problem(file)
        if problem:
            raise CorruptCheckpointError(f"{path} is no intact checkpoint: {problem}")


def load_file(path: AnyPath, map_location: Device = "cpu") -> Any:
    """Verify a file, then load it without running any code that it may hold.

    Args:
        path: of the file.
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
        path: of the file.
        map_location: the device on which the tensors arrive.
        mapped: whether the tensors stay in the file, whose pages all processes of a machine share.
            Only this process sees its writes to such a tensor. The file may be replaced or
            deleted meanwhile, as saves do it, but not written to. If a disk fails after the file
            was verified, a signal (SIGBUS) ends the process, so map nothing that a run keeps.
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
    """The tensors of a file of that format, which stay in the mapped file."""
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
            f"{path} is no intact checkpoint: {_reason(error)}"
        ) from error


def storable(value: Any, name: str = "") -> Any:
    """Copy a state, and refuse values that ``torch.load(weights_only=True)`` would refuse.

    Args:
        value: the state, or a part of it.
        name: the dotted key of the part, for the message.

    Returns:
        The copy, with the same tensors but for views of larger ones, which are copied into host
        memory, and with numbers of numpy as Python's.

    Raises:
        TypeError: if something is refused; the message has its dotted key.
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
            "give tensors with data or plain Python types only"
        )
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if value.untyped_storage().nbytes() <= value.nbytes:
        return value
    # Of a view torch would save all of the memory. Host-device synchronisation.
    return value.detach().to("cpu", copy=True)


def _is_storable_leaf(value: Any) -> bool:
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return not value.is_meta
    # torch's unpickler refuses empty bytes.
    if kind is bytes:
        return len(value) > 0
    return kind in _PLAIN_TYPES


def find_problem(file: IO[bytes]) -> str:
    """The problem of an open file of torch, or "". All checksums in it are compared, if any.

    Args:
        file: at its beginning.
    """
    start = file.read(len(_LEGACY_MAGIC))
    if start == _LEGACY_MAGIC:
        return ""
    if not start.startswith(b"PK"):
        return f"it begins with {start[:8]!r}, not as a file of torch.save"
    with zipfile.ZipFile(file) as container:
        parts = container.infolist()
        for part in parts:
            if part.compress_type != zipfile.ZIP_STORED:
                return f"{part.filename} is compressed, and might fill the memory"
            # torch would read nothing, and leave the tensor uninitialised.
            if part.external_attr & 0x10:
                return f"{part.filename} is marked as a folder"
        if any(part.CRC for part in parts):
            altered = container.testzip()
            if altered:
                return f"the checksum of its part {altered!r} does not match"
    return ""


def _reason(error: Exception) -> str:
    """The line of a long message of torch that tells the reason."""
    _, _, message = str(error).rpartition("WeightsUnpickler error:")
    asked = re.search(r"GLOBAL (\S+)", message)
    if asked:
        return (
            f"it asks for {asked[1]!r}, which could run code. Nothing was run. If you trust it: "
            f"torch.serialization.add_safe_globals([{asked[1]}]), or for a whole model save its "
            "weights: torch.save(torch.load(path, weights_only=False)['model'].state_dict(), ...)"
        )
    first_line, _, _ = message.strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint in one file, which every rank reads as a whole.

    Attributes:
        path: of the file.
        seen_as: the machine and the number of the file there. On two ranks it is the same if they
            see the same file.
        ending: the size of the file, and the checksum of its last bytes, in which torch has the
            checksums of its parts. On two machines it is the same if the files are equal.
    """

    path: AnyPath
    seen_as: tuple[Any, ...] = ()
    ending: tuple[int, ...] = ()

    def verify(
        self, part: int = 0, parts: int = 1, *, sizes_only: bool = False
    ) -> None:
        """Compare the checksums in the file. All of it is in the first part.

        Args:
            part: which part to read, from 0, if the ranks divide the work among themselves.
            parts: the number of parts.
            sizes_only: whether the data of tensors will not be read, so that the sizes of the
                shards are enough. A file is verified as a whole.

        Raises:
            CorruptCheckpointError: if it is broken.
            OSError: if it cannot be opened.
        """
        if part == 0:
            verify_file(self.path)

    def read(
        self,
        model: nn.Module | None = None,
        map_location: Device = "cpu",
        key: str = "",
    ) -> State:
        """Load the verified file, with the model's state under ``"model"``. Not collective.

        Args:
            model: the model to load. Tensors that are copied into it, and those of which
                a rank takes a shard, stay in the mapped file. All others are copied into memory,
                since the object that loads them may keep them.
            map_location: the device on which the tensors arrive.
            key: see :func:`hooktrain.checkpoint.load_checkpoint`.

        Raises:
            CorruptCheckpointError: if it is broken, or holds no model's state.
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

    The files of MMEngine and Lightning have that under ``"state_dict"``. A bare state dict (tensors
    by name) is taken as the model's.

    Args:
        state: the content.
        path: where it was read, for the error.
        key: the name of the model's state, if it is another one.

    Raises:
        CorruptCheckpointError: if it holds no model's state.
    """
    content = state if isinstance(state, dict) else {}
    there = [name for name in content if isinstance(content[name], dict)]
    for name in [key] if key else ["model", "state_dict"]:
        if name in there:
            rest = {
                each: content[each] for each in content if each not in (name, "model")
            }
            return {"model": content[name], **rest}
    # The extra state of a module may be anything (Module.get_extra_state).
    names = [name for name in content if not str(name).endswith("_extra_state")]
    if names and not key and all(torch.is_tensor(content[name]) for name in names):
        return {"model": content}
    raise CorruptCheckpointError(
        f"{path} is not a checkpoint: it has no {key or 'model'!r}, no 'state_dict', and not only "
        f"tensors, but {reprlib.repr(state)}. load_checkpoint(..., key=...) takes the weights of "
        f"another name, if they are one of {there}"
    )
