"""The registries: what a configuration may choose by ``type``.

Each part of the package registers what it has to offer when it is imported; add your own with
``@MODELS.register_module()``.
"""

from hooktrain.utils.registry import Registry

HOOKS = Registry("hooks")
MODELS = Registry("models")
MODEL_WRAPPERS = Registry("model wrappers")
OPTIMIZERS = Registry("optimizers")
OPTIM_WRAPPERS = Registry("optimizer wrappers")
OPTIM_WRAPPER_CONSTRUCTORS = Registry("constructors of optimizer wrappers")
PARAM_SCHEDULERS = Registry("parameter schedulers")
STRATEGIES = Registry("strategies")
