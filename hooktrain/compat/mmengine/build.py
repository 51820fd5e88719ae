"""Builds optimizers, wrappers and schedulers from MMEngine's dicts with ``type``."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hooktrain import solver
from hooktrain.compat.mmengine import param_scheduler
from hooktrain.compat.mmengine.optim_wrapper import (
    AmpOptimWrapper,
    OptimWrapper,
    as_mmengine,
)
from hooktrain.compat.mmengine.param_rules import DefaultOptimWrapperConstructor
from hooktrain.compat.mmengine.param_scheduler import INF, _ParamScheduler, adapted
from hooktrain.compat.mmengine.registry import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
)
from hooktrain.config import instantiate
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver.build import Wrappers, as_optim_wrapper
from hooktrain.solver.optim_wrapper import Options

# The schedulers of one optimizer, or of several by name.
Schedulers = list[Any] | dict[str, list[Any]]

for _found in vars(torch.optim).values():
    if isinstance(_found, type) and issubclass(_found, Optimizer):
        OPTIMIZERS.register(_found)
# MMEngine's name.
OPTIMIZERS.register_module("TorchAdafactor", module=torch.optim.Adafactor)
OPTIM_WRAPPERS.register(OptimWrapper)
OPTIM_WRAPPERS.register(AmpOptimWrapper)
OPTIM_WRAPPER_CONSTRUCTORS.register(DefaultOptimWrapperConstructor)

for _found in vars(param_scheduler).values():
    if isinstance(_found, type) and issubclass(_found, _ParamScheduler):
        PARAM_SCHEDULERS.register(_found)


def build_optim_wrapper(model: nn.Module | None, cfg: Any) -> Wrappers:
    """Build the optimizer wrapper of a model.

    ``cfg`` is one of

    - a wrapper, which is returned, or a torch optimizer, which is wrapped, or a dict of
      these by name;
    - a dict whose ``optimizer`` is a torch optimizer; its ``type`` is the class of the
      wrapper, by default :class:`OptimWrapper`, and the other items are its arguments;
    - the same with a configuration as ``optimizer``: a dict with ``type`` (a name, a
      class, or its dotted name) and its arguments. ``constructor`` is the class that builds
      it, by default :class:`DefaultOptimWrapperConstructor`.

    Args:
        model: the model, which may be wrapped; None if the optimizers are already built.
        cfg: see above. It is not changed.

    Raises:
        TypeError: for any other ``cfg``; if an optimizer or a wrapper does not take an
            argument; if a configuration needs a model, but it is None.
        KeyError: if a ``type`` or ``constructor`` is missing or unknown.
        ValueError: if a configuration has neither ``optimizer`` nor ``constructor``.
    """
    cfg = instantiate(cfg)
    keys = {"type", "optimizer", "constructor"}
    if not isinstance(cfg, Mapping) or keys.isdisjoint(cfg):
        return as_mmengine(as_optim_wrapper(cfg))  # type: ignore[no-any-return]
    if isinstance(cfg.get("optimizer"), Optimizer):
        return OPTIM_WRAPPERS.build(cfg, type=OptimWrapper)  # type: ignore[no-any-return]
    if keys.isdisjoint(cfg.keys() - {"type"}):
        raise ValueError(f"'optimizer' or 'constructor' is missing: {cfg!r}")
    return _construct(model, dict(cfg))


def _construct(model: Any, cfg: dict[str, Any]) -> Wrappers:
    kind = cfg.pop("constructor", "DefaultOptimWrapperConstructor")
    rules = cfg.pop("paramwise_cfg", None)
    target = OPTIM_WRAPPER_CONSTRUCTORS.find(kind)
    constructor = target(optim_wrapper_cfg=cfg, paramwise_cfg=rules)
    return constructor(unwrap_model(model))  # type: ignore[no-any-return]


def build_param_scheduler(
    scheduler: Any, optim_wrapper: Any, default_args: Options | None = None
) -> Schedulers:
    """Build schedulers of one or several optimizers, for the ``LRScheduler`` hook.

    Args:
        scheduler: a configuration, or a scheduler that is already built, or a list of
            these. A configuration is a dict with ``type``, the name or the class of a
            scheduler, and its arguments without the optimizer. By default its ``end`` is
            the end of the run. With ``convert_to_iter_based=True`` its arguments count
            epochs, but it steps in iterations. With several optimizers, each gets a
            scheduler from the configurations; or give a dict by optimizer name.
        optim_wrapper: an optimizer or a wrapper, or several by name.
        default_args: facts about the run, ``max_epochs``, ``max_iters`` and
            ``epoch_length`` (the iterations of an epoch), and default arguments, which a
            configuration may override.

    Returns:
        A list of schedulers; with several optimizers, a dict of lists by name.

    Raises:
        TypeError: for an object that is neither a configuration nor a scheduler.
        KeyError: for an unknown ``type``, or if a dict lacks the name of an optimizer.
        ValueError: if a schedule needs an end, but the end is unknown, or for arguments out
            of range.
    """
    build = partial(_build_list, defaults=default_args or {})
    return for_each_optimizer(build, scheduler, optim_wrapper)


def for_each_optimizer(
    build: Callable[[Any, Any], list[Any]], scheduler: Any, optim_wrapper: Any
) -> Schedulers:
    """Call a function with the schedulers and the wrapper of each optimizer.

    Returns:
        The function's result; with several optimizers, a dict of results by name.
    """
    if not isinstance(optim_wrapper, solver.OptimWrapperDict):
        return build(scheduler, optim_wrapper)
    by_name: Mapping[str, Any] = dict.fromkeys(optim_wrapper, scheduler)
    if isinstance(scheduler, Mapping) and "type" not in scheduler:
        by_name = scheduler
    return {name: build(by_name[name], optim_wrapper[name]) for name in optim_wrapper}


def _build_list(given: Any, optim_wrapper: Any, defaults: Options) -> list[Any]:
    each = given if isinstance(given, list | tuple) else [given]
    # mmengine's own schedulers only accept mmengine's own wrappers.
    optimizer = getattr(optim_wrapper, "optimizer", optim_wrapper)
    return [_build_scheduler(one, optimizer, defaults) for one in each]


def _build_scheduler(config: Any, optimizer: Optimizer, defaults: Options) -> Any:
    if not isinstance(config, Mapping) and hasattr(config, "step"):
        return config
    if not isinstance(config, Mapping) or "type" not in config:
        raise TypeError(
            f"expected a scheduler or a dict with 'type', but got {config!r}"
        )
    arguments = {"optimizer": optimizer, **defaults, **config}
    max_epochs = arguments.pop("max_epochs", None)
    max_iters = arguments.pop("max_iters", None)
    epoch_length = arguments.pop("epoch_length", None)
    target = adapted(PARAM_SCHEDULERS.find(arguments.pop("type")))
    # The schedulers of MMEngine's family have a range, which ends with the run by default.
    has_range = hasattr(target, "build_iter_from_epoch")
    if has_range and arguments.get("end") is None:
        length = max_epochs if arguments.get("by_epoch", True) else max_iters
        arguments["end"] = length or INF
    if arguments.pop("convert_to_iter_based", False):
        target = target.build_iter_from_epoch
        arguments["epoch_length"] = epoch_length
    return PARAM_SCHEDULERS.build({"type": target, **arguments})
