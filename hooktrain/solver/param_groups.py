"""Parameter groups: which parameters an optimizer gets, with which settings.

A group is a dict for a torch optimizer: ``params``, a list of parameters, and settings such as
``lr`` and ``weight_decay``.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hooktrain.model.wrappers import WRAPPER_PARTS, is_model_wrapper, unwrap_model

logger = logging.getLogger(__name__)

ParamGroup = dict[str, Any]
# A parameter's full name, its module, and the parameter.
Walked = tuple[str, nn.Module, nn.Parameter]

NORMS = (
    nn.modules.batchnorm._NormBase,  # the base class of batch and instance norms
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def walk_parameters(model: nn.Module) -> list[Walked]:
    """Each parameter of a model once: its full name, its module, and the parameter.

    A shared parameter is listed under its first name.

    Args:
        model: the model, which may be wrapped. The names are those of the bare model, inside DDP,
            ``torch.compile`` and other wrappers.
    """
    found: dict[nn.Parameter, Walked] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(parameter, (prefix + name, module, parameter))
        for name, child in module.named_children():
            if name in WRAPPER_PARTS or is_model_wrapper(module):
                walk(child, prefix)
            else:
                walk(child, f"{prefix}{name}.")

    walk(unwrap_model(model), "")
    return list(found.values())


def group_trainable(
    model: nn.Module, settings: Callable[..., ParamGroup]
) -> list[ParamGroup]:
    """Group the trainable parameters of a model by their settings.

    Args:
        model: the model, which may be wrapped.
        settings: a function of a parameter's name, its module and the parameter that returns the
            settings.
    """
    return reduce_param_groups(
        {**settings(name, module, parameter), "params": [parameter]}
        for name, module, parameter in walk_parameters(model)
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
    """Group the trainable parameters of a model for an optimizer, each parameter once.

    Without options there is a single group. It works as in detectron2, except that an override
    may also name a single parameter, and an override that matches no parameter causes a warning.

    Names are full dotted names in the model, such as ``"backbone.stem.weight"``, without the
    parts that wrappers add (DDP, ``torch.compile``). A shared parameter has its first
    name.

    Settings come from these sources, and later ones take precedence: ``base_lr`` and
    ``weight_decay``; ``weight_decay_norm``; ``lr_factor_func``; ``bias_lr_factor`` and
    ``weight_decay_bias``, or ``overrides`` by the last part of a name, ``"bias"``;
    ``overrides`` by a full name, ``"head.weight"``.

    Args:
        model: the model, which may be wrapped.
        base_lr: the learning rate; by default the optimizer's.
        weight_decay: the weight decay; by default the optimizer's.
        weight_decay_norm: the weight decay of the parameters of normalisation layers.
        bias_lr_factor: the learning rate of parameters called ``bias``, as a multiple of
            ``base_lr``.
        weight_decay_bias: the weight decay of parameters called ``bias``, including those of
            normalisation layers.
        lr_factor_func: a function that maps a parameter's full name to the factor of ``base_lr``.
        overrides: a dict that maps a name, as above, to settings such as
            ``{"lr": 0.01, "weight_decay": 0.0}``.

    Raises:
        ValueError: if a factor is given without ``base_lr``, or ``"bias"`` is overridden in
            two ways.

    Example::

        params = get_default_optimizer_params(model, weight_decay_norm=0.0)
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4)
    """
    own_bias_lr = bias_lr_factor not in (None, 1.0)
    if base_lr is None and (own_bias_lr or lr_factor_func is not None):
        raise ValueError(
            "lr_factor_func and bias_lr_factor need base_lr, the rate to multiply"
        )
    base = _given(lr=base_lr, weight_decay=weight_decay)
    of_norms = _given(weight_decay=weight_decay_norm)
    of_biases = _given(weight_decay=weight_decay_bias)
    if own_bias_lr:
        of_biases["lr"] = base["lr"] * bias_lr_factor
    overrides = overrides or {}
    _warn_about_unused_overrides(overrides, model)
    if of_biases:
        if "bias" in overrides:
            raise ValueError(
                "biases are set twice: by overrides['bias'] and by another argument"
            )
        overrides = {**overrides, "bias": of_biases}

    def settings(name: str, module: nn.Module, _: nn.Parameter) -> ParamGroup:
        found = dict(base)
        if isinstance(module, NORMS):
            found |= of_norms
        if lr_factor_func is not None:
            found["lr"] = base["lr"] * lr_factor_func(name)
        for key in _keys(name):
            found |= overrides.get(key, {})
        return found

    return group_trainable(model, settings)


def _given(**settings: float | None) -> ParamGroup:
    """The settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def _warn_about_unused_overrides(
    overrides: Mapping[str, Any], model: nn.Module
) -> None:
    known = [key for name, _, _ in walk_parameters(model) for key in _keys(name)]
    unused = overrides.keys() - known
    if unused:
        logger.warning("overrides match no parameter of the model: %s", unused)


def _keys(name: str) -> tuple[str, str]:
    """A parameter's keys in the overrides: the last part of its name, then the full name."""
    return name.rpartition(".")[2], name


def expand_param_groups(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """One group for each parameter, in order of first appearance.

    If a parameter is in several groups, later settings replace earlier ones.

    Args:
        groups: the groups, each with an iterable ``params``.
    """
    expanded: dict[Tensor, ParamGroup] = {}
    for group in groups:
        for parameter in group["params"]:
            own = expanded.setdefault(parameter, {"params": [parameter]})
            own |= settings_of(group)
    return list(expanded.values())


def reduce_param_groups(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Regroup the parameters, with the same settings, in as few groups as possible.

    Groups and parameters are in order of first appearance. Optimizers update a group with
    a few kernels, so few groups make fast steps. For the argument, see
    :func:`expand_param_groups`.
    """
    reduced: list[ParamGroup] = []
    for single in expand_param_groups(groups):
        settings = settings_of(single)
        for group in reduced:
            if settings_of(group) == settings:
                group["params"] += single["params"]
                break
        else:
            reduced.append(single)
    return reduced


def settings_of(group: ParamGroup) -> ParamGroup:
    """The settings of a parameter group, without its parameters and torch's names of them."""
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
