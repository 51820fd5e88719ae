"""Optimizers, wrappers and schedulers from configurations, as MMEngine's strategies build them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hooktrain.config import instantiate
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
)
from hooktrain.solver.param_groups import (
    RULES,
    ParamGroup,
    get_default_optimizer_params as get_default_optimizer_params,
    paramwise_param_groups,
    reduce_param_groups as reduce_param_groups,
)
from hooktrain.solver.param_scheduler import INF, GroupParamScheduler
from hooktrain.solver.schedule import ParamScheduler
from hooktrain.utils.names import did_you_mean, refuse_overrides
from hooktrain.utils.registry import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
)

Built = GroupParamScheduler | LRScheduler | ParamScheduler
Schedulers = (
    list[Any] | dict[str, list[Any]]
)  # of one optimizer, or by the names of several

for _name, _found in vars(torch.optim).items():
    if (
        isinstance(_found, type)
        and issubclass(_found, Optimizer)
        and _found is not Optimizer
    ):
        OPTIMIZERS.register(_found, name=_name)
OPTIMIZERS.register(torch.optim.Adafactor, name="TorchAdafactor")  # MMEngine's name
for _wrapper in (OptimWrapper, AmpOptimWrapper, OptimWrapperDict):
    OPTIM_WRAPPERS.register(_wrapper)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Called with a model, it gives a wrapper around a new optimizer of the model's parameters.

    Without rules the optimizer has one group of all parameters. With rules it has those that are
    trainable, in as few groups as there are different settings. Every group has ``param_names``.
    A subclass may override :meth:`add_params`, which rules ask for, and then have rules of its own
    in ``paramwise_cfg``; or :meth:`param_groups`.

    Args:
        optim_wrapper_cfg: ``optimizer`` is a dict with ``type`` (a name of the registry
            ``OPTIMIZERS``, a class, or its dotted name) and the arguments of the optimizer.
            ``type`` is the class of the wrapper, by default :class:`OptimWrapper`, and the other
            items are its arguments. It is not changed.
        paramwise_cfg: the rules, see :func:`~hooktrain.solver.param_groups.paramwise_param_groups`.

    Raises:
        ValueError: without ``optimizer``, or if that is no dict with ``type``.

    A subclass that overrides what only MMEngine calls is a TypeError when it is defined.

    Example::

        constructor = DefaultOptimWrapperConstructor(
            dict(optimizer=dict(type="SGD", lr=0.1, weight_decay=1e-4)),
            dict(norm_decay_mult=0.0, custom_keys={"backbone": dict(lr_mult=0.1)}),
        )
        optim_wrapper = constructor(model)
    """

    def __init_subclass__(cls) -> None:
        refuse_overrides(
            cls, dict.fromkeys(("_validate_cfg", "_is_in"), "override add_params()")
        )

    def __init__(
        self,
        optim_wrapper_cfg: Mapping[str, Any],
        paramwise_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        # Plain containers, references resolved: what an optimizer gets, a checkpoint must hold.
        self.optim_wrapper_cfg = dict(instantiate(optim_wrapper_cfg))
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer", None)
        if (
            not isinstance(self.optimizer_cfg, Mapping)
            or "type" not in self.optimizer_cfg
        ):
            raise ValueError(
                f"give 'optimizer', a dict with 'type', not {optim_wrapper_cfg!r}"
            )
        self.paramwise_cfg = instantiate(paramwise_cfg or {})
        self.base_lr = self.optimizer_cfg.get("lr")
        self.base_wd = self.optimizer_cfg.get("weight_decay")

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """The wrapper of a new optimizer.

        Raises:
            KeyError: if there is no optimizer or wrapper of the ``type``.
            TypeError: if the optimizer or the wrapper does not take its arguments.
            ValueError: for rules that make no sense; see
                :func:`~hooktrain.solver.param_groups.paramwise_param_groups`.
        """
        kind = OPTIMIZERS.find(self.optimizer_cfg["type"])
        first = next(
            iter(inspect.signature(kind).parameters)
        )  # not all call it "params"
        optimizer = OPTIMIZERS.build(
            self.optimizer_cfg, **{first: self.param_groups(model)}
        )
        wrapper: OptimWrapper = OPTIM_WRAPPERS.build(
            self.optim_wrapper_cfg, type=OptimWrapper, optimizer=optimizer
        )
        return wrapper

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        """The parameter groups of a model, which may be wrapped."""
        if self.paramwise_cfg:
            groups: list[ParamGroup] = []
            self.add_params(groups, unwrap_model(model))
            return groups
        names = parameter_names(model)
        return [{"params": [*names], "param_names": [*names.values()]}]

    def add_params(
        self, params: Any, module: nn.Module, prefix: str = "", **_: Any
    ) -> None:
        """Add the parameter groups of a module to a list, by the rules in ``paramwise_cfg``.

        Args:
            params: the list; a subclass may add groups in other ways.
            module: the model, unwrapped.
            prefix: has to be "", since rules are for names in the whole model.

        Raises:
            ValueError: for a part of a model.
        """
        if prefix:
            raise ValueError(
                f"rules are for the whole model, not for its part {prefix!r}"
            )
        own = (
            type(self) is not DefaultOptimWrapperConstructor
        )  # its rules are none of ours
        rules = {
            key: rule
            for key, rule in self.paramwise_cfg.items()
            if key in RULES or not own
        }
        params += paramwise_param_groups(module, rules, self.base_lr, self.base_wd)


def build_optim_wrapper(
    model: nn.Module | None, cfg: Any
) -> OptimWrapper | OptimWrapperDict:
    """Build the optimizer wrapper of a model.

    ``cfg`` is one of

    - a wrapper, which is returned, or a torch optimizer, which is wrapped;
    - a dict whose ``optimizer`` is a torch optimizer; its ``type`` is the class of the wrapper, by
      default :class:`OptimWrapper`, and the other items are arguments of the wrapper;
    - the same with a configuration as ``optimizer``: a dict with ``type`` (a name, a class, or its
      dotted name) and its arguments. ``paramwise_cfg`` has rules for parameters, and
      ``constructor`` is what does this, by default
      :class:`~hooktrain.solver.DefaultOptimWrapperConstructor`;
    - a dict of several of these by name, for a model that owns its step. A configuration is for
      the parameters of the submodule of that name::

        build_optim_wrapper(gan, dict(
            generator=dict(optimizer=dict(type="Adam", lr=2e-4)),
            discriminator=dict(type="AmpOptimWrapper", optimizer=dict(type="Adam", lr=1e-4)),
        ))

    Args:
        model: may be wrapped; may be None where only built optimizers are wrapped.
        cfg: see above. It is not changed.

    Raises:
        TypeError: for anything else, or for arguments that an optimizer or a wrapper does not take.
        KeyError: for a ``type`` or ``constructor`` that is missing or unknown.
        ValueError: if a configuration needs a model, a submodule or an optimizer that is missing,
            or has a rule or a value that is not known.
    """
    cfg = instantiate(cfg)
    if isinstance(cfg, OptimWrapper | OptimWrapperDict):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg)
    if not isinstance(cfg, Mapping):
        raise TypeError(
            f"expected an OptimWrapper, a torch optimizer or a dict, but got {cfg!r}"
        )
    rest = dict(cfg)
    optimizer, constructor = rest.get("optimizer"), rest.pop("constructor", None)
    wrapper: OptimWrapper | OptimWrapperDict
    if isinstance(optimizer, Optimizer):
        wrapper = OPTIM_WRAPPERS.build(cfg, type=OptimWrapper)
    elif optimizer is None and constructor is None:
        wrapper = _build_each(model, rest)
    elif model is None:
        raise ValueError(
            f"a model is needed to build an optimizer for, from {dict(cfg)!r}"
        )
    else:
        rules = rest.pop("paramwise_cfg", None)
        construct = OPTIM_WRAPPER_CONSTRUCTORS.find(
            constructor or DefaultOptimWrapperConstructor
        )
        wrapper = construct(optim_wrapper_cfg=rest, paramwise_cfg=rules)(model)
    return wrapper


def _build_each(model: nn.Module | None, items: dict[str, Any]) -> OptimWrapperDict:
    """Several wrappers by name."""
    kind = items.pop("type", OptimWrapperDict)
    if OPTIM_WRAPPERS.find(kind) is not OptimWrapperDict:
        raise ValueError(
            f"{kind!r} needs 'optimizer'{did_you_mean('optimizer', items)}"
        )
    wrappers: dict[str, Any] = {}
    for name, item in items.items():
        is_built = not isinstance(item, Mapping) or isinstance(
            item.get("optimizer"), Optimizer
        )
        part = (
            None
            if model is None or is_built
            else unwrap_model(model).get_submodule(name)
        )
        wrappers[name] = build_optim_wrapper(part, item)
    return OptimWrapperDict(**wrappers)


def build_param_scheduler(
    scheduler: Any,
    optim_wrapper: Optimizer | OptimWrapper | OptimWrapperDict,
    default_args: Mapping[str, Any] | None = None,
) -> Schedulers:
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
    each = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return [
            _build_scheduler(one, optim_wrapper, default_args or {}) for one in each
        ]
    if isinstance(scheduler, Mapping) and "type" not in scheduler:
        by_name = scheduler
    else:
        by_name = dict.fromkeys(optim_wrapper, scheduler)
        if len(optim_wrapper) > 1 and any(isinstance(one, Built) for one in each):
            raise ValueError(
                f"give built schedulers by name of the optimizer: {[*optim_wrapper]}"
            )
    if set(by_name) != set(optim_wrapper):
        raise KeyError(
            f"schedulers are for {[*by_name]}, and optimizers are {[*optim_wrapper]}"
        )
    return {
        name: list(build_param_scheduler(by_name[name], wrapper, default_args))
        for name, wrapper in optim_wrapper.items()
    }


def scheduler_states(schedulers: Schedulers) -> Any:
    """The states of schedulers, in a list or in lists by name, as these are.

    A pure function of progress has none, which is an empty dict.
    """
    if isinstance(schedulers, dict):
        return {name: scheduler_states(each) for name, each in schedulers.items()}
    return [getattr(scheduler, "state_dict", dict)() for scheduler in schedulers]


def load_scheduler_states(schedulers: Schedulers, states: Any) -> None:
    """Give the schedulers what :func:`scheduler_states` gave.

    Raises:
        ValueError: if it is of more or fewer schedulers, or of others by name.
    """
    ours, saved = (s if isinstance(s, dict) else {"": s} for s in (schedulers, states))
    counts, were = (
        {name: len(each) for name, each in some.items()} for some in (ours, saved)
    )
    if counts != were:
        raise ValueError(
            f"the state has so many schedulers: {were}, and this run: {counts}"
        )
    for name, each in ours.items():
        for scheduler, state in zip(each, saved[name], strict=True):
            if state:
                scheduler.load_state_dict(state)


def _build_scheduler(
    config: Any, optimizer: Optimizer | OptimWrapper, defaults: Mapping[str, Any]
) -> Any:
    if isinstance(config, Built):
        return config
    if not isinstance(config, Mapping) or "type" not in config:
        raise TypeError(
            f"expected a scheduler or a dict with 'type', but got {config!r}"
        )
    arguments = {"optimizer": optimizer, **defaults, **config}
    run = {
        key: arguments.pop(key, None)
        for key in ("max_epochs", "max_iters", "epoch_length")
    }
    target: Any = PARAM_SCHEDULERS.find(arguments.pop("type"))
    needs = getattr(
        target, "NEEDS", None
    )  # of our family, whose range ends with the run
    if needs is not None and arguments.get("end") is None:
        length = "max_epochs" if arguments.get("by_epoch", True) else "max_iters"
        if run[length] is None and needs and not any(map(arguments.get, needs)):
            raise ValueError(
                f"{target.__name__} needs {' or '.join(needs)}, or the run's {length}"
            )
        arguments["end"] = run[length] or INF
    if arguments.pop("convert_to_iter_based", False):
        target = target.build_iter_from_epoch
        arguments["epoch_length"] = run["epoch_length"]
    return PARAM_SCHEDULERS.build({"type": target, **arguments})
