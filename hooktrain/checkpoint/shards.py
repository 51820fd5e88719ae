"""Tensors by name in the files of torch.distributed.checkpoint.

Its planners, writers and readers are used one by one, where ``dcp.save`` and ``dcp.load`` call them
in a row: so the ranks talk in the main thread, and the files are written in another; and nothing is
unpickled that is not known.
"""

import dataclasses
import os
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from hooktrain.checkpoint.agreement import on_all_ranks, on_main_process
from hooktrain.checkpoint.manifest import METADATA
from hooktrain.checkpoint.storage import CorruptCheckpointError
from hooktrain.utils import comm

__all__ = ["AgreedPlans", "ShardReader", "ShardWriter"]

_MODULE = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "ChunkStorageMetadata"),
    (_MODULE, "Metadata"),
    (_MODULE, "MetadataIndex"),
    (_MODULE, "StorageMeta"),
    (_MODULE, "TensorProperties"),
    (_MODULE, "TensorStorageMetadata"),
    (_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


@dataclasses.dataclass
class AgreedPlans:
    """Who writes what, as the ranks agreed on it for a save.

    That takes the main process some 60 microseconds for each tensor of each rank: longer than all
    else that a save makes training wait for. So it is kept for the next one.
    """

    proposed: SavePlan | None = None
    settled: SavePlan | None = None
    metadata: Metadata | None = None


class ShardWriter:
    """Writes the tensors of all ranks into a folder, each rank its own part.

    The constructor is collective; it decides which rank writes what. Then each rank calls
    :meth:`write`, in any thread, and the main process :meth:`finish`.

    Attributes:
        local: the tensors, or shards of them, that this rank is to write, by name. They may be
            replaced by copies until :meth:`write` is called.

    Args:
        tensors: by name. Of a DTensor every rank has its shard; of the others the main process's
            are written.
        folder: an existing folder, on a disk that all ranks see.
        agreed: what was agreed on for the last save. If the tensors are like those on every rank,
            it holds again; else it is replaced.

    Raises:
        ValueError: on every rank, if a rank has a DTensor that the main process lacks.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], folder: Path, agreed: AgreedPlans | None = None
    ) -> None:
        own = {
            name: tensor
            for name, tensor in tensors.items()
            if comm.is_main_process() or isinstance(tensor, DTensor)
        }
        self.local: dict[str, Tensor] = {}
        self._folder = folder
        # Nothing is copied ahead: that would use the accelerator, from another thread.
        self._writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
        self._planner = _Planner()
        agreed = AgreedPlans() if agreed is None else agreed
        proposed = on_all_ranks(lambda: self._plan_own(own))
        if comm.any_rank(proposed != agreed.proposed):
            agreed.proposed = None  # until all is agreed on
            plans = comm.gather(proposed)
            on_main_process(lambda: self._plan_all(plans, agreed))
            # Each rank gets its own plan only: all of them would be large with many ranks.
            agreed.settled = comm.scatter(plans)
            agreed.proposed = proposed
        assert agreed.settled is not None
        self._metadata = agreed.metadata
        self._plan = self._planner.finish_plan(agreed.settled)
        for item in self._plan.items:
            tensor = own[item.index.fqn]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self.local[item.index.fqn] = local.detach()
        self._planner.state_dict = {}  # so as not to hold what another rank writes

    def _plan_own(self, tensors: dict[str, Tensor]) -> SavePlan:
        is_main = comm.is_main_process()
        self._writer.set_up_storage_writer(is_main)
        self._planner.set_up_planner(tensors, is_coordinator=is_main)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _plan_all(self, plans: list[SavePlan], agreed: AgreedPlans) -> None:
        """Settle, in the list itself, which rank writes what."""
        known = {item.index.fqn for item in plans[0].items}
        others = sorted({item.index.fqn for plan in plans for item in plan.items} - known)
        if others:
            raise ValueError(f"the main process has no {others}, which other ranks have")
        settled, agreed.metadata = self._planner.create_global_plan(plans)
        plans[:] = self._writer.prepare_global_plan(settled)

    def write(self) -> tuple[list[str], list[Any]]:
        """Write this rank's files, and wait until they are on the disk. Not collective.

        Returns:
            The names of the files, and what :meth:`finish` has to know about them.
        """
        self._planner.local = self.local
        results = self._writer.write_data(self._plan, self._planner).wait()
        # A rank without a shard writes an empty file.
        pattern = f"__{comm.get_rank()}_*.distcp"
        return sorted(path.name for path in self._folder.glob(pattern)), results

    def finish(self, results: list[list[Any]]) -> None:
        """Write which tensor lies where, from the results of all ranks. For the main process."""
        assert self._metadata is not None
        self._writer.finish(dataclasses.replace(self._metadata), results)


class ShardReader:
    """Reads tensors from a folder, whichever ranks have written it. Nothing here is collective.

    Attributes:
        tensors: the shape (``.size``) and type (``.properties.dtype``) of each tensor, by name.

    Args:
        folder: of which the files have been verified.
        files: their names.

    Raises:
        CorruptCheckpointError: if there is more in the folder than tensors in these files.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self.tensors: dict[str, TensorStorageMetadata] = {}
        for name, entry in self._metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CorruptCheckpointError(f"{folder} holds {name!r}, which is no tensor")
            self.tensors[name] = entry
        unknown = {info.relative_path for info in self._metadata.storage_data.values()} - set(files)
        if unknown:
            raise CorruptCheckpointError(f"{folder} refers to files it does not have: {unknown}")

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into tensors that are there, of a DTensor this rank's shard.

        Args:
            tensors: some of :attr:`tensors`, with their shapes; they may be of another dtype.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()


class _Planner(DefaultSavePlanner):
    """Plans with the tensors as they are, and writes what was made of them since."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.local: dict[str, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.local[index.fqn]


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = os.path.join(self.path, METADATA)
        with open(path, "rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except Exception as error:  # a pickle that is not one raises whatever it likes
                raise CorruptCheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CorruptCheckpointError(f"{path} holds a {type(metadata).__name__}, no metadata")
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows the few types that the metadata is made of, none of which runs foreign code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or _is_constant(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refused, since it asks for {module}.{name}. Nothing was run")


def _is_constant(module: str, name: str) -> bool:
    return module == "torch" and isinstance(
        getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
    )
