"""Folders of shards: each rank writes its part of the tensors, on a disk that all ranks see.

The shards and ``.metadata`` are files of torch.distributed.checkpoint, so its tools read the
folder. This package reads neither the containers in them nor ``.metadata``, a pickle that may run
any code. ``manifest.pth`` holds, in plain types, the size and the checksum of each file, which are
compared before anything is read, and for each tensor a table of where its data is in the files.
``state.pth`` holds everything else. The folder gets its name once it is complete.
"""

import io
import math
import pickle
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from hooktrain.checkpoint.files import (
    MANIFEST,
    STATE,
    CheckpointFile,
    CorruptCheckpointError,
    is_folder,
    load_file,
    load_verified,
    reading,
    verify_file,
    with_model,
    write_file,
)
from hooktrain.utils import comm
from hooktrain.utils.comm import Group, on_all_ranks, on_main_process
from hooktrain.utils.file_io import AnyPath, atomic_write, replacing
from hooktrain.utils.names import Keys, State, dotted
from hooktrain.utils.tensors import (
    Device,
    Tensors,
    as_bytes,
    is_sharded,
    local_box,
    local_tensor,
    map_leaves,
    narrow,
    shard_for,
    shards_of,
)

# The size and the CRC-32 of a file.
Digest = tuple[int, int]

# A copy from CUDA into pinned memory is faster, but pinning itself is slow, and not worth it for
# small tensors.
_PINNED_BYTES = 1 << 20

# Tensors can be mapped from a file if they begin at a multiple of this, as in torch.save's files.
_ALIGNMENT = 64

# The parts of tensors that a rank has written, by name: a row for each table of the index.
Parts = dict[str, tuple[Any, Any]]

# Two tables of whole numbers for each tensor, with a row for each of its parts. The first table has
# the offsets of the part in the tensor, and its sizes. The second one has the number of its file in
# the manifest, the start of its container in that file, the length of the container, and the start
# of its data in that file.
Index = dict[str, tuple[Tensor, Tensor]]


def save_folder(state: State, folder: AnyPath, group: Group = None) -> None:
    """Write a state to a folder, which exists as a whole or not at all. Collective.

    An old sharded checkpoint of that name is replaced.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets. Each rank writes
            its shards of DTensors; the main process writes everything else.
        folder: the path of the folder, whose parent exists.
        group: the process group of all ranks. A thread needs its own.

    Raises:
        ValueError: on every rank, if two tensors have the same dotted name, or if the ranks do not
            hold shards of the same tensors.
        FileExistsError: if something other than a sharded checkpoint has that name.
        OSError: on every rank, if the disk of one is full or fails, or does not return the bytes
            that were written. The old folder is unchanged.
    """
    target = Path(folder)
    skeleton, tensors = _split(state)
    written: list[tuple[Parts, Digest]] = []
    with ExitStack() as stack:

        def begin() -> Path:
            if target.exists() and not is_folder(target):
                raise FileExistsError(
                    f"{target} is not a sharded checkpoint, so it is not replaced"
                )
            temporary = stack.enter_context(replacing(target))
            temporary.mkdir()
            return temporary

        temporary = on_main_process(begin, group)

        def write() -> None:
            name = _file_of(comm.get_rank())
            # If the folder has vanished, the rank that created it cannot open a file in it.
            if comm.get_rank() and not temporary.is_dir():
                raise OSError(
                    f"{temporary} is missing: the ranks do not share the disk"
                )
            parts, digest = _write_parts(tensors, temporary / name)
            if _digest(temporary / name) != digest:
                raise OSError(f"{target / name} does not have the bytes written to it")
            written.append((parts, digest))

        on_all_ranks(write, group)
        everywhere = _gather(written[0], group)

        def complete() -> None:
            files = {_file_of(i): digest for i, (_, digest) in enumerate(everywhere)}
            index, metadata = _index_of([parts for parts, _ in everywhere], tensors)
            with atomic_write(temporary / ".metadata") as file:
                pickle.dump(metadata, file)
            write_file({"state": skeleton}, temporary / STATE)
            for name in (".metadata", STATE):
                files[name] = _digest(temporary / name)
            write_file({"files": files, "tensors": index}, temporary / MANIFEST)
            stack.close()  # the rename

        on_main_process(complete, group)


class CheckpointFolder(CheckpointFile):
    """A folder of shards on a disk that all ranks see."""

    def verify(
        self, part: int = 0, parts: int = 1, *, sizes_only: bool = False
    ) -> None:
        """Compare the files of one part with the manifest, or only their sizes.

        Raises:
            CorruptCheckpointError: if a file is missing, truncated, altered or outside the folder;
                the message names the first. Also if an earlier revision saved the folder.
        """
        folder = Path(self.path)
        with reading(folder):
            verify_file(folder / MANIFEST)
            manifest = load_verified(folder / MANIFEST, mapped=True)
            if manifest.keys() == {"files"}:
                raise CorruptCheckpointError(
                    f"{folder} was saved by an earlier revision: `hooktrain checkpoint upgrade "
                    f"{folder}` converts it"
                )
            files = manifest["files"]
            for name in sorted(files)[part::parts]:
                path = folder / name
                if path.name != name:
                    raise CorruptCheckpointError(f"{folder} has no file {name!r} in it")
                size, checksum = files[name]
                found = (path.stat().st_size, checksum) if sizes_only else _digest(path)
                if found != (size, checksum):
                    raise CorruptCheckpointError(
                        f"{path} was altered: it has {found}, not {(size, checksum)}"
                    )

    def read(
        self, model: nn.Module | None, map_location: Device = "cpu", key: str = ""
    ) -> State:
        """Load the verified folder. Not collective. Runs no code that a file may hold.

        Args:
            model: only this rank's shard of a tensor is read if a sharded tensor of this model has
                the same shape, and its name is part of the tensor's dotted key. These are weights,
                their averages, and optimizer states. All other tensors are read in full.
            map_location: the device of tensors that are read in full. On ``"meta"`` they have no
                data.
            key: see :func:`hooktrain.checkpoint.load_checkpoint`.

        Raises:
            CorruptCheckpointError: if it asks to run code, or was not written by
                :func:`save_folder`.
        """
        shards = shards_of(model)
        tensors: Tensors = {}

        def allocate(keys: Keys, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_meta:
                return leaf
            name = dotted(keys)
            shard = shard_for(leaf, name, shards)
            if shard is None:
                tensors[name] = torch.empty_like(leaf, device=map_location)
            else:
                tensors[name] = torch.empty_like(shard, dtype=leaf.dtype)
            return tensors[name]

        folder = Path(self.path)
        with reading(folder):
            state = load_file(folder / STATE, map_location)["state"]
            if map_location != "meta":
                state = map_leaves(allocate, state)
                _read_tensors(tensors, folder)
        return with_model(state, folder, key)


@torch.no_grad()
def copy_to_host(state: Any, memory: Any) -> Any:
    """Copy a nested state into host memory, reusing that of the previous copy.

    It takes as much memory as the state. For large tensors on CUDA the memory is pinned, and torch
    rounds their sizes up to a power of two. A tensor that the state holds under two names is one
    tensor in the copy too.

    Args:
        state: the state, which is not changed.
        memory: the memory that the previous call returned; at first an empty dict.

    Returns:
        The copy, and the memory to pass to the next call.
    """
    used: Any = {}
    devices = set()

    def take(_: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided:  # a sparse tensor has no address
            return leaf.to("cpu", copy=True)  # host-device synchronisation
        data = local_tensor(leaf)
        devices.add(data.device)
        # A tensor keeps its address during training, by which its copy finds its memory again.
        views = (data.is_conj(), data.is_neg())  # of the same data
        key = (data.data_ptr(), data.stride(), data.shape, data.dtype, views)
        if key not in memory:
            memory[key] = torch.empty_like(
                data,
                device="cpu",
                pin_memory=data.is_cuda and data.nbytes >= _PINNED_BYTES,
            )
        copied = used[key] = memory[key].copy_(data, non_blocking=True)
        if not is_sharded(leaf):
            return copied
        return DTensor(copied, leaf._spec, requires_grad=False)  # type: ignore[attr-defined]

    copied = map_leaves(take, state)
    for device in devices - {torch.device("cpu")}:
        # Host-device synchronisation: one for all tensors of a device.
        torch.accelerator.synchronize(device)
    return copied, used


def _split(state: State) -> tuple[State, Tensors]:
    """Take the tensors out of a state.

    Returns:
        A copy of the state, in which tensors on ``"meta"``, without data, stand for the tensors;
        and the tensors by their dotted keys. Sparse tensors stay in the copy.
    """
    tensors: Tensors = {}

    def take(keys: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        name = dotted(keys)
        if name in tensors:
            raise ValueError(f"two tensors of the state are both named {name!r}")
        tensors[name] = leaf.detach()
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"
        )

    return map_leaves(take, state), tensors


@cache  # so that a pickle of the index has each name once
def _file_of(rank: int) -> str:
    """The name that torch gives to a rank's file."""
    return f"__{rank}_0.distcp"


def _gather(data: Any, group: Group) -> list[Any]:
    """Every rank's object, on the main process only. Collective."""
    size = comm.get_world_size()
    if size == 1:
        return [data]
    gathered = [None] * size if comm.is_main_process() else None
    dist.gather_object(data, gathered, group=group or comm.object_group())
    return gathered or []


def _write_parts(tensors: Tensors, path: Path) -> tuple[Parts, Digest]:
    """Write this rank's shards, and on the main process the tensors that are not sharded."""
    parts: Parts = {}
    checksum = 0
    with atomic_write(path) as file:
        for name, tensor in tensors.items():
            if not _is_to_be_written(name, tensor):
                continue
            # A host-device synchronisation, if it is on an accelerator.
            data = local_tensor(tensor).cpu()
            numbers: Any = as_bytes(data).numpy()
            head, tail = _container(data.shape, data.dtype)
            begin = file.tell()
            for piece in (head, numbers, tail):
                checksum = zlib.crc32(piece, checksum)
                file.write(piece)
            length = file.tell() - begin
            place = (comm.get_rank(), begin, length, begin + len(head))
            parts[name] = (local_box(tensor), place)
        return parts, (file.tell(), checksum)


def _is_to_be_written(name: str, tensor: Tensor) -> bool:
    """Whether this rank writes a tensor, or its own shard of it."""
    if not is_sharded(tensor):
        return comm.is_main_process()
    sharded: Any = tensor
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    # Of equal shards only one is written. The ranks that hold them divide the tensors between them.
    writer = zlib.crc32(name.encode())
    return all(
        coordinate[dim] == writer % mesh.size(dim)
        for dim, placement in enumerate(sharded.placements)
        if placement.is_replicate()
    )


class _Container(io.BytesIO):
    """Keeps the bytes that torch.save writes before and after the data, which it skips."""

    position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = self.tell()
        return self.position


@cache
def _container(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes that torch.save writes before and after the data of a contiguous tensor.

    Zeros at the end align the next container, and with it its data.
    """
    container = _Container()
    # Memory that is neither filled nor read takes no pages. Deterministic algorithms fill it.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    with torch.serialization.skip_data():
        torch.save(tensor, container)
    content = container.getvalue()
    padding = bytes(-(len(content) + tensor.nbytes) % _ALIGNMENT)
    return content[: container.position], content[container.position :] + padding


def _index_of(everywhere: list[Parts], tensors: Tensors) -> tuple[Index, Metadata]:
    """The places of all parts, for this package and for torch.distributed.checkpoint.

    Args:
        everywhere: the parts that each rank has written.
        tensors: the tensors of the main process, by name.

    Raises:
        ValueError: if parts are missing, or if a rank has tensors that the main process lacks.
    """
    unknown = set().union(*everywhere) - tensors.keys()
    if unknown:
        raise ValueError(f"a rank has {unknown}, but the main process does not")
    index: Index = {}
    metadata = Metadata({}, storage_data={})
    for name, tensor in tensors.items():
        parts = [written[name] for written in everywhere if name in written]
        boxes = _table([box for box, _ in parts]).view(len(parts), 2, tensor.ndim)
        index[name] = (boxes, _table([place for _, place in parts]))
        _overlap(name, index[name], torch.empty(tensor.shape, device="meta"))
        chunks = []
        for (offsets, sizes), (rank, begin, length, _) in parts:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append(chunk)
            place = _StorageInfo(_file_of(rank), begin, length)
            metadata.storage_data[MetadataIndex(name, chunk.offsets)] = place
        properties = TensorProperties(tensor.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties, tensor.shape, chunks
        )
    return index, metadata


def _read_tensors(tensors: Tensors, folder: Path) -> None:
    """Fill tensors from the files of a folder.

    Args:
        tensors: the tensors by dotted names; of a sharded one, this rank's shard is filled.
        folder: the folder, which has a manifest.
    """
    manifest = load_verified(folder / MANIFEST, mapped=True)
    files = list(manifest["files"])

    @cache
    def content(file: int) -> Tensor:
        path = folder / files[file]
        size = path.stat().st_size
        with suppress(RuntimeError):  # some file systems cannot map
            return torch.from_file(str(path), size=size, dtype=torch.uint8)
        return torch.from_numpy(np.fromfile(path, np.uint8))

    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        parts = _overlap(name, manifest["tensors"][name], tensor)
        for place, sizes, extent, in_local, in_part in parts:
            file, _, _, begin = place
            end = begin + math.prod(sizes) * tensor.itemsize
            part = content(file)[begin:end].view(tensor.dtype).view(sizes)
            # A host-device synchronisation, if the tensor is on an accelerator.
            narrow(local, in_local, extent).copy_(narrow(part, in_part, extent))


def _table(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _overlap(name: str, tables: tuple[Tensor, Tensor], tensor: Tensor) -> Iterable[Any]:
    """Find the parts that a tensor needs; of a sharded one, those that this rank's shard needs.

    Args:
        name: the name of the tensor, for messages.
        tables: its tables in the index.
        tensor: the tensor, of which only the shape and the sharding matter.

    Returns:
        For each part that overlaps the shard: its place; its sizes; the sizes of the overlap; and
        the offsets of the overlap in the shard, and in the part.

    Raises:
        ValueError: if the parts do not fill the shard exactly, so that some of it would be
            uninitialised memory.
    """
    boxes, places = tables
    offsets, sizes = boxes.unbind(1)
    origin, shape = _table(local_box(tensor))
    low = offsets.maximum(origin)
    high = (offsets + sizes).minimum(origin + shape)
    some = (low < high).all(1)
    # Each element of the shard has a weight, and the weights of the parts must add up to its own.
    weight = (_hash(high - origin) - _hash(low - origin)).prod(1)[some].sum()
    if weight != _hash(shape).prod():
        raise ValueError(f"parts of {name} are missing or overlap")
    columns = (places, sizes, high - low, low - origin, low - offsets)
    return zip(*(column[some].tolist() for column in columns), strict=True)


def _hash(index: Tensor) -> Tensor:
    """A pseudorandom whole number for each index, modulo 2^64; 0 for the index 0."""
    mixed = index * 0x1E3779B97F4A7C15
    return (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9


def _digest(path: Path) -> Digest:
    """The size and the checksum of a file."""
    checksum = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
        return file.tell(), checksum
