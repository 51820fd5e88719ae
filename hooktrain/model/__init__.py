"""Models that own their step, their wrappers, and what a trainer does to models."""

from hooktrain.model.averaged import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from hooktrain.model.base_model import BaseModel, detect_anomalous_params
from hooktrain.model.batch_norm import (
    BatchNormXd,
    convert_sync_batchnorm,
    get_bn_modules,
    revert_sync_batchnorm,
    update_bn_stats,
)
from hooktrain.model.preprocessor import BaseDataPreprocessor, ImgDataPreprocessor
from hooktrain.model.wrappers import (
    NamingDistributedDataParallel,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    is_model_wrapper,
)

__all__ = [
    "BaseAveragedModel",
    "BaseDataPreprocessor",
    "BaseModel",
    "BatchNormXd",
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
