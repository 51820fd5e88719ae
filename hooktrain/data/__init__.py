"""Data: samplers, data sets, and loaders that resume."""

from hooktrain.data.dataset import DatasetFromList, MapDataset, ToIterableDataset
from hooktrain.data.loader import TrainLoader, build_test_loader, build_train_loader
from hooktrain.data.samplers import (
    GroupedBatchSampler,
    InferenceSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    StreamSampler,
    TrainingSampler,
)

__all__ = [
    "DatasetFromList",
    "GroupedBatchSampler",
    "InferenceSampler",
    "MapDataset",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "StreamSampler",
    "ToIterableDataset",
    "TrainLoader",
    "TrainingSampler",
    "build_test_loader",
    "build_train_loader",
]
