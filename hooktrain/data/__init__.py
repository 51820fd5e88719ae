"""Data: samplers, loaders that resume, and the digits that come with the package."""

from hooktrain.data.dataset import DatasetFromList, MapDataset, ToIterableDataset
from hooktrain.data.digits import CLASS_NAMES, DigitsDataset, RandomShift, load_digits
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
    "CLASS_NAMES",
    "DatasetFromList",
    "DigitsDataset",
    "GroupedBatchSampler",
    "InferenceSampler",
    "MapDataset",
    "RandomShift",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "StreamSampler",
    "ToIterableDataset",
    "TrainLoader",
    "TrainingSampler",
    "build_test_loader",
    "build_train_loader",
    "load_digits",
]
