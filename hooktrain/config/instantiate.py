"""`instantiate`: from a config to the objects that it describes."""

from typing import Any

from hooktrain.config.references import Node, path_of
from hooktrain.utils.registry import call, locate


def instantiate(cfg: Any) -> Any:
    """Build what a config describes, its children first.

    A dict with the key ``_target_`` (a callable, its dotted name, or a config that gives a
    callable) is replaced by what the target returns, called with the list ``_args_`` and with the
    other items as keyword arguments; `LazyCall` writes such dicts. Other dicts, lists and tuples
    come back as plain ones with their contents built, so that a target never meets a config class;
    everything else comes back as it is. A part that is referred to in several places is built anew
    for each of them.

    Args:
        cfg: A config, or anything else.

    Raises:
        TypeError: If a target is not callable or does not accept the arguments; the message has
            the path of the config, and the nearest parameter's name for one that is unknown.
        ImportError: If a target's name cannot be located.
        ValueError: If a reference names nothing, or references lead round in a circle.
        Exception: What a target raises is passed on as it is, with a note about the path and the
            target (Python 3.10, which has no notes, logs an error that says the same).
    """
    return _build(cfg, path_of(cfg) if isinstance(cfg, Node) else "", ())


def _build(value: Any, path: str, above: tuple[int, ...]) -> Any:
    """Build one value; ``above`` are the ids of the containers that it lies in."""
    if not isinstance(value, Node) and type(value) not in (dict, list, tuple):
        return value
    if id(value) in above:
        raise ValueError(f"{path}: a reference leads back to a config that it is a part of")
    above = (*above, id(value))
    if isinstance(value, dict):
        built = {k: _build(v, _join(path, k), above) for k, v in value.items()}
        return _call(built, path) if "_target_" in built else built
    assert isinstance(value, list | tuple)
    items = [_build(v, _join(path, i), above) for i, v in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def _call(kwargs: dict[Any, Any], path: str) -> Any:
    """Call the target among ``kwargs`` with the others."""
    target, args = kwargs.pop("_target_"), kwargs.pop("_args_", [])
    if not isinstance(args, list | tuple):
        raise TypeError(f"{_join(path, '_args_')} must be a list of arguments, got {args!r}")
    if isinstance(target, str):
        try:
            target = locate(target)
        except ImportError as err:
            raise ImportError(f"{_join(path, '_target_')}: {err}") from err
    if not callable(target):
        raise TypeError(f"{_join(path, '_target_')} must be callable or its name, got {target!r}")
    return call(target, args, kwargs, f"{path or 'the config'} ({_name(target)})")


def _name(target: Any) -> str:
    name = getattr(target, "__qualname__", None)
    return f"{getattr(target, '__module__', None)}.{name}" if name else repr(target)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
