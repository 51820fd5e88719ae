"""MMEngine's constructor of optimizer wrappers, with its rules for parameters."""

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from itertools import compress
from typing import Any

from torch import nn

from hooktrain.compat.mmengine.optim_wrapper import OptimWrapper
from hooktrain.compat.mmengine.registry import OPTIM_WRAPPERS, OPTIMIZERS
from hooktrain.config import instantiate
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver.param_groups import NORMS, ParamGroup, group_trainable
from hooktrain.utils.names import did_you_mean, refuse_overrides

logger = logging.getLogger(__name__)

Rules = Mapping[str, Any]

# The rules for weight decay. The first one that applies to a parameter counts.
_DECAYS = ("norm_decay_mult", "bias_decay_mult", "dwconv_decay_mult", "flat_decay_mult")
_MULTIPLIED = {"lr_mult": "lr", "decay_mult": "weight_decay"}
RULES = ("custom_keys", "bypass_duplicate", "bias_lr_mult", *_DECAYS)


class DefaultOptimWrapperConstructor:
    """A callable that wraps a new optimizer of a model's parameters.

    Without rules the optimizer has one group of all parameters. With rules it has the trainable
    parameters, each once, in as few groups as there are different settings. A subclass may
    override :meth:`add_params`, and then use other rules in ``paramwise_cfg``.

    A parameter that matches a custom key gets the settings of that key, and no other rule applies.
    For the others the multipliers apply; if several multipliers of the weight decay apply, the
    first of norm, bias, dwconv, flat counts. If a parameter has several names, the first one
    counts. The rules:

    - ``custom_keys``: settings by a part of a parameter's name: ``{"backbone": {"lr_mult": 0.1}}``.
      If several keys match, the longest counts, and of equally long keys the alphabetically first.
      A setting is ``lr_mult``, ``decay_mult``, or an option of the parameter group. The name of a
      parameter of the model itself begins with a dot here, so that ``".bias"`` matches every bias.
    - ``bias_lr_mult``, ``bias_decay_mult``: for the learning rate and the weight decay of
      parameters named ``bias``; ``bias_lr_mult`` does not apply to normalisation layers.
    - ``norm_decay_mult``: for the weight decay of normalisation layers.
    - ``dwconv_decay_mult``: for the weight decay of depthwise convolutions (2d).
    - ``flat_decay_mult``: for the weight decay of one-dimensional parameters.
    - ``bypass_duplicate``: has no effect, since each parameter is always taken once.

    Args:
        optim_wrapper_cfg: a dict whose ``optimizer`` is a dict with ``type`` (a name in the
            registry ``OPTIMIZERS``, a class, or its dotted name) and the arguments of the
            optimizer. ``type`` is the class of the wrapper, by default
            :class:`OptimWrapper`, and the other items are its arguments. It is not changed.
        paramwise_cfg: the rules.

    Raises:
        TypeError: when a subclass is defined that overrides a method only MMEngine calls.

    Example::

        constructor = DefaultOptimWrapperConstructor(
            dict(optimizer=dict(type="SGD", lr=0.1, weight_decay=1e-4)),
            dict(norm_decay_mult=0.0, custom_keys={"backbone": dict(lr_mult=0.1)}),
        )
        optim_wrapper = constructor(model)
    """

    def __init_subclass__(cls) -> None:
        instead = "override add_params()"
        refuse_overrides(cls, {"_validate_cfg": instead, "_is_in": instead})

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Rules | None = None
    ) -> None:
        # Plain containers, since a checkpoint must hold the optimizer's settings.
        self.optim_wrapper_cfg = dict(instantiate(optim_wrapper_cfg))
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer", {})
        self.paramwise_cfg = instantiate(paramwise_cfg or {})
        self.base_lr = self.optimizer_cfg.get("lr")
        self.base_wd = self.optimizer_cfg.get("weight_decay")

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the optimizer and wrap it.

        Args:
            model: the model, which may be wrapped.

        Raises:
            KeyError: if the ``type`` of the optimizer or the wrapper is unknown.
            TypeError: if the optimizer or the wrapper does not take its arguments.
        """
        params: list[Any] = []
        if self.paramwise_cfg:
            self.add_params(params, unwrap_model(model))
        else:
            params += model.parameters()
        optimizer = OPTIMIZERS.build(self.optimizer_cfg, params=params)
        return OPTIM_WRAPPERS.build(  # type: ignore[no-any-return]
            self.optim_wrapper_cfg, type=OptimWrapper, optimizer=optimizer
        )

    def add_params(
        self, params: Any, module: nn.Module, prefix: str = "", **_: Any
    ) -> None:
        """Add the parameter groups of a module to a list, by the rules.

        Args:
            params: the list; a subclass may add groups in other ways.
            module: the model, unwrapped.
            prefix: must be "", since rules are for names in the whole model.

        Raises:
            TypeError: if a value of ``custom_keys`` is not a dict.
            ValueError: if ``module`` is only a part of the model, a rule is unknown, a multiplier
                is misspelt, or the optimizer lacks the setting that it multiplies.
        """
        if prefix:
            raise ValueError(
                f"rules apply to the whole model, not to its submodule {prefix!r}"
            )
        rules = {}
        for rule, value in self.paramwise_cfg.items():
            # A subclass may have other rules.
            if rule not in RULES and type(self) is DefaultOptimWrapperConstructor:
                raise ValueError(
                    f"paramwise_cfg has no rule {rule!r}{did_you_mean(rule, RULES)}"
                )
            if value is not None:
                rules[rule] = value
        _check_custom_keys(rules.get("custom_keys", {}), module)
        base = {"lr": self.base_lr, "weight_decay": self.base_wd}
        params += group_trainable(module, partial(_paramwise, rules, base))


def _check_custom_keys(custom_keys: Rules, model: nn.Module) -> None:
    """Refuse a misspelt multiplier, and warn about a key that matches no parameter.

    Both would silently have no effect: other settings of a key go to the optimizer's groups.
    """
    names = [_dotted(name) for name, _ in model.named_parameters()]
    for key, custom in custom_keys.items():
        for setting in custom:
            near = get_close_matches(setting, _MULTIPLIED, n=1, cutoff=0.8)
            if near and setting not in _MULTIPLIED:
                raise ValueError(
                    f"custom_keys[{key!r}]: {setting!r} should be {near[0]!r}"
                )
        # Not an error, since one configuration may serve many models.
        if not any(key in name for name in names):
            logger.warning("custom_keys: %r matches no parameter's name", key)


def _dotted(name: str) -> str:
    """The name that custom keys match, with a leading dot for a parameter of the model itself."""
    return name if "." in name else f".{name}"


def _paramwise(
    rules: Rules, base: Rules, name: str, module: nn.Module, parameter: nn.Parameter
) -> ParamGroup:
    """The settings of a parameter, by its name."""
    custom_keys = rules.get("custom_keys", {})
    keys = [key for key in custom_keys if key in _dotted(name)]
    if keys:
        longest = min(keys, key=lambda key: (-len(key), key))
        settings = dict(custom_keys[longest])
    else:
        settings = _multipliers(name, module, parameter, rules)
    # Settings that equal the base are written out too, so that equal groups compare equal.
    group = {key: value for key, value in base.items() if value is not None}
    for multiplier, key in _MULTIPLIED.items():
        if multiplier not in settings:
            continue
        if key not in group:
            raise ValueError(
                f"{multiplier} of {name!r} multiplies {key}: set it in the optimizer"
            )
        group[key] *= settings.pop(multiplier)
    return group | settings


def _multipliers(
    name: str, module: nn.Module, parameter: nn.Parameter, rules: Rules
) -> ParamGroup:
    """The multipliers of a parameter that no custom key matches."""
    found: ParamGroup = {}
    is_norm = isinstance(module, NORMS)
    is_bias = name.rpartition(".")[2] == "bias"
    is_depthwise = isinstance(module, nn.Conv2d) and module.in_channels == module.groups
    if is_bias and not is_norm and "bias_lr_mult" in rules:
        found["lr_mult"] = rules["bias_lr_mult"]
    applies = (is_norm, is_bias, is_depthwise, parameter.ndim == 1)
    for rule in compress(_DECAYS, applies):
        if rule in rules:
            found["decay_mult"] = rules[rule]
            break
    return found
