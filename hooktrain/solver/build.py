"""Optimizers, wrappers and schedulers from configurations."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hooktrain.config import instantiate
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver.amp_optim_wrapper import AmpOptimWrapper
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper import OptimWrapper, Options
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict, wrappers_by_name
from hooktrain.solver.param_groups import (
    ParamGroup,
    get_default_optimizer_params as get_default_optimizer_params,
    reduce_param_groups as reduce_param_groups,
)
from hooktrain.solver.param_scheduler import INF, GroupParamScheduler, Schedulable
from hooktrain.solver.schedule import ParamScheduler
from hooktrain.utils.names import call
from hooktrain.utils.registry import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
)

Wrappers = OptimWrapper | OptimWrapperDict
Built = GroupParamScheduler | LRScheduler | ParamScheduler
# Of one optimizer, or by the names of several.
Schedulers = list[Any] | dict[str, list[Any]]

for _found in vars(torch.optim).values():
    is_class = isinstance(_found, type) and _found is not Optimizer
    if is_class and issubclass(_found, Optimizer):
        OPTIMIZERS.register(_found)
# MMEngine's name.
OPTIMIZERS.register_module("TorchAdafactor", module=torch.optim.Adafactor)
OPTIM_WRAPPERS.register(OptimWrapper)
OPTIM_WRAPPERS.register(AmpOptimWrapper)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Called with a model, it gives a wrapper around a new optimizer of its parameters.

    The optimizer has one group of all parameters. A subclass may override
    :meth:`param_groups`.

    Args:
        optim_wrapper_cfg: ``optimizer`` is a dict with ``type`` (a name of the registry
            ``OPTIMIZERS``, a class, or its dotted name) and the arguments of the
            optimizer. ``type`` is the class of the wrapper, by default
            :class:`OptimWrapper`, and the other items are its arguments. It is not changed.
        paramwise_cfg: None. MMEngine's rules are those of the class of this name in
            ``hooktrain.compat.mmengine``, which takes the place of this one when it is
            imported.

    Raises:
        ValueError: without ``optimizer``, if that is no dict with ``type``, or for rules.
    """

    def __init__(
        self, optim_wrapper_cfg: Options, paramwise_cfg: Options | None = None
    ) -> None:
        if paramwise_cfg:
            raise ValueError(
                "for paramwise_cfg, MMEngine's rules, import hooktrain.compat.mmengine"
            )
        # Plain containers: what an optimizer gets, a checkpoint must hold.
        self.optim_wrapper_cfg = dict(instantiate(optim_wrapper_cfg))
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer", None)
        if "type" not in (self.optimizer_cfg or {}):
            raise ValueError(
                f"give 'optimizer', a dict with 'type', not {optim_wrapper_cfg!r}"
            )

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """The wrapper of a new optimizer.

        Raises:
            KeyError: if there is no optimizer or wrapper of the ``type``.
            TypeError: if the optimizer or the wrapper does not take its arguments.
        """
        options = dict(self.optimizer_cfg)
        kind = OPTIMIZERS.find(options.pop("type"))
        # By position: not all call it "params".
        optimizer = call(kind, [self.param_groups(model)], options, "as 'optimizer'")
        return OPTIM_WRAPPERS.build(  # type: ignore[no-any-return]
            self.optim_wrapper_cfg, type=OptimWrapper, optimizer=optimizer
        )

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        """The parameter groups of a model, which may be wrapped."""
        return [{"params": [*parameter_names(model)]}]


def as_optim_wrapper(optimizer: Any) -> Wrappers:
    """An optimizer in its wrapper, as trainers take it.

    Args:
        optimizer: a wrapper, which is returned; a torch optimizer, which is wrapped; or a
            dict of these by name, which becomes an :class:`OptimWrapperDict`.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(optimizer, Wrappers):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return OptimWrapper(optimizer)
    if isinstance(optimizer, Mapping) and optimizer:
        wrappers: Any = {
            name: as_optim_wrapper(each) for name, each in optimizer.items()
        }
        return OptimWrapperDict(**wrappers)
    raise TypeError(
        "expected a torch optimizer, an OptimWrapper, or a dict of these by name, but got "
        f"{optimizer!r} of {type(optimizer)}"
    )


def build_optim_wrapper(model: nn.Module | None, cfg: Any) -> Wrappers:
    """Build the optimizer wrapper of a model.

    ``cfg`` is one of

    - a wrapper, which is returned, or a torch optimizer, which is wrapped;
    - a dict whose ``optimizer`` is a torch optimizer; its ``type`` is the class of the
      wrapper, by default :class:`OptimWrapper`, and the other items are its arguments;
    - the same with a configuration as ``optimizer``: a dict with ``type`` (a name, a
      class, or its dotted name) and its arguments. ``constructor`` is what builds it, by
      default :class:`hooktrain.solver.DefaultOptimWrapperConstructor`;
    - a dict of several of these by name. A configuration is for the parameters of the
      submodule of that name::

        build_optim_wrapper(gan, dict(
            generator=dict(optimizer=dict(type="Adam", lr=2e-4)),
            discriminator=dict(
                type="AmpOptimWrapper", optimizer=dict(type="Adam", lr=1e-4)
            ),
        ))

    Args:
        model: may be wrapped; may be None where only built optimizers are wrapped.
        cfg: see above. It is not changed.

    Raises:
        TypeError: for anything else, or for arguments that an optimizer or a wrapper
            does not take.
        KeyError: for a ``type`` or ``constructor`` that is missing or unknown.
        ValueError: if a configuration needs a model or an optimizer that is missing.
        AttributeError: if the model has no submodule of a name.
    """
    return _build_wrapper(model, "", instantiate(cfg))


def _build_wrapper(model: nn.Module | None, part: str, cfg: Any) -> Wrappers:
    """The wrapper of the optimizer of a submodule, whose name is ``""`` for the model."""
    if isinstance(cfg, OptimWrapper | OptimWrapperDict):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg)
    if not isinstance(cfg, Mapping):
        raise TypeError(
            f"expected a torch optimizer, hooktrain's OptimWrapper or a dict, but got {cfg!r} "
            f"of {type(cfg)}"
        )
    if isinstance(cfg.get("optimizer"), Optimizer):
        return OPTIM_WRAPPERS.build(cfg, type=OptimWrapper)  # type: ignore[no-any-return]
    if cfg and {"type", "optimizer", "constructor"}.isdisjoint(cfg):
        each: Any = {name: _build_wrapper(model, name, cfg[name]) for name in cfg}
        return OptimWrapperDict(**each)
    if model is None:
        raise ValueError(f"a model is needed to build an optimizer for, from {cfg!r}")
    rest = dict(cfg)
    # By its name, since hooktrain.compat.mmengine registers another one.
    kind = rest.pop("constructor", "DefaultOptimWrapperConstructor")
    rules = rest.pop("paramwise_cfg", None)
    target = OPTIM_WRAPPER_CONSTRUCTORS.find(kind)
    constructor = target(optim_wrapper_cfg=rest, paramwise_cfg=rules)
    module = unwrap_model(model).get_submodule(part)
    return constructor(module)  # type: ignore[no-any-return]


def build_param_scheduler(
    scheduler: Any,
    optim_wrapper: Schedulable | OptimWrapperDict,
    default_args: Options | None = None,
) -> Schedulers:
    """Build schedulers of one or several optimizers, as the ``LRScheduler`` hook takes them.

    Args:
        scheduler: a configuration, or a scheduler that is built already, or a list of
            these. A configuration is a dict with ``type``, the name or the class of a
            scheduler, and its arguments without the optimizer. By default its ``end`` is
            the end of the run. With ``convert_to_iter_based=True`` its arguments count
            epochs, and it steps in iterations. With several optimizers, each gets its own
            of the configurations; or give a dict of these by the name of the optimizer.
        optim_wrapper: an optimizer or a wrapper, or several by name.
        default_args: what is known of the run, ``max_epochs``, ``max_iters`` and
            ``epoch_length`` (the iterations of an epoch); and arguments that a
            configuration may overrule.

    Returns:
        A list of schedulers; with several optimizers, a dict of lists by name.

    Raises:
        TypeError: for something that is neither a configuration nor a scheduler.
        KeyError: for an unknown ``type``, or if the names are not those of the optimizers.
        ValueError: if the end of a schedule is not known though it needs one, or for
            arguments out of range.
    """
    if not isinstance(optim_wrapper, OptimWrapperDict):
        each = scheduler
        if not isinstance(scheduler, list | tuple):
            each = [scheduler]
        defaults = default_args or {}
        return [_build_scheduler(one, optim_wrapper, defaults) for one in each]
    by_name: Mapping[str, Any] = dict.fromkeys(optim_wrapper, scheduler)
    if isinstance(scheduler, Mapping) and "type" not in scheduler:
        by_name = scheduler
    if by_name.keys() != optim_wrapper.keys():
        names = [*optim_wrapper]
        raise KeyError(f"schedulers are for {[*by_name]}, and optimizers are {names}")
    built: Any = {
        name: build_param_scheduler(by_name[name], wrapper, default_args)
        for name, wrapper in optim_wrapper.items()
    }
    return built  # type: ignore[no-any-return]


def scale_lr(optim_wrapper: Wrappers, ratio: float) -> None:
    """Multiply the learning rates of one or several optimizers.

    With ``ratio`` the samples of all ranks in one backward pass over those for which the
    rates were chosen, this is the linear rule of `Goyal et al.
    <https://arxiv.org/abs/1706.02677>`_. Call it before schedulers are built, since
    these note the rates that they find.

    Args:
        optim_wrapper: the optimizer, or several.
        ratio: above 0.

    Raises:
        ValueError: if the ratio is not above 0.
        RuntimeError: if a scheduler has noted a rate already. Nothing is changed then.
    """
    if ratio <= 0:
        raise ValueError(f"ratio must be above 0, but got {ratio!r}")
    wrappers = wrappers_by_name(optim_wrapper).values()
    groups = [group for wrapper in wrappers for group in wrapper.param_groups]
    if any("initial_lr" in group for group in groups):
        raise RuntimeError(
            "a scheduler has noted the learning rates before they were scaled: build "
            "schedulers afterwards"
        )
    for group in groups:
        group["lr"] = group["lr"] * ratio


def scheduler_states(schedulers: Schedulers) -> Any:
    """The states of schedulers, in a list or in lists by name, as these are.

    A pure function of progress has none, which is an empty dict.
    """
    if isinstance(schedulers, dict):
        return {name: scheduler_states(each) for name, each in schedulers.items()}
    return [getattr(each, "state_dict", dict)() for each in schedulers]


def check_scheduler_states(schedulers: Schedulers, states: Any) -> None:
    """Raise a ValueError for states of more or fewer schedulers, or of others by name."""
    here = _counts(schedulers)
    saved = _counts(states)
    if here != saved:
        raise ValueError(
            f"the state has so many schedulers: {saved}, and this run: {here}"
        )


def _counts(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: len(each) for name, each in given.items()}
    return len(given)


def load_scheduler_states(schedulers: Schedulers, states: Any) -> None:
    """Give the schedulers what :func:`scheduler_states` gave.

    Raises:
        ValueError: as :func:`check_scheduler_states`.
    """
    check_scheduler_states(schedulers, states)
    if isinstance(schedulers, dict):
        for name, each in schedulers.items():
            load_scheduler_states(each, states[name])
        return
    for scheduler, state in zip(schedulers, states, strict=True):
        if state:
            scheduler.load_state_dict(state)


def _build_scheduler(config: Any, optimizer: Schedulable, defaults: Options) -> Any:
    if isinstance(config, Built):
        return config
    if not isinstance(config, Mapping) or "type" not in config:
        raise TypeError(
            f"expected a scheduler or a dict with 'type', but got {config!r}"
        )
    arguments = {"optimizer": optimizer, **defaults, **config}
    max_epochs = arguments.pop("max_epochs", None)
    max_iters = arguments.pop("max_iters", None)
    epoch_length = arguments.pop("epoch_length", None)
    target: Any = PARAM_SCHEDULERS.find(arguments.pop("type"))
    # Those of MMEngine's family have a range, which ends with the run.
    is_ranged = isinstance(target, type) and issubclass(target, GroupParamScheduler)
    if is_ranged and arguments.get("end") is None:
        length = max_epochs if arguments.get("by_epoch", True) else max_iters
        arguments["end"] = length or INF
    if arguments.pop("convert_to_iter_based", False):
        target = target.build_iter_from_epoch
        arguments["epoch_length"] = epoch_length
    return PARAM_SCHEDULERS.build({"type": target, **arguments})
