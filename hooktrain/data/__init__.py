"""Data: samplers, data sets, and loaders that resume."""

from hooktrain.data.dataset import MapDataset as MapDataset
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
