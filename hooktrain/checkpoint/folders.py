"""Folders of shards: each rank writes its part of the tensors, on a disk that all ranks see.

The tensors are in files of torch.distributed.checkpoint. ``state.pth`` holds everything else, and
says where the parts of each tensor are, so that torch's own ``.metadata``, a pickle that may run
any code, need not be read. ``manifest.pth`` holds the size and the digest of each file, which are
compared before anything is read. The folder gets its name when it is complete.
"""

import hashlib
import io
import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _validate_global_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from hooktrain.checkpoint.files import (
    MANIFEST,
    STATE,
    CorruptCheckpointError,
    find_problem,
    is_folder,
    load_file,
    reading,
    write_file,
)
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks, on_main_process
from hooktrain.utils.file_io import AnyPath, raise_disk_full, replacing
from hooktrain.utils.names import dotted
from hooktrain.utils.tensors import (
    full_tensor,
    is_sharded,
    local_tensor,
    map_leaves,
    shard_for,
    shards_of,
)

Keys = tuple[Any, ...]
"""The keys and indices that lead to a tensor in a nested state."""

Parts = dict[str, list[tuple[Any, ...]]]
"""For each tensor by name, its parts: offsets and sizes in the tensor, the name of the file, and
offset and length in the file."""

Digests = dict[str, tuple[int, str]]
"""The size and the sha256 of each file, by its name."""

# A copy from CUDA into pinned memory is faster. Pinning itself takes long, so small tensors are not
# worth it.
_PINNED_BYTES = 1 << 20

# torch warns where one process without a process group saves, which is intended here.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
# torch 2.9 warns of a call of its own.
warnings.filterwarnings("ignore", "TypedStorage", UserWarning, filesystem.__name__)


def save_folder(
    state: dict[str, Any], folder: AnyPath, group: ProcessGroup | None = None
) -> None:
    """Write a state to a folder that is there as a whole, or not at all. Collective.

    A sharded checkpoint of that name is replaced.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets. Each rank writes
            its shards of DTensors; the main process writes everything else.
        folder: the path of the folder.
        group: of all ranks. A thread needs one that nobody else uses.

    Raises:
        ValueError: on every rank, if two tensors have one dotted name, or the ranks do not hold
            the shards of the same tensors.
        FileExistsError: if something else than a sharded checkpoint has that name.
        OSError: on every rank, if the disk of one is full or fails, or does not give back what was
            written. The old folder is as it was.
    """
    target = Path(folder)
    skeleton, tensors = _split(state)
    with ExitStack() as stack:

        def begin() -> Path:
            if target.exists() and not is_folder(target):
                raise FileExistsError(
                    f"{target} is no sharded checkpoint: it is not replaced"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(replacing(target))

        temporary = on_main_process(begin, group)
        parts, written = _save_tensors(tensors, temporary, group)

        def read_again() -> Digests:
            for name, digest in written.items():
                if _digest(temporary / name) != digest:
                    raise OSError(f"{target / name} is not as it was written")
            return written

        of_all = on_all_ranks(read_again, group)

        def complete() -> None:
            write_file({"state": skeleton, "parts": parts}, temporary / STATE)
            files = {path.name: _digest(path) for path in temporary.glob("[!_]*")}
            for digests in of_all:
                files |= digests
            missing = files.keys() - os.listdir(temporary)
            if missing:
                raise OSError(
                    f"{missing} is missing in {temporary}: the ranks do not share the disk"
                )
            write_file({"files": files}, temporary / MANIFEST)
            stack.close()  # the rename

        on_main_process(complete, group)


def verify_folder(
    folder: AnyPath, rank: int = 0, world_size: int = 1, *, sizes_only: bool = False
) -> None:
    """Compare the files of a sharded checkpoint with its manifest.

    Args:
        folder: of :func:`save_folder`.
        rank: which part of the files to read, if the ranks divide them among themselves.
        world_size: the number of such parts.
        sizes_only: whether to compare the sizes of the files alone, which reads none of them.

    Raises:
        CorruptCheckpointError: naming the first file that is missing, truncated or altered, or
            outside of the folder.
    """
    folder = Path(folder)
    with reading(folder):
        files = load_file(folder / MANIFEST)["files"]
        for name in sorted(files)[rank::world_size]:
            if Path(name).name != name:
                raise CorruptCheckpointError(f"{folder} has no file {name!r} in it")
            if sizes_only:
                found = (os.path.getsize(folder / name), files[name][1])
            else:
                found = _digest(folder / name)
            if found != files[name]:
                raise CorruptCheckpointError(
                    f"{folder / name} was altered: it has {found}, not {files[name]}"
                )


def read_folder(
    folder: AnyPath,
    model: nn.Module | None = None,
    map_location: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Read a folder that was verified. Not collective. Runs no code that a file may hold.

    Args:
        folder: of :func:`save_folder`.
        model: of a tensor only this rank's shard is read if a sharded tensor of this model has its
            shape, and a name that is part of its dotted key. These are weights, their averages,
            and the state of an optimizer. All other tensors are read in full.
        map_location: the device of tensors that are read in full. On ``"meta"`` they have no data.

    Raises:
        CorruptCheckpointError: if it asks to run code, or was not written by :func:`save_folder`.
    """
    shards = shards_of(model)
    tensors: dict[str, Tensor] = {}

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

    with reading(folder):
        content = load_file(Path(folder) / STATE, map_location)
        state: dict[str, Any] = content["state"]
        if torch.device(map_location).type != "meta":
            state = map_leaves(allocate, state)
            _read_tensors(tensors, content["parts"], Path(folder))
    return state


@torch.no_grad()
def copy_to_host(state: Any, memory: Any, whole: bool) -> Any:
    """Copy a nested state into the host memory that the copy before it has used.

    That is as much memory as the state needs. For large tensors on CUDA it is pinned, and torch
    rounds their sizes up to a power of two. A tensor that the state holds under two names is one
    tensor in the copy too.

    Args:
        state: it is not changed.
        memory: what the call before has returned beside its copy; at first an empty dict.
        whole: put sharded tensors together, one by one. That is collective.

    Returns:
        The copy, and the memory to give to the next call.
    """
    used: Any = {}
    devices = set()

    def take(_: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided:  # a sparse tensor has no address
            return leaf.to("cpu", copy=True)  # host-device synchronisation
        own = data = local_tensor(leaf)
        if whole:
            data = full_tensor(leaf)
        devices.add(data.device)
        # A tensor of the training keeps its address, so its copy finds its memory again.
        # An empty tensor has no address.
        address = own.data_ptr() or id(leaf)
        flags = (data.is_conj(), data.is_neg())  # views of the same numbers
        key = (address, own.stride(), data.shape, data.dtype, *flags)
        if key not in memory:
            memory[key] = torch.empty_like(
                data,
                device="cpu",
                pin_memory=data.is_cuda and data.nbytes >= _PINNED_BYTES,
            )
        copied = used[key] = memory[key].copy_(data, non_blocking=True)
        if whole or not is_sharded(leaf):
            return copied
        return DTensor(copied, leaf._spec, requires_grad=False)  # type: ignore[attr-defined]

    copied = map_leaves(take, state)
    for device in devices - {torch.device("cpu")}:
        # Host-device synchronisation: one for all tensors of a device.
        torch.accelerator.synchronize(device)
    return copied, used


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tensors out of a state.

    Returns:
        A copy of the state, with tensors on ``"meta"``, which have no data, in their places; and
        the tensors by their dotted keys. Sparse tensors are left in the copy.
    """
    tensors: dict[str, Tensor] = {}

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


class _HashedFile(io.BufferedWriter):
    """A file that computes the digest of what is written to it."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.size = 0
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        count = super().write(data)
        self.size += count
        return count


class _Files(filesystem.FileSystem):
    """Opens the files of a rank, and knows the digests of its shards."""

    def __init__(self) -> None:
        self._files: dict[str, _HashedFile] = {}

    def create_stream(self, path: AnyPath, mode: str) -> Any:
        file = _HashedFile(path)
        self._files[Path(path).name] = file
        return file

    def digests(self) -> Digests:
        return {
            name: (file.size, file.sha256.hexdigest())
            for name, file in self._files.items()
            if name.startswith("__")
        }


class _Writer(filesystem.FileSystemWriter):
    """Raises the OSError of a full disk, as exceptions reach other ranks without their cause."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise_disk_full(error, Path(self.path))
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # Before torch 2.12 this reaches only the copy that torch writes.
        metadata.storage_data = {
            part.index: part.storage_data for parts in results for part in parts
        }


class _Reader(filesystem.FileSystemReader):
    """Looks at the container of each part before torch reads it."""

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        # Each part is in memory twice for a moment, since zipfile cannot read torch's view of it.
        part = io.BytesIO(super()._slice_file(file, sinfo).read())
        # The digest of the whole file has been compared, so checksums need not be.
        problem = find_problem(part, checksums=False)
        if problem:
            raise CorruptCheckpointError(f"{file.name}: {problem}")
        part.seek(0)
        return part


def _save_tensors(
    tensors: dict[str, Tensor], folder: Path, group: ProcessGroup | None
) -> tuple[Parts, Digests]:
    """Write this rank's shards, and on the main process the tensors that are not sharded.

    Returns:
        The parts that all ranks have written, and the digests of this rank's files.
    """
    own = tensors
    if not comm.is_main_process():
        own = {name: each for name, each in tensors.items() if is_sharded(each)}
    # To copy ahead, torch would use the accelerator from another thread.
    writer = _Writer(folder, per_thread_copy_ahead=0)
    writer.fs = files = _Files()
    # Plans are kept, since it takes long to agree on one for each tensor of each rank.
    planner = DefaultSavePlanner(flatten_state_dict=False, enable_plan_caching=True)
    try:
        saved: Any = save(
            own, storage_writer=writer, planner=planner, process_group=group
        )
    except CheckpointException as error:
        # torch would mix the plans of this save, which has failed on all ranks, with later ones.
        SavePlanner._cached_all_plans.clear()
        SavePlanner._cached_save_plan.clear()
        first, _ = next(iter(error.failures.values()))
        raise first from error
    parts: Parts = {}
    for name, tensor in saved.state_dict_metadata.items():
        parts[name] = []
        for chunk in tensor.chunks:
            index = MetadataIndex(name, chunk.offsets)
            info = saved.storage_data[index]
            part = (
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                info.relative_path,
                info.offset,
                info.length,
            )
            parts[name].append(part)
    return parts, files.digests()


def _read_tensors(tensors: dict[str, Tensor], parts: Parts, folder: Path) -> None:
    """Fill tensors as torch.distributed.checkpoint.load does, without its pickled metadata."""
    verified = load_file(folder / MANIFEST)["files"]
    saved = Metadata({}, storage_data={})
    for name, tensor in tensors.items():
        chunks = []
        for offsets, sizes, file, begin, length in parts[name]:
            if file not in verified:
                raise CorruptCheckpointError(f"{folder / file} is not in its manifest")
            # torch would count further dimensions as if they filled the tensor.
            if not len(offsets) == len(sizes) == tensor.ndim:
                raise ValueError(f"{name} has a part of another dimension")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = MetadataIndex(name, offsets)
            saved.storage_data[index] = filesystem._StorageInfo(file, begin, length)
        if not chunks:
            raise ValueError(f"{name} has no part")
        properties = TensorProperties(tensor.dtype)
        saved.state_dict_metadata[name] = TensorStorageMetadata(
            properties, tensor.shape, chunks
        )
    _refuse_holes(saved)
    reader = _Reader(folder)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, saved, is_coordinator=True)
    reader.set_up_storage_reader(saved, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()


def _refuse_holes(saved: Metadata) -> None:
    """Refuse parts that do not fill their tensor: the rest would be uninitialised memory."""
    plans = [SavePlan([])] * 2  # for one plan torch does not compare the sizes
    problems: Any = _validate_global_plan(plans, saved)
    # Before torch 2.12 the answer is whether all is well, and the log has the problems.
    if problems not in (True, []):
        raise ValueError(f"parts are missing or overlap: {problems}")


def _digest(path: Path) -> tuple[int, str]:
    """The size and the sha256 of a file (1 to 2 GB/s)."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return file.tell(), digest.hexdigest()
