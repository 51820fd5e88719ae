r"""References between the keys of a config, such as ``"${train.max_iter}"``, and how they resolve.

A string that is one whole reference stands for the value that it names, whatever its type; inside
a longer string it is replaced by the value's text.

- ``"${a.b}"`` starts at the root of the tree.
- ``"${.b}"`` starts at the dict or list that holds the string, ``"${..b}"`` one level above, and so
  on. A tuple is no level of its own.
- ``"\${a}"`` is no reference, but the text ``${a}``.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hooktrain.utils.registry import did_you_mean

_REFERENCE = re.compile(r"\\?\$\{([^{}]*)(\}?)")

# The (node, key) pairs that are being resolved, to notice a cycle.
Chain = tuple[tuple["Node", Any], ...]


class Node:
    """A dict or list of a config, which knows the node that holds it."""

    _parent: "Node | None" = None


def raw_items(node: Node | list[Any] | dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The keys (or indices) of a node with the values as written, references unresolved."""
    if isinstance(node, dict):
        return dict.items(node)
    assert isinstance(node, list)
    return enumerate(list.__iter__(node))


def raw_value(node: Any, key: Any) -> Any:
    """The value of a key (or index) as written, a reference unresolved."""
    getter: Any = dict.__getitem__ if isinstance(node, dict) else list.__getitem__
    return getter(node, key)


def root_of(node: Node) -> Node:
    """The node at the top of the tree."""
    while node._parent is not None:
        node = node._parent
    return node


def path_of(node: Node, *keys: Any) -> str:
    """The dotted path from the root to a node, or to a key below it."""
    path = list(keys)
    while (parent := node._parent) is not None:
        # A copy of a node still resolves in its tree without being part of it.
        path = [*next((p for p, v in _entries(raw_items(parent)) if v is node), "?"), *path]
        node = parent
    return ".".join(map(str, path))


def _entries(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[list[Any], Any]]:
    """The values of a node with their keys, the members of tuples included."""
    for key, value in items:
        yield [key], value
        if type(value) is tuple:
            yield from (([key, *rest], member) for rest, member in _entries(enumerate(value)))


def find_key(container: Any, part: str) -> Any:
    """The key or index that one part of a dotted path means in a dict, list or tuple, or None."""
    number = int(part) if re.fullmatch(r"-?\d+", part) else None
    if isinstance(container, dict):
        return next((key for key in (part, number) if key in container), None)
    inside = number is not None and -len(container) <= number < len(container)
    return number if inside else None


def resolve(value: Any, node: Node, key: Any, chain: Chain = ()) -> Any:
    """Replace the references in a value by what they name.

    Args:
        value: The raw value; only strings, and tuples with strings, can change.
        node: The node that holds it.
        key: The key under which the node holds it.
        chain: What is being resolved already.

    Raises:
        ValueError: If a reference is malformed, names nothing, or comes back to itself.
    """
    if type(value) is tuple:
        return tuple(resolve(member, node, key, chain) for member in value)
    if type(value) is not str or "${" not in value:
        return value
    if any(n is node and k == key for n, k in chain):
        names = [path_of(n, k) for n, k in (*chain, (node, key))]
        raise ValueError(f"references go round in a circle: {' -> '.join(names)}")
    chain = (*chain, (node, key))
    whole = _REFERENCE.fullmatch(value)
    if whole and not value.startswith("\\"):
        return _follow(whole, chain)
    return _REFERENCE.sub(lambda match: _text(match, chain), value)


def _text(match: re.Match[str], chain: Chain) -> str:
    """What replaces a reference inside a longer string."""
    if match[0].startswith("\\"):
        return match[0][1:]
    value = _follow(match, chain)
    if isinstance(value, Node):
        raise _broken(match, chain, "names a dict or list, which cannot be put into a text")
    return str(value)


def _follow(match: re.Match[str], chain: Chain) -> Any:
    """The value that a reference names."""
    if not match[2]:
        raise _broken(match, chain, r"has no closing brace; write '\${' for the text itself")
    path = match[1].lstrip(".")
    value: Any = _start(match, chain)
    for part in path.split("."):
        if not isinstance(value, Node | tuple):
            what = f"leads into {value!r:.80} of type {type(value).__name__}, which has no {part!r}"
            raise _broken(match, chain, what)
        key = find_key(value, part)
        if key is None:
            known = value if isinstance(value, dict) else range(len(value))  # type: ignore[arg-type]
            raise _broken(match, chain, f"names nothing: no {part!r}{did_you_mean(part, known)}")
        if isinstance(value, tuple):
            value = value[key]
        else:
            value = resolve(raw_value(value, key), value, key, chain)
    return value


def _start(match: re.Match[str], chain: Chain) -> Node:
    """The node from which a reference counts."""
    node = chain[-1][0]
    dots = len(match[1]) - len(match[1].lstrip("."))
    if dots == 0:
        return root_of(node)
    for _ in range(dots - 1):
        if node._parent is None:
            raise _broken(match, chain, "climbs above the root")
        node = node._parent
    return node


def _broken(match: re.Match[str], chain: Chain, what: str) -> ValueError:
    node, key = chain[-1]
    return ValueError(f"{path_of(node, key)}: the reference {match[0]!r} {what}")
