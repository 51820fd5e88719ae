"""From the configuration of an optimizer to the wrapper of a model's optimizer."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from hooktrain.config import instantiate
from hooktrain.solver.amp_optim_wrapper import AmpOptimWrapper
from hooktrain.solver.build import ParamGroup, _named_parameters
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.solver.optimizers import fused_by_default
from hooktrain.solver.paramwise import ParamwiseRules
from hooktrain.utils.registry import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    did_you_mean,
)

__all__ = ["DefaultOptimWrapperConstructor"]

for _wrapper in (OptimWrapper, AmpOptimWrapper, OptimWrapperDict):
    OPTIM_WRAPPERS.register(_wrapper)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Called with a model, it gives a wrapper around a new optimizer of the model's parameters.

    Without rules the optimizer has one group of all parameters. With rules it has those that are
    trainable, in as few groups as there are different settings. Every group has ``param_names``.
    A subclass may override :meth:`param_groups`.

    Adam and AdamW on CUDA are built with ``fused=True``, unless ``fused``, ``foreach`` or
    ``differentiable`` is configured.

    Args:
        optim_wrapper_cfg: ``optimizer`` is a dict with ``type`` (a name of the registry
            ``OPTIMIZERS``, a class, or its dotted name) and the arguments of the optimizer.
            ``type`` is the class of the wrapper, by default :class:`OptimWrapper`, and the other
            items are its arguments. It is not changed.
        paramwise_cfg: the rules, see :class:`~hooktrain.solver.paramwise.ParamwiseRules`.

    Raises:
        TypeError: if one of these is no dict, or a rule has a value of the wrong type.
        KeyError: if the optimizer's ``type`` is missing or unknown.
        ValueError: if ``optimizer`` is missing; for an unknown rule or an impossible value; or if
            a rule multiplies ``lr`` or ``weight_decay``, and the optimizer's is not configured.

    Example::

        constructor = DefaultOptimWrapperConstructor(
            dict(optimizer=dict(type="SGD", lr=0.1, weight_decay=1e-4)),
            dict(norm_decay_mult=0.0, custom_keys={"backbone": dict(lr_mult=0.1)}),
        )
        optim_wrapper = constructor(model)
    """

    def __init__(
        self,
        optim_wrapper_cfg: Mapping[str, Any],
        paramwise_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(optim_wrapper_cfg, Mapping):
            raise TypeError(f"optim_wrapper_cfg must be a dict, but got {optim_wrapper_cfg!r}")
        # Plain containers, references resolved: what an optimizer gets, a checkpoint must hold.
        self.optim_wrapper_cfg = dict(instantiate(optim_wrapper_cfg))
        if "optimizer" not in self.optim_wrapper_cfg:
            near = did_you_mean("optimizer", optim_wrapper_cfg)
            raise ValueError(f"optim_wrapper_cfg needs 'optimizer'{near}")
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer")
        if not isinstance(self.optimizer_cfg, Mapping):
            raise TypeError(f"optimizer must be a dict with 'type', but got {self.optimizer_cfg!r}")
        if "type" not in self.optimizer_cfg:
            raise KeyError(f"optimizer needs 'type', but got {self.optimizer_cfg!r}")
        self.base_lr = self.optimizer_cfg.get("lr")
        self.base_wd = self.optimizer_cfg.get("weight_decay")
        self._optimizer = OPTIMIZERS.find(self.optimizer_cfg["type"])
        # Not all optimizers call it "params".
        self._params, *options = inspect.signature(self._optimizer).parameters
        if self._params in self.optimizer_cfg:
            raise ValueError(f"the model gives {self._params!r}: it cannot be configured")
        self.paramwise_cfg = {} if paramwise_cfg is None else instantiate(paramwise_cfg)
        self._rules = ParamwiseRules.from_config(self.paramwise_cfg)
        self._rules.check(self.base_lr, self.base_wd, options)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """The wrapper of a new optimizer.

        Raises:
            TypeError: if ``model`` is not a module, or the optimizer or the wrapper does not take
                its arguments.
            ValueError: if a parameter has two names for which the rules differ.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, but got {model!r}")
        groups = self.param_groups(model)
        chosen: dict[str, Any] = {self._params: groups}
        if fused_by_default(self._optimizer, self.optimizer_cfg, groups):
            chosen["fused"] = True
        optimizer = OPTIMIZERS.build(self.optimizer_cfg, **chosen)
        wrapper: OptimWrapper = OPTIM_WRAPPERS.build(
            {"type": OptimWrapper, **self.optim_wrapper_cfg}, optimizer=optimizer
        )
        return wrapper

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        """The parameter groups of a model, which may be wrapped."""
        if self.paramwise_cfg:
            return self._rules.param_groups(model, self.base_lr, self.base_wd)
        parameters = _named_parameters(model)
        return [
            {
                "params": [parameter for _, _, parameter in parameters],
                "param_names": [names[0] for names, _, _ in parameters],
            }
        ]
