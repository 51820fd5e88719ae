"""Data: samplers, loaders that resume, and the two data sets that need no download."""

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
from hooktrain.data.text import CharVocabulary, PythonDocs, TextDataset, python_docs_vocabulary

__all__ = [
    "CLASS_NAMES",
    "CharVocabulary",
    "DatasetFromList",
    "DigitsDataset",
    "GroupedBatchSampler",
    "InferenceSampler",
    "MapDataset",
    "PythonDocs",
    "RandomShift",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "StreamSampler",
    "TextDataset",
    "ToIterableDataset",
    "TrainLoader",
    "TrainingSampler",
    "build_test_loader",
    "build_train_loader",
    "load_digits",
    "python_docs_vocabulary",
]
