"""Folders of shards: each rank writes its part of the tensors, on a disk that all ranks see.

The tensors are in files of torch.distributed.checkpoint. ``state.pth`` holds everything else: the
state, with tensors without data in the places of the tensors, and where the parts of each tensor
are. So torch's own ``.metadata``, a pickle that may run any code, is not read. ``manifest.json``
holds size and digest of each file, which are verified before anything is read. The folder gets its
name when it is complete.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hooktrain.checkpoint.files import (
    MANIFEST,
    METADATA,
    CorruptCheckpointError,
    is_folder,
    load_file,
    write_file,
)
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks, on_main_process
from hooktrain.utils.file_io import AnyPath, atomic_write, raise_disk_full, replacing
from hooktrain.utils.tensors import is_sharded, map_leaves

STATE = "state.pth"
_PLANS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}

# torch warns of a save by one process without a process group, which is fine here.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def save_folder(
    state: dict[str, Any], folder: AnyPath, group: ProcessGroup | None = None
) -> None:
    """Write a state to a folder that is there as a whole, or not at all. Collective.

    A sharded checkpoint of that name is replaced.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets. Of a DTensor each
            rank writes its shard. Of all else the main process's is written.
        folder: its final name. Its parent must exist.
        group: of all ranks. In a thread, one that nobody else uses.

    Raises:
        ValueError: on every rank, if two tensors have one dotted name, or another rank has a
            tensor that the main process lacks.
        FileExistsError: if something else than a sharded checkpoint has that name.
        OSError: on every rank, if the disk of one is full or fails. The old folder is as it was.
    """
    target = Path(folder)
    skeleton, tensors = split_state(state)
    with ExitStack() as stack:

        def begin() -> Path:
            if target.exists() and not is_folder(target):
                raise FileExistsError(
                    f"{target} is no sharded checkpoint: it is not replaced"
                )
            return stack.enter_context(replacing(target))

        temporary = on_main_process(begin, group)
        saved = _save_tensors(tensors, temporary, group)
        own = f"__{comm.get_rank()}_*"
        digests = on_all_ranks(
            lambda: {p.name: _digest(p) for p in temporary.glob(own)}, group
        )

        def complete() -> None:
            parts_of = _parts_of(saved)
            if unknown := parts_of.keys() - tensors.keys():
                raise ValueError(
                    f"the main process has no {unknown}, which other ranks have"
                )
            write_file({"state": skeleton, "parts": parts_of}, temporary / STATE)
            files = {name: record for part in digests for name, record in part.items()}
            if absent := [name for name in files if not (temporary / name).is_file()]:
                raise OSError(
                    f"{temporary} lacks {absent}: the ranks do not share the disk"
                )
            files |= {name: _digest(temporary / name) for name in (METADATA, STATE)}
            with atomic_write(temporary / MANIFEST) as file:
                file.write(json.dumps(files).encode())
            stack.close()  # the rename

        on_main_process(complete, group)


def read_folder(
    folder: AnyPath,
    model: nn.Module | None = None,
    map_location: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Read a folder that was verified. Not collective. Runs no code that a file may hold.

    Args:
        folder: of :func:`save_folder`.
        model: a tensor is read as this rank's shard if the path to it has the name of a sharded
            tensor of this model, of the same shape: the weights, their averages, the state of an
            optimizer by names. All others are read in full.
        map_location: where these go. On ``"meta"`` they have no data.

    Raises:
        CorruptCheckpointError: if the folder holds something else than a checkpoint.
    """
    in_model = {} if model is None else model.state_dict()
    tensors: dict[str, Tensor] = {}

    def make_room(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        name = _dotted(path)
        like = _namesake(name, leaf.shape, in_model)
        if is_sharded(like):
            tensors[name] = torch.empty_like(
                like, dtype=leaf.dtype, requires_grad=False
            )
        else:
            tensors[name] = torch.empty_like(leaf, device=map_location)
        return tensors[name]

    content = load_file(Path(folder) / STATE)
    if not isinstance(content, dict) or content.keys() != {"state", "parts"}:
        raise CorruptCheckpointError(
            f"{folder} does not say where the parts of its tensors are"
        )
    state: dict[str, Any] = map_leaves(make_room, content["state"])
    parts = content["parts"]
    if lacking := sorted(tensors.keys() - parts.keys()):
        raise CorruptCheckpointError(f"{folder} lacks the tensors {lacking[:10]}")
    if torch.device(map_location).type != "meta":
        _read_tensors(tensors, parts, folder)
    return state


def verify_folder(folder: AnyPath, part: slice = slice(None)) -> None:
    """Compare the files of a sharded checkpoint with its manifest.

    Args:
        folder: of :func:`save_folder`.
        part: of the files, sorted by name.

    Raises:
        CorruptCheckpointError: naming the first file that is missing, truncated or altered.
        FileNotFoundError: if there is no such folder; other ``OSError`` if it cannot be read.
    """
    folder = Path(folder)
    files = _read_manifest(folder)
    for name in sorted(files)[part]:
        path = folder / name
        if name != path.name or not path.is_file():
            raise CorruptCheckpointError(f"{path} is missing")
        if (found := _digest(path)) != files[name]:
            raise CorruptCheckpointError(
                f"{path} was altered: it has {found}, not {files[name]}"
            )


def new_stager() -> DefaultStager:
    """What copies a state into host memory, and keeps that for the next copy."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=torch.accelerator.is_available(),
        )
    )


def split_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Take the tensors out of a nested state. It is not changed.

    Sparse and quantized tensors stay where they are.

    Returns:
        A copy of the containers with tensors on the device ``"meta"`` in the places of the tensors;
        and the tensors by their dotted names.

    Raises:
        ValueError: if two tensors have one name, as in ``{"a.b": x, "a": {"b": y}}``.
    """
    tensors: dict[str, Tensor] = {}

    def take(path: tuple[Any, ...], leaf: Any) -> Any:
        plain = type(leaf) in (Tensor, nn.Parameter, DTensor)
        if not plain or leaf.layout is not torch.strided or leaf.is_quantized:
            return leaf
        name = _dotted(path)
        if name in tensors:
            raise ValueError(f"two tensors of the state are both named {name!r}")
        tensors[name] = leaf.detach()
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"
        )

    return map_leaves(take, state), tensors


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _namesake(path: str, shape: torch.Size, in_model: Mapping[str, Any]) -> Any:
    """The tensor of a model whose name is in a dotted path, if it has the shape."""
    parts = path.split(".")
    for start in range(len(parts)):
        for end in range(len(parts), start, -1):
            found = in_model.get(".".join(parts[start:end]))
            if isinstance(found, Tensor) and found.shape == shape:
                return found
    return None


class _Writer(filesystem.FileSystemWriter):
    """Says that a disk is full before the exception is sent to other ranks, without its cause."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise_disk_full(error, Path(self.path))
            raise


def _save_tensors(
    tensors: dict[str, Tensor], folder: Path, group: ProcessGroup | None
) -> Metadata:
    """Write this rank's part; return what all ranks have written."""
    is_main = comm.is_main_process()
    own = {
        n: tensor
        for n, tensor in tensors.items()
        if is_main or isinstance(tensor, DTensor)
    }
    # Copying ahead would use the accelerator, from another thread.
    writer = _Writer(folder, per_thread_copy_ahead=0)
    # Plans are kept: agreeing on them takes the main process 60 us for each tensor of each rank.
    planner = DefaultSavePlanner(**_PLANS, enable_plan_caching=True)
    try:
        saved: Metadata = save(
            own, storage_writer=writer, planner=planner, process_group=group
        )
    except CheckpointException as error:
        # torch would mix plans that failed with later ones. They fail on all ranks alike.
        SavePlanner._cached_all_plans.clear()
        SavePlanner._cached_save_plan.clear()
        first, _ = next(iter(error.failures.values()))
        raise first from error
    return saved


def _parts_of(saved: Metadata) -> dict[str, list[Any]]:
    """Of each part of each tensor its place and shape, its file, and where in the file it is."""
    entries: dict[str, Any] = saved.state_dict_metadata
    parts: dict[str, list[Any]] = {name: [] for name in entries}
    for name, entry in entries.items():
        for chunk in entry.chunks:
            info = saved.storage_data[MetadataIndex(name, chunk.offsets)]
            where = info.relative_path, info.offset, info.length
            parts[name].append((tuple(chunk.offsets), tuple(chunk.sizes), *where))
    return parts


def _read_tensors(
    tensors: dict[str, Tensor], parts: dict[str, list[Any]], folder: AnyPath
) -> None:
    """Do what dcp.load does, except that nothing is unpickled without restrictions."""
    found = Metadata({}, storage_data={})
    for name, tensor in tensors.items():
        properties = metadata.TensorProperties(tensor.dtype)
        entry = metadata.TensorStorageMetadata(properties, tensor.shape, [])
        found.state_dict_metadata[name] = entry
        for offsets, sizes, *where in parts[name]:
            box = torch.Size(offsets), torch.Size(sizes)
            entry.chunks.append(metadata.ChunkStorageMetadata(*box))
            found.storage_data[MetadataIndex(name, offsets)] = filesystem._StorageInfo(
                *where
            )
    reader, planner = filesystem.FileSystemReader(folder), DefaultLoadPlanner(**_PLANS)
    planner.set_up_planner(tensors, found, is_coordinator=True)
    reader.set_up_storage_reader(found, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _digest(path: Path) -> list[Any]:
    """The size and the sha256 of a file (1 to 2 GB/s)."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return [file.tell(), digest.hexdigest()]


def _read_manifest(folder: Path) -> dict[str, list[Any]]:
    path = folder / MANIFEST
    try:
        files: dict[str, list[Any]] = json.loads(path.read_bytes())
        return {
            name: [int(size), str(digest)] for name, (size, digest) in files.items()
        }
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.exists():
            raise FileNotFoundError(
                f"there is no checkpoint {str(folder)!r}"
            ) from error
        raise CorruptCheckpointError(
            f"{folder} has no {MANIFEST}: it is no checkpoint"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is not readable: {error!r}") from error
