"""How a loss becomes an update: optimizer wrappers, schedules and parameter groups."""

from hooktrain.solver.amp_optim_wrapper import AmpOptimWrapper
from hooktrain.solver.build import (
    expand_param_groups,
    get_default_optimizer_params,
    reduce_param_groups,
)
from hooktrain.solver.build_optim_wrapper import build_optim_wrapper
from hooktrain.solver.build_param_scheduler import build_param_scheduler
from hooktrain.solver.match_state import match_optimizer_state, name_param_groups
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_constructor import DefaultOptimWrapperConstructor
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.solver.param_scheduler import (
    ConstantLR,
    ConstantMomentum,
    CosineAnnealingLR,
    CosineAnnealingMomentum,
    CosineRestartLR,
    CosineRestartMomentum,
    ExponentialLR,
    ExponentialMomentum,
    LinearLR,
    LinearMomentum,
    MultiStepLR,
    MultiStepMomentum,
    OneCycleLR,
    PolyLR,
    PolyMomentum,
    ReduceOnPlateauLR,
    ReduceOnPlateauMomentum,
    StepLR,
    StepMomentum,
)
from hooktrain.solver.schedule import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    LRMultiplier,
    MultiStepParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
    StepParamScheduler,
    StepWithFixedGammaParamScheduler,
    WarmupParamScheduler,
)

__all__ = [
    "AmpOptimWrapper",
    "CompositeParamScheduler",
    "ConstantLR",
    "ConstantMomentum",
    "ConstantParamScheduler",
    "CosineAnnealingLR",
    "CosineAnnealingMomentum",
    "CosineParamScheduler",
    "CosineRestartLR",
    "CosineRestartMomentum",
    "DefaultOptimWrapperConstructor",
    "ExponentialLR",
    "ExponentialMomentum",
    "ExponentialParamScheduler",
    "LRMultiplier",
    "LinearLR",
    "LinearMomentum",
    "LinearParamScheduler",
    "MultiStepLR",
    "MultiStepMomentum",
    "MultiStepParamScheduler",
    "OneCycleLR",
    "OptimWrapper",
    "OptimWrapperDict",
    "ParamScheduler",
    "PolyLR",
    "PolyMomentum",
    "PolynomialDecayParamScheduler",
    "ReduceOnPlateauLR",
    "ReduceOnPlateauMomentum",
    "StepLR",
    "StepMomentum",
    "StepParamScheduler",
    "StepWithFixedGammaParamScheduler",
    "WarmupParamScheduler",
    "build_optim_wrapper",
    "build_param_scheduler",
    "expand_param_groups",
    "get_default_optimizer_params",
    "match_optimizer_state",
    "name_param_groups",
    "reduce_param_groups",
]
