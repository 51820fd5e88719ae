"""State dicts under other names: without a prefix, a part of them, revised by regular expressions.

All of them give copies, in which the versions of the modules (``state._metadata``, which modules
look at when they load) are renamed along with the names.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hooktrain.utils.registry import did_you_mean

__all__ = ["revise_names", "strip_prefix", "take_prefix"]


def strip_prefix(state: Mapping[str, Any], prefix: str) -> "OrderedDict[str, Any]":
    """A copy of a state dict without ``prefix``, if every name has it; else an equal copy.

    >>> list(strip_prefix({"module.a": 1, "module.b": 2}, "module."))
    ['a', 'b']
    """
    if all(name.startswith(prefix) for name in state):
        return _renamed(state, _under(prefix))
    return _renamed(state, lambda name: name)


def take_prefix(state: Mapping[str, Any], prefix: str) -> "OrderedDict[str, Any]":
    """The part of a state dict that belongs to one module, by the names that it has in itself.

    >>> dict(take_prefix({"backbone.a": 1, "head.b": 2}, "backbone"))
    {'a': 1}

    Args:
        state: is not changed.
        prefix: the full name of the module; a dot at the end may be left out.

    Raises:
        ValueError: if there is no such part.
    """
    prefix = prefix.removesuffix(".") + "."
    part = _renamed(state, _under(prefix))
    if not part:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in state)
        hint = did_you_mean(prefix.removesuffix("."), modules)
        raise ValueError(f"no name of the state begins with {prefix!r}{hint}")
    return part


def revise_names(
    state: Mapping[str, Any], revise_keys: Sequence[tuple[str, str]]
) -> "OrderedDict[str, Any]":
    r"""A copy of a state dict with each name revised by regular expressions, as of :func:`re.sub`.

    >>> list(revise_names({"net.a": 1, "net.b": 2}, [(r"^net\.", ""), (r"b$", "c")]))
    ['a', 'c']

    Args:
        state: is not changed.
        revise_keys: patterns and replacements, applied one after the other. A dot in a pattern
            stands for any character, unless it is escaped.

    Raises:
        ValueError: if one of them is no regular expression, or two names become the same.
    """

    def rename(name: str) -> str:
        for pattern, replacement in revise_keys:
            try:
                name = re.sub(pattern, replacement, name)
            except re.error as error:
                raise ValueError(
                    f"revise_keys: {(pattern, replacement)!r} is no pattern and replacement of "
                    f"re.sub: {error}"
                ) from error
        return name

    return _renamed(state, rename)


def _under(prefix: str) -> Callable[[str], str | None]:
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None


def _renamed(
    state: Mapping[str, Any], rename: Callable[[str], str | None]
) -> "OrderedDict[str, Any]":
    """A copy with other names; what has none is left out."""
    renamed: OrderedDict[str, Any] = OrderedDict()
    before: dict[str, str] = {}
    for name, value in state.items():
        new = rename(name)
        if new is None:
            continue
        if new in renamed:
            raise ValueError(f"{before[new]!r} and {name!r} would both be named {new!r}")
        renamed[new], before[new] = value, name
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # Its keys are the names of modules, so without the dot that follows in names of tensors.
        # The model itself is "", and its wrapper's entry "module" becomes that.
        modules = {key: rename(f"{key}." if key else "") for key in metadata}
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (new.removesuffix("."), metadata[key])
            for key, new in modules.items()
            if new is not None
        )
    return renamed
