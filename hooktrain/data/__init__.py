"""Data: samplers, data sets, and loaders that resume."""

from hooktrain.data.dataset import DatasetFromList, MapDataset, ToIterableDataset
from hooktrain.data.grouped_batch_sampler import GroupedBatchSampler
from hooktrain.data.loader import TrainLoader, build_test_loader, build_train_loader
from hooktrain.data.samplers import (
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
