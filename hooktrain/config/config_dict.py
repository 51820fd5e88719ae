"""`ConfigDict`: a dict with attribute access, helpful errors, and references between its keys."""

import copy
from collections.abc import (
    ItemsView,
    Iterable,
    Iterator,
    MutableMapping,
    MutableSequence,
    ValuesView,
)
from typing import Any, TypeVar

from hooktrain.config.references import Node, path_of, raw_items, resolve, root_of
from hooktrain.utils.registry import did_you_mean

N = TypeVar("N", bound=Node)


class ConfigDict(Node, dict[Any, Any]):
    """A dict whose items are attributes too, for configs.

    - Dicts, lists and tuples inside become ConfigDicts, ConfigLists (a ``list``) and tuples of
      them, at any depth. Other values, OrderedDicts and named tuples included, are kept as is.
    - A missing key is an error that names the full path and the nearest key.
    - Strings may refer to other keys, ``"${train.max_iter}"`` or ``"${.sibling}"``, see
      `hooktrain.config.references`. Reading (attribute, item, ``get``, ``items``, ``values``,
      ``**``) gives the value referred to; comparing, printing, copying, pickling and
      `to_container` see the reference as written.
    - A tree knows its parents. A dict that is part of a tree is therefore copied when it is
      assigned to another place. What is not a dict, list or tuple is never copied, but by
      ``deepcopy``.

    Example::

        cfg = ConfigDict(train={"max_iter": 100, "warmup": "${.max_iter}"})
        cfg.train.max_iter = 200
        cfg.train.warmup  # 200

    Keys that are names of dict's methods, such as ``items``, are reached as ``cfg["items"]``.
    """

    def __init__(self, /, *source: Any, **items: Any) -> None:
        super().__init__()
        self.update(*source, **items)

    # Reading. dict's own methods go past __getitem__, the ones of the abstract class go through it.

    get = MutableMapping.get  # type: ignore[assignment]
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem

    def __getitem__(self, key: Any) -> Any:
        if key not in self:
            raise KeyError(self._no_key(key))
        return resolve(super().__getitem__(key), self, key)

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(self._no_key(name))
        return self[name]

    def __iter__(self) -> Iterator[Any]:
        # Looks idle, but makes dict(cfg) and f(**cfg) read through __getitem__.
        return super().__iter__()

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        """The items, references resolved."""
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """The values, references resolved."""
        return ValuesView(self)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *(key for key in self if isinstance(key, str))]

    def _no_key(self, key: Any) -> str:
        return f"the config has no {path_of(self, key)!r}{did_you_mean(key, self)}"

    # Writing

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, _adopt(value, self))

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(
                f"{name!r} is an attribute of every dict: write cfg[{name!r}] = ..."
            )
        self[name] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(self._no_key(key))
        super().__delitem__(key)

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(self._no_key(name))
        del self[name]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value of ``key``, which is set to ``default`` first if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, /, *source: Any, **items: Any) -> None:
        """Set many items, as ``dict.update`` does; references of a ConfigDict stay references."""
        is_config = len(source) == 1 and isinstance(source[0], ConfigDict)
        new = dict(raw_items(source[0]) if is_config else dict(*source), **items)
        for key, value in new.items():
            self[key] = value

    def __or__(self, other: Any) -> "ConfigDict":
        new = self.copy()
        new.update(other)
        return new

    def __ior__(self, other: Any) -> "ConfigDict":
        self.update(other)
        return self

    # Copying

    def copy(self) -> "ConfigDict":
        """A copy of the tree from here down; values other than dicts, lists, tuples are shared."""
        return _with_parent(type(self)(self), self._parent)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "ConfigDict":
        return _deepcopy(self, memo)

    def __reduce__(self) -> Any:
        return type(self), (), (dict(raw_items(self)), self._parent)

    def __setstate__(self, state: tuple[dict[Any, Any], Node | None]) -> None:
        super().update(state[0])
        _with_parent(self, state[1])


class ConfigList(Node, list[Any]):
    """The list that a list becomes in a `ConfigDict`: its items may be dicts and references."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__()
        self.extend(items)

    pop = MutableSequence.pop  # type: ignore[assignment]
    append = MutableSequence.append

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return resolve(super().__getitem__(index), self, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        return (self[i] for i in reversed(range(len(self))))

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            super().__setitem__(index, [_adopt(item, self) for item in value])
        else:
            super().__setitem__(index, _adopt(value, self))

    def insert(self, index: Any, value: Any) -> None:
        """Insert before ``index``, as ``list.insert`` does."""
        super().insert(index, _adopt(value, self))

    def extend(self, items: Iterable[Any]) -> None:
        """Append many items; references of a config stay references."""
        raw = [v for _, v in raw_items(items)] if isinstance(items, ConfigList) else list(items)
        for item in raw:
            self.append(item)

    def __iadd__(self, items: Iterable[Any]) -> "ConfigList":  # type: ignore[misc]
        self.extend(items)
        return self

    def copy(self) -> "ConfigList":
        """A copy of the tree from here down; values other than dicts, lists, tuples are shared."""
        return _with_parent(type(self)(self), self._parent)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "ConfigList":
        return _deepcopy(self, memo)

    def __reduce__(self) -> Any:
        return type(self), (), ([v for _, v in raw_items(self)], self._parent)

    def __setstate__(self, state: tuple[list[Any], Node | None]) -> None:
        super().extend(state[0])
        _with_parent(self, state[1])


def to_container(cfg: Any) -> Any:
    """A config as plain dicts, lists and tuples, with its references as written."""
    if isinstance(cfg, ConfigDict):
        return {key: to_container(value) for key, value in raw_items(cfg)}
    if isinstance(cfg, ConfigList):
        return [to_container(value) for _, value in raw_items(cfg)]
    if type(cfg) is tuple:
        return tuple(map(to_container, cfg))
    return cfg


def _with_parent(node: N, parent: Node | None) -> N:
    # ConfigDict's own __setattr__ would make it an item.
    object.__setattr__(node, "_parent", parent)
    return node


def _adopt(value: Any, parent: Node) -> Any:
    """What a node stores for a value: dicts and lists as nodes of its own."""
    if isinstance(value, Node):
        free = value._parent is None and value is not root_of(parent)
        return _with_parent(value if free else copy.copy(value), parent)
    if type(value) is dict:
        return _with_parent(ConfigDict(value), parent)
    if type(value) is list:
        return _with_parent(ConfigList(value), parent)
    if type(value) is tuple:
        return tuple(_adopt(member, parent) for member in value)
    return value


def _deepcopy(node: N, memo: dict[int, Any]) -> N:
    """A deep copy of the tree from ``node`` down, which resolves references where ``node`` does."""
    memo[id(node)] = new = _with_parent(type(node)(), memo.get(id(node._parent), node._parent))
    store: Any = dict.__setitem__ if isinstance(node, dict) else list.insert
    for key, value in raw_items(node):
        store(new, key, copy.deepcopy(value, memo))
    return new
