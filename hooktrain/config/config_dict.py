""":class:`ConfigDict`, a dict with attribute access, and :func:`resolve`, which follows references.

A reference is a string such as ``"${train.max_iter}"``. The whole string is replaced by the
value that it names, of any type. In a longer string it is replaced by the value's ``str``.

- ``"${a.b}"`` starts at the root of the config.
- ``"${.b}"`` starts at the dict or list that holds the string, ``"${..b}"`` one level above.
"""

import copy
import re
import sys
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hooktrain.utils.names import Keys, did_you_mean, dotted

# The leading dots, and the path after them.
_REFERENCE = re.compile(r"\$\{(\.*)([^{}]*)\}")


class ConfigDict(dict[Any, Any]):
    """A dict for configs whose items are also attributes.

    Dicts, lists and tuples are copied when they are set as items, and the dicts in them become
    ConfigDicts. A tuple that holds a reference becomes a list. Other values are stored unchanged.

    Example::

        cfg = ConfigDict(train={"max_iter": 100})
        cfg.train.max_iter = 200

    A key that is also a method of dict, such as ``items``, is read as ``cfg["items"]``.

    Raises:
        AttributeError, KeyError: for a missing key; the message suggests the nearest one.
    """

    update = MutableMapping.update  # dict.update does not call __setitem__

    def __init__(self, /, *source: Any, **items: Any) -> None:
        super().__init__()
        self.update(*source, **items)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, to_config(value))

    def __missing__(self, key: Any) -> Any:
        raise KeyError(f"the config has no {key!r}{did_you_mean(key, self)}")

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(*error.args) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value of ``key``. A missing key is first set to ``default``."""
        return super().setdefault(key, to_config(default))

    def copy(self) -> "ConfigDict":
        """A copy, also of the dicts, lists and tuples in it; other values are shared."""
        return copy.copy(self)


def to_config(value: Any) -> Any:
    """Copy a dict, list or tuple, with dicts as ConfigDicts; return other values unchanged."""
    value = from_omegaconf(value)
    kind = type(value)
    if kind in (dict, ConfigDict):
        return ConfigDict(value)
    if kind not in (list, tuple):
        return value
    items = [to_config(item) for item in value]
    if any(map(_is_reference, items)):
        return items
    return kind(items)


def from_omegaconf(value: Any, resolve: bool = False) -> Any:
    """Convert a DictConfig or ListConfig to plain dicts and lists; return other values unchanged.

    Args:
        value: any value.
        resolve: whether to replace references, which omegaconf writes in the same way.
    """
    kind = type(value)
    if kind.__module__ in ("omegaconf.dictconfig", "omegaconf.listconfig"):
        omegaconf: Any = sys.modules["omegaconf"]
        return omegaconf.OmegaConf.to_container(value, resolve=resolve)
    return value


def known_keys(container: Any) -> Sequence[Any]:
    """The keys of a dict or the indices of a list or tuple; other values have none."""
    kind = type(container)
    if kind in (dict, ConfigDict):
        return list(container)
    if kind in (list, tuple):
        return range(len(container))
    return ()


def find_key(container: Any, part: str) -> Any:
    """The key or index that a part of a dotted path means in a container; None if missing."""
    for key in known_keys(container):
        if str(key) == part:
            return key
    return None


def resolve(cfg: ConfigDict) -> ConfigDict:
    """Replace every reference in a config by the value that it names.

    The config remembers its references: :func:`restore_references` puts them back, and another call
    of :func:`resolve` follows them again. Call it after you have changed a value that references
    name. :meth:`LazyConfig.load` and :func:`apply_overrides` call it too.

    Args:
        cfg: a whole config; it is changed.

    Returns:
        ``cfg`` itself.

    Raises:
        ValueError: if a reference names no key or is circular.
    """
    restore_references(cfg)
    references = {}  # from paths to the reference as written and the value that it names
    for path, text in _references(cfg, ()):
        try:
            value = _resolved(cfg, path, text)
        except RecursionError:
            raise ValueError(
                f"{dotted(path)}: the reference {text!r} is circular"
            ) from None
        references[path] = (text, value)
    # An error above changes nothing: all references are followed before the first is replaced.
    for path, (_, value) in references.items():
        _put(cfg, path, value)
    vars(cfg)["_references"] = references
    return cfg


def restore_references(cfg: ConfigDict) -> ConfigDict:
    """Put back the references of a resolved config, except where the value was changed since.

    Returns:
        ``cfg`` itself.
    """
    # A plain dict has no references.
    references = getattr(cfg, "__dict__", {}).pop("_references", {})
    for path, (text, value) in references.items():
        # A dict or list on the path may have been deleted.
        with suppress(KeyError, IndexError, TypeError):
            if _at(cfg, path) == value:
                _put(cfg, path, text)
    return cfg


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _references(value: Any, path: Keys) -> Iterator[tuple[Keys, str]]:
    """The paths of all strings with references in a value, and these strings."""
    if _is_reference(value):
        yield path, value
    for key in known_keys(value):
        below = (*path, key)
        yield from _references(value[key], below)


def _at(node: Any, path: Iterable[Any]) -> Any:
    for key in path:
        node = node[key]
    return node


def _put(cfg: ConfigDict, path: Keys, value: Any) -> None:
    *above, key = path
    holder = _at(cfg, above)
    if isinstance(holder, dict):
        # ConfigDict.__setitem__ would copy a dict that two keys share.
        dict.__setitem__(holder, key, value)
    else:
        holder[key] = value


def _resolved(cfg: ConfigDict, path: Keys, text: str) -> Any:
    """The value of a string with references, which is at this path."""
    follow = partial(_follow, cfg, path)
    whole = _REFERENCE.fullmatch(text)
    if whole:
        return follow(whole)
    return _REFERENCE.sub(lambda match: str(follow(match)), text)


def _follow(cfg: ConfigDict, path: Keys, match: re.Match[str]) -> Any:
    """The value that a reference names."""
    dots, names = match.groups()
    here: Keys = path[: -len(dots)] if dots else ()
    value = _at(cfg, here)
    for name in names.split("."):
        key = find_key(value, name)
        if key is None:
            hint = did_you_mean(name, known_keys(value))
            raise ValueError(
                f"{dotted(path)}: the reference {match[0]!r} names no key: no {name!r}{hint}"
            )
        here = (*here, key)
        value = value[key]
        if _is_reference(value):
            value = _resolved(cfg, here, value)
    return value
