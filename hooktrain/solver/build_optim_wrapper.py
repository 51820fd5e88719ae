"""Optimizer wrappers from configurations, as MMEngine's strategies build them."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hooktrain.config import instantiate
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_constructor import DefaultOptimWrapperConstructor
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.utils.registry import (
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    did_you_mean,
    unwrap_model,
)

__all__ = ["build_optim_wrapper"]


def build_optim_wrapper(model: nn.Module | None, cfg: Any) -> OptimWrapper | OptimWrapperDict:
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
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model, the first argument, must be a torch.nn.Module or None: {model!r}")
    cfg = instantiate(cfg)
    if isinstance(cfg, OptimWrapper | OptimWrapperDict):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg)
    if not isinstance(cfg, Mapping):
        raise TypeError(
            "optimizer wrapper should be an OptimWrapper, a torch optimizer or a dict, "
            f"but got {cfg!r}"
        )
    if isinstance(cfg.get("optimizer"), Optimizer):
        return _wrap(cfg)
    if _is_configuration(cfg):
        return _construct(model, cfg)
    return _build_each(model, cfg)


def _is_configuration(cfg: Any) -> bool:
    """Whether it is a dict for one optimizer, or for one constructor."""
    return isinstance(cfg, Mapping) and (
        cfg.get("optimizer") is not None or cfg.get("constructor") is not None
    )


def _wrap(cfg: Mapping[str, Any]) -> OptimWrapper | OptimWrapperDict:
    """Wrap an optimizer that is built."""
    if late := [key for key in ("constructor", "paramwise_cfg") if key in cfg]:
        raise ValueError(f"{late[0]!r} is for building an optimizer, and there is one already")
    return _checked(OPTIM_WRAPPERS.build({"type": OptimWrapper, **cfg}), cfg.get("type"))


def _construct(model: nn.Module | None, cfg: Mapping[str, Any]) -> OptimWrapper | OptimWrapperDict:
    """Let a constructor build the optimizer and its wrapper."""
    if model is None:
        raise ValueError(f"a model is needed to build an optimizer for, from {dict(cfg)!r}")
    rest = dict(cfg)
    kind = rest.pop("constructor", None) or DefaultOptimWrapperConstructor
    rules = rest.pop("paramwise_cfg", None)
    constructor = OPTIM_WRAPPER_CONSTRUCTORS.build(
        {"type": kind, "optim_wrapper_cfg": rest, "paramwise_cfg": rules}
    )
    return _checked(constructor(model), kind)


def _checked(wrapper: Any, kind: Any) -> OptimWrapper | OptimWrapperDict:
    if not isinstance(wrapper, OptimWrapper | OptimWrapperDict):
        raise TypeError(f"{kind!r} must give an OptimWrapper, but gave {wrapper!r}")
    return wrapper


def _build_each(model: nn.Module | None, cfg: Mapping[str, Any]) -> OptimWrapperDict:
    items = dict(cfg)
    kind = items.pop("type", OptimWrapperDict)
    if OPTIM_WRAPPERS.find(kind) is not OptimWrapperDict:
        near = did_you_mean("optimizer", cfg)
        raise ValueError(f"the configuration of a {kind!r} needs 'optimizer'{near}")
    return OptimWrapperDict(**{n: _build_named(model, n, item) for n, item in items.items()})


def _build_named(model: nn.Module | None, name: str, item: Any) -> Any:
    """One of several wrappers."""
    if isinstance(item, OptimWrapper | Optimizer):
        return build_optim_wrapper(None, item)
    if not _is_configuration(item):
        raise ValueError(
            "without 'optimizer' and 'constructor', each item must be an optimizer wrapper or a "
            f"configuration with 'optimizer', but got {name}={item!r}"
        )
    if model is None or isinstance(item.get("optimizer"), Optimizer):
        return build_optim_wrapper(None, item)
    inner = unwrap_model(model)
    try:
        submodule = inner.get_submodule(name)
    except AttributeError:
        near = did_you_mean(name, (child for child, _ in inner.named_children()))
        raise ValueError(
            f"{name!r} is to be optimized, and no submodule of that name{near}"
        ) from None
    return build_optim_wrapper(submodule, item)
