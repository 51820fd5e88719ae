"""Models with a training step, their wrappers, averaged weights and batch-norm statistics."""

from hooktrain.model.averaged import (
    BaseAveragedModel as BaseAveragedModel,
    ExponentialMovingAverage as ExponentialMovingAverage,
    StochasticWeightAverage as StochasticWeightAverage,
)
from hooktrain.model.base_model import (
    BaseDataPreprocessor as BaseDataPreprocessor,
    BaseModel as BaseModel,
    init_weights_once as init_weights_once,
)
from hooktrain.model.batch_norm import (
    get_bn_modules as get_bn_modules,
    update_bn_stats as update_bn_stats,
)
from hooktrain.model.wrappers import (
    NamingDistributedDataParallel as NamingDistributedDataParallel,
    SeparateDistributedDataParallel as SeparateDistributedDataParallel,
    StepDistributedDataParallel as StepDistributedDataParallel,
    is_model_wrapper as is_model_wrapper,
    unwrap_model as unwrap_model,
)
