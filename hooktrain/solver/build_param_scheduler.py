"""Parameter schedulers from configurations, as MMEngine's strategies build them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hooktrain.solver.group_scheduler import INF, GroupParamScheduler, HasParamGroups
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.solver.schedule import ParamScheduler
from hooktrain.utils.registry import PARAM_SCHEDULERS

Built = GroupParamScheduler | LRScheduler | ParamScheduler


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
    several = isinstance(scheduler, Sequence) and not isinstance(scheduler, str)
    each = scheduler if several else [scheduler]
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return [_build(one, optim_wrapper, default_args or {}) for one in each]
    if isinstance(scheduler, Mapping) and "type" not in scheduler:
        by_name: Mapping[str, Any] = scheduler
    else:
        by_name = dict.fromkeys(optim_wrapper, scheduler)
        if len(optim_wrapper) > 1 and any(isinstance(one, Built) for one in each):
            raise ValueError(
                "a scheduler that is built has one optimizer: give a dict of schedulers by the "
                f"names {sorted(optim_wrapper)}"
            )
    if set(by_name) != set(optim_wrapper):
        raise KeyError(
            f"the schedulers are for {sorted(by_name)}, and the optimizers are "
            f"{sorted(optim_wrapper)}"
        )
    return {
        name: list(build_param_scheduler(by_name[name], wrapper, default_args))
        for name, wrapper in optim_wrapper.items()
    }


def _build(config: Any, optimizer: HasParamGroups, defaults: Mapping[str, Any]) -> Any:
    if isinstance(config, Built):
        return config
    if not isinstance(config, Mapping) or "type" not in config:
        raise TypeError(
            f"scheduler must be a parameter scheduler or a dict with 'type', but got {config!r}"
        )
    arguments = {"optimizer": optimizer, **defaults, **config}
    run = {key: arguments.pop(key, None) for key in ("max_epochs", "max_iters", "epoch_length")}
    target: Any = PARAM_SCHEDULERS.find(arguments.pop("type"))
    if isinstance(target, type) and issubclass(target, GroupParamScheduler):
        _set_end(target, arguments, run)
    if arguments.pop("convert_to_iter_based", False):
        target = target.build_iter_from_epoch
        arguments["epoch_length"] = run["epoch_length"]
    return PARAM_SCHEDULERS.build({"type": target, **arguments})


def _set_end(
    scheduler: type[GroupParamScheduler], arguments: dict[str, Any], run: Mapping[str, Any]
) -> None:
    """Let the range end with the run, unless the configuration says otherwise."""
    if arguments.get("end") is not None:
        return
    key = "max_epochs" if arguments.get("by_epoch", True) else "max_iters"
    if run[key] is None and scheduler.NEEDS and not any(map(arguments.get, scheduler.NEEDS)):
        raise ValueError(
            f"{key} must be specified in default_args, or {' or '.join(scheduler.NEEDS)} in the "
            f"configuration of {scheduler.__name__}, which cannot do without an end"
        )
    arguments["end"] = run[key] or INF
