r"""`ConfigDict`, a dict whose items are attributes too, and `resolve`, which follows references.

A reference is a string such as ``"${train.max_iter}"``. The whole string is replaced by the value
that it names, whatever its type. Inside a longer string it is replaced by the value's text.

- ``"${a.b}"`` starts at the root of the config.
- ``"${.b}"`` starts at the dict, list or tuple that holds the string, ``"${..b}"`` one level above.
- ``"\${a}"`` is the text ``${a}``.
"""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from hooktrain.utils.names import did_you_mean

logger = logging.getLogger(__name__)

# The dots at its beginning, the path after them, and the closing brace.
_REFERENCE = re.compile(r"\\?\$\{(\.*)([^{}]*)(\}?)")

# The keys and indices that lead from the root to a value.
Path = tuple[Any, ...]


class ConfigDict(dict[Any, Any]):
    """A dict whose items are attributes too, for configs.

    Dicts, lists and tuples that are put into it are copied, and the dicts in them become
    ConfigDicts. Other values, an OrderedDict or a named tuple among them, are kept as they are.

    Example::

        cfg = ConfigDict(train={"max_iter": 100})
        cfg.train.max_iter = 200

    Keys that are names of dict's methods, such as ``items``, are read as ``cfg["items"]``. To set
    a new attribute with nearly the name of another is a warning; to set an item is not.

    Raises:
        AttributeError, KeyError: For a missing key; the message suggests the nearest one.
    """

    update = MutableMapping.update  # dict's own goes past __setitem__

    def __init__(self, /, *source: Any, **items: Any) -> None:
        super().__init__()
        self.update(*source, **items)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, to_config(value))

    def __missing__(self, key: Any) -> Any:
        raise KeyError(f"the config has no {key!r}{did_you_mean(key, self)}")

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(
                f"the config has no {name!r}{did_you_mean(name, self)}"
            )
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self and (
            near := get_close_matches(name, map(str, self), 1, 0.9)
        ):
            logger.warning(
                "The config has %r already, and gets %r beside it: a typo?", *near, name
            )
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value of ``key``, which is set to ``default`` first if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *map(str, self)]

    def copy(self) -> "ConfigDict":
        """A copy, also of the dicts, lists and tuples inside; other values are shared."""
        return copy.copy(self)


def to_config(value: Any) -> Any:
    """A copy of dicts, lists and tuples with ConfigDicts as dicts; other values as they are."""
    if type(value) in (dict, ConfigDict):
        return ConfigDict(value)
    if type(value) in (list, tuple):
        return type(value)(map(to_config, value))
    return value


def known_keys(container: Any) -> Sequence[Any]:
    """The keys of a dict, the indices of a list or tuple, or nothing."""
    if type(container) in (dict, ConfigDict):
        return list(container)
    return range(len(container)) if type(container) in (list, tuple) else ()


def find_key(container: Any, part: str) -> Any:
    """The key or index that one part of a dotted path means in a dict, list or tuple, or None."""
    known = known_keys(container)
    if isinstance(known, range):
        known = range(-len(known), len(known))
    return next((key for key in known if str(key) == part), None)


def resolve(cfg: ConfigDict) -> ConfigDict:
    """Replace every reference in a config by what it names.

    The config remembers how the references were written: `restore_references` puts them back, and
    to resolve again follows them again. So call this after changing by hand what others refer to;
    `LazyConfig.load` and `apply_overrides` call it.

    Args:
        cfg: A whole config. It is changed.

    Returns:
        ``cfg`` itself.

    Raises:
        ValueError: If a reference is malformed, names nothing, or comes back to itself.
    """
    restore_references(cfg)
    # All are read before any is replaced.
    found = {
        path: (text, _resolved(cfg, text, path)) for path, text in _references(cfg, ())
    }
    for path, (_, value) in found.items():
        _put(cfg, path, value)
    vars(cfg)["_references"] = found
    return cfg


def restore_references(cfg: ConfigDict) -> ConfigDict:
    """Put the references of a resolved config back, except where a value was changed since.

    Returns:
        ``cfg`` itself.

    Raises:
        TypeError: If it is no ConfigDict.
    """
    if not isinstance(cfg, ConfigDict):
        raise TypeError(
            f"a config must be a ConfigDict, as of LazyConfig.load: {cfg!r:.80}"
        )
    for path, (text, value) in vars(cfg).pop("_references", {}).items():
        # Something on the way may have been deleted.
        with suppress(KeyError, IndexError, TypeError):
            if _at(cfg, path) == value:
                _put(cfg, path, text)
    return cfg


def _references(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """All strings with references below a value, with their paths."""
    if isinstance(value, str) and "${" in value:
        yield path, value
    for key in known_keys(value):
        yield from _references(value[key], (*path, key))


def _at(node: Any, path: Path) -> Any:
    for key in path:
        node = node[key]
    return node


def _put(node: Any, path: Path, value: Any) -> Any:
    """Set the value at a path; gives ``node``, or a new tuple in its place."""
    if not path:
        return value
    key = path[0]
    value = _put(node[key], path[1:], value)
    if isinstance(node, tuple):
        return (*node[:key], value, *node[key + 1 :])
    # Not ConfigDict's own: that would copy a dict that two keys refer to.
    set_item: Any = dict.__setitem__ if isinstance(node, dict) else list.__setitem__
    set_item(node, key, value)
    return node


def _resolved(root: Any, value: Any, path: Path, chain: tuple[Path, ...] = ()) -> Any:
    """A value, where it is a string or tuple with its references replaced.

    Args:
        root: The whole config.
        value: What is in it.
        path: Where that is.
        chain: The paths of the references that lead here, to notice a circle.
    """
    if not isinstance(value, str) or "${" not in value:
        inner = [
            _resolved(root, value[key], (*path, key), chain)
            for key in known_keys(value)
        ]
        return tuple(inner) if type(value) is tuple else value
    if path in chain:
        circle = " -> ".join(map(dotted, (*chain, path)))
        raise ValueError(f"references go round in a circle: {circle}")
    chain = (*chain, path)
    whole = _REFERENCE.fullmatch(value)
    if whole and not value.startswith("\\"):
        return _follow(root, whole, path, chain)

    def text(match: re.Match[str]) -> str:
        if match[0].startswith("\\"):
            return match[0][1:]
        named = _follow(root, match, path, chain)
        if isinstance(named, dict | list):
            raise _broken(
                path, match, "names a dict or list, which cannot be put into a text"
            )
        return str(named)

    return _REFERENCE.sub(text, value)


def _follow(
    root: Any, match: re.Match[str], path: Path, chain: tuple[Path, ...]
) -> Any:
    """The value that a reference names."""
    if not match[3]:
        raise _broken(
            path, match, r"has no closing brace; write '\${' for the text itself"
        )
    dots = len(match[1])
    if dots > len(path):
        raise _broken(path, match, "climbs above the root")
    place = path[:-dots] if dots else ()
    value = _at(root, place)
    for part in match[2].split("."):
        key = find_key(value, part)
        if key is None:
            hint = did_you_mean(part, known_keys(value))
            raise _broken(path, match, f"names nothing: no {part!r}{hint}")
        value, place = value[key], (*place, key)
        if isinstance(value, str):
            value = _resolved(root, value, place, chain)
    return value if isinstance(value, str) else _resolved(root, value, place, chain)


def _broken(path: Path, match: re.Match[str], what: str) -> ValueError:
    return ValueError(f"{dotted(path)}: the reference {match[0]!r} {what}")


def dotted(path: Path) -> str:
    """A path as it is written in a reference or an override."""
    return ".".join(map(str, path))
