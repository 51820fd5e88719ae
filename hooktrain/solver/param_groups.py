"""Parameter groups: which parameters an optimizer gets, with which settings.

A group is a dictionary as torch optimizers take it: ``params``, a list of parameters, and settings
such as ``lr`` and ``weight_decay``. Groups made here also have ``param_names``, the full names of
``params``, which torch keeps.
"""

import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import compress
from typing import Any

from torch import Tensor, nn

from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils.names import did_you_mean

logger = logging.getLogger(__name__)

ParamGroup = dict[str, Any]
Rules = Mapping[str, Any]

_BATCH_NORM = nn.modules.batchnorm._NormBase  # of batch and instance norms
_NORMS = (_BATCH_NORM, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm)
# Parts of a name that come from a wrapper, not from the model: torch.compile, activation
# checkpointing and FSDP 1. "module" is one only inside data parallel wrappers.
WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)

# The rules of the weight decay. The first that applies to a parameter counts.
_DECAYS = ("norm_decay_mult", "bias_decay_mult", "dwconv_decay_mult", "flat_decay_mult")
_MULTIPLIERS = ("bias_lr_mult", *_DECAYS)
RULES = (
    "custom_keys",
    "bypass_duplicate",
    *_MULTIPLIERS,
)  # the keys of a paramwise_cfg


def walk_parameters(
    model: nn.Module,
) -> list[tuple[list[str], nn.Module, nn.Parameter]]:
    """Each parameter of a model once: its full names, its module under the first, and itself.

    Args:
        model: may be wrapped. The names are those inside DDP, ``torch.compile`` and the like.
    """
    found: dict[nn.Parameter, tuple[list[str], nn.Module, nn.Parameter]] = {}
    for name, module, parameter in _walk(unwrap_model(model), ""):
        found.setdefault(parameter, ([], module, parameter))[0].append(name)
    return list(found.values())


def _walk(
    module: nn.Module, prefix: str
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, module, parameter
    for name, child in module._modules.items():  # named_children() has each child once
        is_added = name in WRAPPER_PARTS or isinstance(module, _DATA_PARALLEL)
        if child is not None:
            yield from _walk(child, prefix if is_added else f"{prefix}{name}.")


def _group_trainable(
    model: nn.Module,
    settings: Callable[[list[str], nn.Module, nn.Parameter], ParamGroup],
) -> list[ParamGroup]:
    """The trainable parameters in few groups, with what the function makes of each."""
    return reduce_param_groups(
        {
            **settings(names, module, parameter),
            "params": [parameter],
            "param_names": names[:1],
        }
        for names, module, parameter in walk_parameters(model)
        if parameter.requires_grad
    )


def get_default_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    weight_decay_norm: float | None = None,
    bias_lr_factor: float | None = 1.0,
    weight_decay_bias: float | None = None,
    lr_factor_func: Callable[[str], float] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[ParamGroup]:
    """Parameter groups of the trainable parameters of a model, each parameter once.

    Without options this is one group of all of them. As in detectron2, except that an override
    may also be for one parameter, must be for something, and that ``lr_factor_func`` and
    ``bias_lr_factor`` multiply where both apply.

    Names are full dotted names in the model, ``"backbone.stem.weight"``, without the parts that
    wrappers add (DDP, ``torch.compile``). A shared parameter has its first name in
    ``param_names``; overrides match any of its names.

    Settings come from, later ones winning: ``base_lr`` and ``weight_decay``; ``weight_decay_norm``;
    ``lr_factor_func``; the two arguments on biases; ``overrides`` by the last part of a name,
    ``"bias"``; ``overrides`` by a full name, ``"head.weight"``.

    Args:
        model: may be wrapped.
        base_lr: learning rate. By default that of the optimizer.
        weight_decay: by default that of the optimizer.
        weight_decay_norm: for the parameters of normalisation layers.
        bias_lr_factor: multiplies the learning rate of parameters called ``bias``.
        weight_decay_bias: for parameters called ``bias``, those of normalisation layers included.
        lr_factor_func: maps the full name of a parameter to the factor of its learning rate.
        overrides: maps a name, as above, to settings such as ``{"lr": 0.01, "weight_decay": 0.0}``.

    Raises:
        ValueError: a factor is given without ``base_lr``; an override is for no parameter;
            ``"bias"`` is overridden in two ways.

    Example::

        params = get_default_optimizer_params(model, weight_decay_norm=0.0)
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4)
    """
    bias_lr_factor = 1.0 if bias_lr_factor is None else bias_lr_factor
    if base_lr is None and (lr_factor_func is not None or bias_lr_factor != 1.0):
        raise ValueError(
            "lr_factor_func and bias_lr_factor need base_lr, the rate to multiply"
        )
    overrides = {} if overrides is None else overrides
    if "bias" in overrides and (bias_lr_factor != 1.0 or weight_decay_bias is not None):
        raise ValueError(
            "biases are set twice: by overrides['bias'] and by another argument"
        )

    every_name = [name for names, _, _ in walk_parameters(model) for name in names]
    known = [*every_name, *map(_last_part, every_name)]
    for name in overrides:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"overrides: {name!r} is no parameter of the model{hint}")

    def settings(names: list[str], module: nn.Module, _: nn.Parameter) -> ParamGroup:
        is_bias = _last_part(names[0]) == "bias"
        found: ParamGroup = {}
        if base_lr is not None:
            factor = 1.0 if lr_factor_func is None else lr_factor_func(names[0])
            found["lr"] = base_lr * factor * (bias_lr_factor if is_bias else 1.0)
        if weight_decay is not None:
            found["weight_decay"] = weight_decay
        if weight_decay_norm is not None and isinstance(module, _NORMS):
            found["weight_decay"] = weight_decay_norm
        if weight_decay_bias is not None and is_bias:
            found["weight_decay"] = weight_decay_bias
        for name in (*map(_last_part, names), *names):
            found.update(overrides.get(name, {}))
        return found

    return _group_trainable(model, settings)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def paramwise_param_groups(
    model: nn.Module,
    paramwise_cfg: Mapping[str, Any],
    base_lr: Any = None,
    base_wd: Any = None,
) -> list[ParamGroup]:
    """Parameter groups by the rules of MMEngine's ``paramwise_cfg``, each parameter once.

    A parameter that a custom key matches has the settings of that key and of no other rule.
    For the others the multipliers apply; of several multipliers of the weight decay that would
    apply, the order is norm, bias, dwconv, flat. The rules:

    - ``custom_keys``: settings by a part of a parameter's name: ``{"backbone": {"lr_mult": 0.1}}``.
      Of several keys the longest counts, of equally long ones the alphabetically first. A setting
      is ``lr_mult``, ``decay_mult``, or an option of the parameter group. The name of a parameter
      of the model itself begins with a dot here, so that ``".bias"`` matches every bias.
    - ``bias_lr_mult``, ``bias_decay_mult``: for the learning rate and the weight decay of
      parameters named ``bias``; the former not for those of normalisation layers.
    - ``norm_decay_mult``: for the weight decay of normalisation layers.
    - ``dwconv_decay_mult``: for the weight decay of depthwise convolutions (2d).
    - ``flat_decay_mult``: for the weight decay of one-dimensional parameters.
    - ``bypass_duplicate``: where a parameter has several names, apply the rules to the first of
      them; otherwise it is an error if they lead to different settings.

    Args:
        model: may be wrapped. Parameters that are frozen are left out, with a warning.
        paramwise_cfg: the rules; multipliers are at least 0.
        base_lr: the optimizer's learning rate; None leaves it out of the groups.
        base_wd: the optimizer's weight decay; None leaves it out of the groups.

    Raises:
        ValueError: for an unknown rule, a multiplier that is negative or not finite, or one of a
            base that is None; or if a parameter has two names for which the rules differ.
    """
    rules = {rule: value for rule, value in paramwise_cfg.items() if value is not None}
    base = {"lr": base_lr, "weight_decay": base_wd}
    _check_rules(rules, base)
    walked = walk_parameters(model)
    if frozen := [
        names[0] for names, _, parameter in walked if not parameter.requires_grad
    ]:
        shown = reprlib.repr(frozen)
        logger.warning(
            "%d parameters are frozen and not optimized: %s", len(frozen), shown
        )
    every_name = [f".{name}" for names, _, _ in walked for name in names]
    for key in rules.get("custom_keys", {}):
        if not any(
            key in name for name in every_name
        ):  # one configuration may serve many models
            hint = did_you_mean(
                key, [part for name in every_name for part in name.split(".")]
            )
            logger.warning("custom_keys: %r is in no parameter's name%s", key, hint)

    def settings(
        names: list[str], module: nn.Module, parameter: nn.Parameter
    ) -> ParamGroup:
        first, *others = [
            _paramwise(name, module, parameter, rules, base) for name in names
        ]
        if any(other != first for other in others) and not rules.get(
            "bypass_duplicate"
        ):
            raise ValueError(
                f"rules differ for {names}: {first}, {others}; see bypass_duplicate"
            )
        return first

    groups = _group_trainable(model, settings)
    for group in groups:
        logger.info(
            "%s: parameters %s", settings_of(group), reprlib.repr(group["param_names"])
        )
    return groups


def _check_rules(rules: Rules, base: Rules) -> None:
    for rule in rules:
        if rule not in RULES:
            raise ValueError(
                f"paramwise_cfg has no rule {rule!r}{did_you_mean(rule, RULES)}"
            )
    multipliers = {rule: rules[rule] for rule in _MULTIPLIERS if rule in rules}
    for key, custom in rules.get("custom_keys", {}).items():
        for name in custom:
            if name in ("lr_mult", "decay_mult"):
                multipliers[f"custom_keys[{key!r}].{name}"] = custom[name]
            # Other names are options of the optimizer, or of whoever looks at its groups.
            elif near := get_close_matches(name, ("lr_mult", "decay_mult"), cutoff=0.8):
                raise ValueError(
                    f"custom_keys[{key!r}]: {name!r} should be {near[0]!r}"
                )
    for rule, value in multipliers.items():
        if not 0 <= value < math.inf:
            raise ValueError(
                f"{rule} must be finite and not negative, but got {value!r}"
            )
        name = "lr" if rule.endswith("lr_mult") else "weight_decay"
        if base[name] is None:
            raise ValueError(
                f"{rule} multiplies {name}: the optimizer's must be configured"
            )


def _paramwise(
    name: str, module: nn.Module, parameter: nn.Parameter, rules: Rules, base: Rules
) -> ParamGroup:
    """The settings of a parameter under one of its names."""
    is_norm, is_bias = isinstance(module, _NORMS), _last_part(name) == "bias"
    dotted = name if "." in name else f".{name}"
    custom_keys = rules.get("custom_keys", {})
    custom: ParamGroup = {}
    if keys := [key for key in custom_keys if key in dotted]:
        custom = dict(custom_keys[min(keys, key=lambda key: (-len(key), key))])
        lr_mult, decay_mult = custom.pop("lr_mult", 1), custom.pop("decay_mult", 1)
    else:
        lr_mult = rules.get("bias_lr_mult", 1) if is_bias and not is_norm else 1
        is_depthwise = (
            isinstance(module, nn.Conv2d) and module.in_channels == module.groups
        )
        applies = (is_norm, is_bias, is_depthwise, parameter.ndim == 1)
        decays = [rule for rule in compress(_DECAYS, applies) if rule in rules]
        decay_mult = rules[decays[0]] if decays else 1
    # Settings that are the base's are written down too, so that equal groups look equal.
    settings = (("lr", lr_mult), ("weight_decay", decay_mult))
    multiplied = {
        key: base[key] * mult for key, mult in settings if base[key] is not None
    }
    return {**multiplied, **custom}


def expand_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """One group for each parameter, in order of first appearance.

    Where a parameter is in several groups, later settings replace earlier ones.

    Args:
        groups: each has ``params``, and may have ``param_names`` of the same length.
    """
    expanded: dict[Tensor, ParamGroup] = {}
    for group in groups:
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for k, param in enumerate(params):
            own = expanded.setdefault(param, {"params": [param]})
            own.update(settings_of(group))
            if "param_names" in group:
                own["param_names"] = [group["param_names"][k]]
    return list(expanded.values())


def reduce_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """The same parameters and settings in as few groups as possible, by first appearance.

    Optimizers update a group with a few kernels, so few groups make fast steps. Takes what
    :func:`expand_param_groups` does.
    """
    reduced: list[ParamGroup] = []
    for single in expand_param_groups(groups):
        for group in reduced:
            if group.keys() == single.keys() and settings_of(group) == settings_of(
                single
            ):
                for key in {"params", "param_names"} & single.keys():
                    group[key] += single[key]
                break
        else:
            reduced.append(single)
    return reduced


def settings_of(group: Mapping[str, Any]) -> ParamGroup:
    """A parameter group without its parameters and their names."""
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
