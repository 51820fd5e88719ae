"""Parameter groups: which parameters an optimizer gets, with which options.

A group is a dictionary as torch optimizers take them: ``params``, a list of parameters, and options
such as ``lr`` and ``weight_decay``. Groups made here also carry ``param_names``, the list of the
full names of ``params``, which torch keeps in the state of the optimizer. So a state can be matched
by name when a model has changed.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

ParamGroup = dict[str, Any]

_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms, and what is made of them
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)
# Parts of a name that tell of a wrapper, not of the model: torch.compile, activation
# checkpointing and FSDP 1. "module" is one only inside of data parallel wrappers.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


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
    may also name a place in the model, must match something, and that ``lr_factor_func`` and
    ``bias_lr_factor`` multiply where both apply.

    Names are full dotted names in the model, ``"backbone.stem.weight"``, without the parts that
    wrappers add (DDP, ``torch.compile``). A shared parameter goes by its first name in
    ``param_names``; overrides match any of its names.

    Options come from, later ones winning: ``base_lr`` and ``weight_decay``; ``weight_decay_norm``;
    ``lr_factor_func``; the two arguments on biases; ``overrides``, from general to specific:

    1. the last part of a name: ``"bias"``;
    2. an ``fnmatch`` pattern of full names: ``"backbone.*"``. Of several, the one with more
       characters that are no wildcard is the more specific;
    3. a full name: ``"head.weight"``.

    All that match a parameter are merged, option by option; of equals the later one wins.

    Args:
        model: may be wrapped.
        base_lr: learning rate. By default that of the optimizer.
        weight_decay: by default that of the optimizer.
        weight_decay_norm: for the parameters of normalisation layers.
        bias_lr_factor: multiplies the learning rate of parameters called ``bias``.
        weight_decay_bias: for parameters called ``bias``, those of normalisation layers included.
        lr_factor_func: maps the full name of a parameter to the factor of its learning rate.
        overrides: maps a rule, as above, to options such as ``{"lr": 0.01, "weight_decay": 0.0}``.

    Raises:
        TypeError: ``model`` is not a module, or an override is not a mapping.
        ValueError: a factor is given without ``base_lr``; an override matches no parameter;
            ``"bias"`` is overridden in two ways.

    Example::

        params = get_default_optimizer_params(model, weight_decay_norm=0.0)
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module: {model!r}")
    bias_lr_factor = 1.0 if bias_lr_factor is None else bias_lr_factor
    if base_lr is None and (lr_factor_func is not None or bias_lr_factor != 1.0):
        name = "bias_lr_factor" if lr_factor_func is None else "lr_factor_func"
        raise ValueError(f"{name} needs base_lr, the learning rate to multiply")
    overrides = {} if overrides is None else overrides
    if "bias" in overrides and (bias_lr_factor != 1.0 or weight_decay_bias is not None):
        raise ValueError(
            "biases are set twice: by overrides['bias'], and by bias_lr_factor or weight_decay_bias"
        )

    parameters = _named_parameters(model)
    _check_overrides(overrides, [name for names, _, _ in parameters for name in names])
    groups = []
    for names, owner, parameter in parameters:
        if not parameter.requires_grad:
            continue
        is_bias = names[0].rpartition(".")[2] == "bias"
        options: ParamGroup = {}
        if base_lr is not None:
            factor = 1.0 if lr_factor_func is None else lr_factor_func(names[0])
            options["lr"] = base_lr * factor * (bias_lr_factor if is_bias else 1.0)
        if weight_decay is not None:
            options["weight_decay"] = weight_decay
        if weight_decay_norm is not None and isinstance(owner, _NORMS):
            options["weight_decay"] = weight_decay_norm
        if weight_decay_bias is not None and is_bias:
            options["weight_decay"] = weight_decay_bias
        ranks = {rule: rank for rule in overrides if (rank := _rank(rule, names)) is not None}
        for rule in sorted(ranks, key=lambda rule: ranks[rule]):
            options.update(overrides[rule])
        groups.append({"params": [parameter], "param_names": [names[0]], **options})
    return reduce_param_groups(groups)


def expand_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """One group for each parameter, in order of first appearance.

    Where a parameter is in several groups, later options replace earlier ones.

    Args:
        groups: each has ``params``, and may have ``param_names`` of the same length.

    Raises:
        ValueError: ``params`` is missing, or ``param_names`` has another length.
    """
    expanded: dict[Tensor, ParamGroup] = {}
    for group in groups:
        if "params" not in group:
            raise ValueError(f"a parameter group needs 'params': it has {sorted(group)}")
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        names = group.get("param_names")
        if names is not None and len(names) != len(params):
            raise ValueError(f"{len(params)} params have {len(names)} param_names: {names!r}")
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for k, param in enumerate(params):
            own = expanded.setdefault(param, {"params": [param]})
            own.update(options if names is None else {"param_names": [names[k]], **options})
    return list(expanded.values())


def reduce_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """The same parameters and options in as few groups as possible, by first appearance.

    Optimizers update a group with a few kernels, so few groups make fast steps. Takes and raises
    what :func:`expand_param_groups` does.
    """
    reduced: list[tuple[ParamGroup, ParamGroup]] = []
    for single in expand_param_groups(groups):
        lists: ParamGroup = {k: single.pop(k) for k in ("params", "param_names") if k in single}
        for found, options in reduced:
            if options == single and found.keys() == lists.keys():
                for key, values in lists.items():
                    found[key] += values
                break
        else:
            reduced.append((lists, single))
    return [lists | options for lists, options in reduced]


def _named_parameters(model: nn.Module) -> list[tuple[list[str], nn.Module, nn.Parameter]]:
    """Each parameter with all its names and the module that owns it under the first."""
    found: dict[nn.Parameter, tuple[list[str], nn.Module, nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        *path, leaf = name.split(".")
        owner, clean = model, []
        for part in path:
            wrapped = part in _WRAPPER_PARTS or isinstance(owner, _DATA_PARALLEL)
            clean += [] if wrapped else [part]
            owner = getattr(owner, part)
        entry = found.setdefault(parameter, ([], owner, parameter))
        entry[0].append(".".join([*clean, leaf]))
    return list(found.values())


def _rank(rule: str, names: list[str]) -> tuple[int, int] | None:
    """How specific a rule is for a parameter of these names; None if it does not match."""
    if rule in names:
        return 2, 0
    if any(fnmatchcase(name, rule) for name in names):
        return 1, sum(c not in "*?[]" for c in rule)
    return (0, 0) if any(rule == name.rpartition(".")[2] for name in names) else None


def _check_overrides(overrides: Mapping[str, Mapping[str, Any]], names: list[str]) -> None:
    for rule, options in overrides.items():
        if not isinstance(options, Mapping):
            raise TypeError(f"overrides[{rule!r}] must be a mapping of options: {options!r}")
        if _rank(rule, names) is None:
            known = [*names, *(name.rpartition(".")[2] for name in names)]
            near = get_close_matches(rule, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"overrides: {rule!r} matches no parameter of the model{hint}")
