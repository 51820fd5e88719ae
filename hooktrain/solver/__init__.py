"""How a loss becomes an update: optimizer wrappers, schedules and parameter groups."""

from hooktrain.solver.amp_optim_wrapper import AmpOptimWrapper
from hooktrain.solver.build import (
    expand_param_groups,
    get_default_optimizer_params,
    reduce_param_groups,
)
from hooktrain.solver.composite import CompositeParamScheduler, WarmupParamScheduler
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.solver.param_scheduler import LRMultiplier
from hooktrain.solver.schedule import (
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
    StepParamScheduler,
    StepWithFixedGammaParamScheduler,
)

__all__ = [
    "AmpOptimWrapper",
    "CompositeParamScheduler",
    "ConstantParamScheduler",
    "CosineParamScheduler",
    "ExponentialParamScheduler",
    "LRMultiplier",
    "LinearParamScheduler",
    "MultiStepParamScheduler",
    "OptimWrapper",
    "OptimWrapperDict",
    "ParamScheduler",
    "PolynomialDecayParamScheduler",
    "StepParamScheduler",
    "StepWithFixedGammaParamScheduler",
    "WarmupParamScheduler",
    "expand_param_groups",
    "get_default_optimizer_params",
    "reduce_param_groups",
]
