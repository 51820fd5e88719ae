"""Models that own their step, their wrappers, and what a trainer does to models."""

from hooktrain.model.anomalous_params import detect_anomalous_params
from hooktrain.model.averaged import BaseAveragedModel
from hooktrain.model.averages import (
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from hooktrain.model.base_model import BaseModel
from hooktrain.model.batch_norm import (
    BatchNormXd,
    CPUSyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from hooktrain.model.precise_bn import get_bn_modules, update_bn_stats
from hooktrain.model.preprocessor import BaseDataPreprocessor, ImgDataPreprocessor
from hooktrain.model.separate_wrapper import SeparateDistributedDataParallel
from hooktrain.model.wrappers import (
    NamingDistributedDataParallel,
    StepDistributedDataParallel,
    is_model_wrapper,
)

__all__ = [
    "BaseAveragedModel",
    "BaseDataPreprocessor",
    "BaseModel",
    "BatchNormXd",
    "CPUSyncBatchNorm",
    "ExponentialMovingAverage",
    "ImgDataPreprocessor",
    "MomentumAnnealingEMA",
    "NamingDistributedDataParallel",
    "SeparateDistributedDataParallel",
    "StepDistributedDataParallel",
    "StochasticWeightAverage",
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "get_bn_modules",
    "is_model_wrapper",
    "revert_sync_batchnorm",
    "update_bn_stats",
]
