"""Data: samplers, data sets, and loaders that resume."""

from typing import NoReturn

from hooktrain.data.dataset import (
    DatasetFromList as DatasetFromList,
    MapDataset as MapDataset,
    ToIterableDataset as ToIterableDataset,
)
from hooktrain.data.loader import (
    TrainLoader as TrainLoader,
    build_test_loader as build_test_loader,
    build_train_loader as build_train_loader,
)
from hooktrain.data.samplers import (
    InferenceSampler as InferenceSampler,
    StreamSampler as StreamSampler,
    TrainingSampler as TrainingSampler,
)

_IN_COMPAT = (
    "GroupedBatchSampler",
    "RepeatFactorTrainingSampler",
)


def __getattr__(name: str) -> NoReturn:
    if name in _IN_COMPAT:
        raise ImportError(f"{name} is in hooktrain.compat.detectron2")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
