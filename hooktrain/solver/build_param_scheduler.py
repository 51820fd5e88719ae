"""Parameter schedulers from configurations, as MMEngine's strategies build them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hooktrain.solver.group_scheduler import GroupParamScheduler
from hooktrain.solver.group_values import HasParamGroups
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.solver.schedule import ParamScheduler
from hooktrain.utils.registry import PARAM_SCHEDULERS

Built = GroupParamScheduler | LRScheduler | ParamScheduler

_RUN_ARGUMENTS = ("epoch_length", "max_epochs", "max_iters")


def build_param_scheduler(
    scheduler: Any,
    optim_wrapper: HasParamGroups | OptimWrapperDict,
    default_args: Mapping[str, Any] | None = None,
) -> list[Any] | dict[str, list[Any]]:
    """Build the schedulers of one or several optimizers, as the ``LRScheduler`` hook takes them.

    Args:
        scheduler: a configuration, or a scheduler that is built already, or a list of these. A
            configuration is a dict with ``type``, the name or the class of a scheduler, and its
            arguments without the optimizer. By default its ``end`` is the end of the run. With
            ``convert_to_iter_based=True`` its arguments count epochs, and it steps in iterations.
            With several optimizers, each gets its own of the configurations; or give a dict of
            these by the name of the optimizer.
        optim_wrapper: an optimizer or a wrapper, or several by name.
        default_args: what is known of the run, ``max_epochs``, ``max_iters`` and ``epoch_length``
            (the iterations of an epoch); and arguments that a configuration may overrule.

    Returns:
        A list of schedulers; with several optimizers, a dict of lists by name.

    Raises:
        TypeError: for something that is neither a configuration nor a scheduler.
        KeyError: for an unknown ``type``, or if the names are not those of the optimizers.
        ValueError: if the end of a schedule is not known though it needs one, for arguments out of
            range, or if one built scheduler is given for several optimizers.
    """
    defaults = dict(default_args or {})
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return _build_list(scheduler, optim_wrapper, defaults)
    if isinstance(scheduler, Mapping) and "type" not in scheduler:
        if set(scheduler) != set(optim_wrapper):
            raise KeyError(
                f"the schedulers are for {sorted(scheduler)}, and the optimizers are "
                f"{sorted(optim_wrapper)}"
            )
        each = dict(scheduler)
    else:
        if len(optim_wrapper) > 1 and any(isinstance(s, Built) for s in _as_list(scheduler)):
            raise ValueError(
                f"a scheduler that is built has one optimizer, and there are "
                f"{sorted(optim_wrapper)}: give a dict of schedulers by these names"
            )
        each = dict.fromkeys(optim_wrapper, scheduler)
    return {name: _build_list(each[name], optim_wrapper[name], defaults) for name in optim_wrapper}


def _as_list(scheduler: Any) -> Sequence[Any]:
    several = isinstance(scheduler, Sequence) and not isinstance(scheduler, str)
    return scheduler if several else [scheduler]


def _build_list(scheduler: Any, optimizer: HasParamGroups, defaults: dict[str, Any]) -> list[Any]:
    return [_build_one(element, optimizer, defaults) for element in _as_list(scheduler)]


def _build_one(config: Any, optimizer: HasParamGroups, defaults: Mapping[str, Any]) -> Any:
    if isinstance(config, Built):
        return config
    if not isinstance(config, Mapping) or "type" not in config:
        raise TypeError(
            f"scheduler must be a parameter scheduler or a dict with 'type', but got {config!r}"
        )
    arguments = {k: v for k, v in defaults.items() if k not in _RUN_ARGUMENTS}
    arguments |= {"optimizer": optimizer, **config}
    target: Any = PARAM_SCHEDULERS.find(arguments.pop("type"))
    to_iterations = arguments.pop("convert_to_iter_based", False)
    epoch_length = arguments.pop("epoch_length", defaults.get("epoch_length"))
    if isinstance(target, type) and issubclass(target, GroupParamScheduler):
        _set_end(target, arguments, defaults)
    if to_iterations:
        target = target.build_iter_from_epoch
        arguments["epoch_length"] = epoch_length
    return PARAM_SCHEDULERS.build({"type": target, **arguments})


def _set_end(
    scheduler: type[GroupParamScheduler], arguments: dict[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Let the range end with the run, unless the configuration says otherwise."""
    if arguments.get("end") is not None:
        return
    arguments.pop("end", None)
    key = "max_epochs" if arguments.get("by_epoch", True) else "max_iters"
    if defaults.get(key) is not None:
        arguments["end"] = defaults[key]
        return
    needed = scheduler.curve.length_arguments
    if needed and all(arguments.get(name) is None for name in needed):
        raise ValueError(
            f"{key} must be specified in default_args, or {' or '.join(needed)} in the "
            f"configuration of {scheduler.__name__}, which cannot do without an end"
        )
