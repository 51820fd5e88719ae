"""Parameter groups: which parameters an optimizer gets, with which settings.

A group is a dictionary as torch optimizers take it: ``params``, a list of parameters,
and settings such as ``lr`` and ``weight_decay``. Groups made here also have
``param_names``, the full names of ``params``, which torch keeps.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils.names import did_you_mean

logger = logging.getLogger(__name__)

ParamGroup = dict[str, Any]
# A parameter's full names, the module that has it under the first, and itself.
Walked = tuple[list[str], nn.Module, nn.Parameter]

NORMS = (
    nn.modules.batchnorm._NormBase,  # of batch and instance norms
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
# Parts of a name that come from a wrapper, not from the model: torch.compile, activation
# checkpointing and FSDP 1. "module" is one only inside data parallel wrappers.
WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
DATA_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def walk_parameters(model: nn.Module) -> list[Walked]:
    """Each parameter of a model once: its full names, its first module, and itself.

    Args:
        model: may be wrapped. The names are those inside DDP, ``torch.compile`` and the
            like.
    """
    found: dict[nn.Parameter, Walked] = {}
    for name, module, parameter in _walk(unwrap_model(model), ""):
        names, _, _ = found.setdefault(parameter, ([], module, parameter))
        names.append(name)
    return list(found.values())


def _walk(
    module: nn.Module,
    prefix: str,
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, module, parameter
    for name, child in module._modules.items():  # named_children() has each child once
        if child is None:
            continue
        if name in WRAPPER_PARTS or isinstance(module, DATA_PARALLEL):
            yield from _walk(child, prefix)
        else:
            yield from _walk(child, f"{prefix}{name}.")


def group_trainable(
    model: nn.Module,
    settings: Callable[..., ParamGroup],
) -> list[ParamGroup]:
    """The trainable parameters in few groups.

    Args:
        model: may be wrapped.
        settings: makes the settings of a parameter from what :func:`walk_parameters` has.
    """
    groups = []
    for names, module, parameter in walk_parameters(model):
        if not parameter.requires_grad:
            continue
        group = settings(names, module, parameter)
        group["params"] = [parameter]
        group["param_names"] = names[:1]
        groups.append(group)
    return reduce_param_groups(groups)


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

    Without options this is one group of all of them. As in detectron2, except that an
    override may also be for one parameter, that one for nothing is a warning, and that
    ``lr_factor_func`` and ``bias_lr_factor`` multiply where both apply.

    Names are full dotted names in the model, ``"backbone.stem.weight"``, without the
    parts that wrappers add (DDP, ``torch.compile``). A shared parameter has its first
    name in ``param_names``; overrides match any of its names.

    Settings come from, later ones winning: ``base_lr`` and ``weight_decay``;
    ``weight_decay_norm``; ``lr_factor_func``; the two arguments on biases; ``overrides``
    by the last part of a name, ``"bias"``; ``overrides`` by a full name,
    ``"head.weight"``.

    Args:
        model: may be wrapped.
        base_lr: learning rate. By default that of the optimizer.
        weight_decay: by default that of the optimizer.
        weight_decay_norm: for the parameters of normalisation layers.
        bias_lr_factor: multiplies the learning rate of parameters called ``bias``.
        weight_decay_bias: for parameters called ``bias``, also those of normalisation
            layers.
        lr_factor_func: maps a parameter's full name to the factor of its learning rate.
        overrides: maps a name, as above, to settings such as
            ``{"lr": 0.01, "weight_decay": 0.0}``.

    Raises:
        ValueError: a factor is given without ``base_lr``; ``"bias"`` is overridden in
            two ways.

    Example::

        params = get_default_optimizer_params(model, weight_decay_norm=0.0)
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4)
    """
    if bias_lr_factor is None:
        bias_lr_factor = 1.0
    overrides = overrides or {}
    has_bias_factor = bias_lr_factor != 1.0
    has_factor = has_bias_factor or lr_factor_func is not None
    if base_lr is None and has_factor:
        raise ValueError(
            "lr_factor_func and bias_lr_factor need base_lr, the rate to multiply"
        )
    sets_biases = has_bias_factor or weight_decay_bias is not None
    if "bias" in overrides and sets_biases:
        raise ValueError(
            "biases are set twice: by overrides['bias'] and by another argument"
        )
    _warn_of_unused(overrides, model)

    def settings(
        names: list[str],
        module: nn.Module,
        _: nn.Parameter,
    ) -> ParamGroup:
        is_bias = _last_part(names[0]) == "bias"
        found: ParamGroup = {}
        if base_lr is not None:
            rate = base_lr
            if lr_factor_func is not None:
                rate = rate * lr_factor_func(names[0])
            if is_bias:
                rate = rate * bias_lr_factor
            found["lr"] = rate
        decay = weight_decay
        if weight_decay_norm is not None and isinstance(module, NORMS):
            decay = weight_decay_norm
        if weight_decay_bias is not None and is_bias:
            decay = weight_decay_bias
        if decay is not None:
            found["weight_decay"] = decay
        for name in names:
            last = _last_part(name)
            found.update(overrides.get(last, {}))
        for name in names:
            found.update(overrides.get(name, {}))
        return found

    return group_trainable(model, settings)


def _warn_of_unused(overrides: Mapping[str, Any], model: nn.Module) -> None:
    known: list[str] = []
    for names, _, _ in walk_parameters(model):
        known += names
        known += map(_last_part, names)
    for name in overrides:
        if name in known:
            continue
        hint = did_you_mean(name, known)
        logger.warning("overrides: %r is no parameter of the model%s", name, hint)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def expand_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """One group for each parameter, in order of first appearance.

    Where a parameter is in several groups, later settings replace earlier ones.

    Args:
        groups: each has ``params``, and may have ``param_names`` of the same length.
    """
    expanded: dict[Tensor, ParamGroup] = {}
    for group in groups:
        params = group["params"]
        if isinstance(params, Tensor):
            params = [params]
        settings = settings_of(group)
        for k, param in enumerate(params):
            own = expanded.setdefault(param, {"params": [param]})
            own.update(settings)
            if "param_names" in group:
                name = group["param_names"][k]
                own["param_names"] = [name]
    return list(expanded.values())


def reduce_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """The same parameters and settings in as few groups as possible.

    Groups and parameters are in order of first appearance. Optimizers update a group with
    a few kernels, so few groups make fast steps. Takes what :func:`expand_param_groups`
    does.
    """
    reduced: list[ParamGroup] = []
    for single in expand_param_groups(groups):
        settings = settings_of(single)
        for group in reduced:
            if group.keys() != single.keys():
                continue
            if settings_of(group) == settings:
                group["params"] += single["params"]
                if "param_names" in single:
                    group["param_names"] += single["param_names"]
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
