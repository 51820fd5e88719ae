"""How a loss becomes an update: optimizer wrappers, schedules and parameter groups."""

from hooktrain.solver.amp_optim_wrapper import AmpOptimWrapper as AmpOptimWrapper
from hooktrain.solver.build import as_optim_wrapper as as_optim_wrapper
from hooktrain.solver.optim_wrapper import OptimWrapper as OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict as OptimWrapperDict
from hooktrain.solver.param_groups import (
    expand_param_groups as expand_param_groups,
    get_default_optimizer_params as get_default_optimizer_params,
    reduce_param_groups as reduce_param_groups,
)
from hooktrain.solver.schedule import (
    CompositeParamScheduler as CompositeParamScheduler,
    ConstantParamScheduler as ConstantParamScheduler,
    CosineParamScheduler as CosineParamScheduler,
    ExponentialParamScheduler as ExponentialParamScheduler,
    LinearParamScheduler as LinearParamScheduler,
    LRMultiplier as LRMultiplier,
    MultiStepParamScheduler as MultiStepParamScheduler,
    ParamScheduler as ParamScheduler,
    PolynomialDecayParamScheduler as PolynomialDecayParamScheduler,
    WarmupParamScheduler as WarmupParamScheduler,
)
