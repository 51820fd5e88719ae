"""Changes to a config from the command line, such as ``train.max_iter=100``."""

import ast
import math
from collections.abc import Sequence
from typing import Any

from hooktrain.config.config_dict import ConfigDict, ConfigList
from hooktrain.config.references import find_key, path_of
from hooktrain.utils.registry import did_you_mean

# What literal_eval does not read, but command lines and other config languages write.
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
}


def apply_overrides(cfg: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Change a config in place by a list of overrides.

    - ``a.b=3`` sets an existing key. The value is a Python literal (number, quoted string, list,
      tuple, dict, None, True), one of true, false, null, inf, -inf, nan, or else a plain string:
      all after the first ``=``. It replaces what was there; dicts are not merged.
    - ``+a.b=3`` sets a key that need not exist, and makes the dicts on the way; for a list, the
      index that is its length appends.
    - ``~a.b`` deletes a key or a list item.
    - ``a.items.0=3`` changes a list item; ``a='${b.c}'`` sets a reference.

    Args:
        cfg: The config; it is changed.
        overrides: The overrides, applied in turn.

    Returns:
        ``cfg`` itself.

    Raises:
        KeyError: If a key does not exist, or leads into something that is no dict or list. Every
            message quotes the override, and suggests the nearest key.
        ValueError: If an override has no ``=``, an empty key, or an unfinished literal.
    """
    if not isinstance(cfg, ConfigDict):
        raise TypeError(f"cfg must be a ConfigDict, got {type(cfg).__name__}")
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a list of strings, got the string {overrides!r}")
    for override in overrides:
        _apply(cfg, override)
    return cfg


def _apply(cfg: ConfigDict, override: str) -> None:
    sign = override[:1] if override[:1] in ("+", "~") else ""
    path, equals, text = override[len(sign) :].partition("=")
    parts = path.split(".")
    if not all(parts) or bool(equals) == (sign == "~"):
        forms = "'key=value', '+key=value' or '~key', where key is like 'train.max_iter'"
        raise ValueError(f"the override {override!r} is none of {forms}")
    if sign == "~":
        node = _descend(cfg, parts[:-1], override, add=False)
        del node[_existing_key(node, parts[-1], override)]
        return
    value = parse_value(text, override)
    node = _descend(cfg, parts[:-1], override, add=sign == "+")
    key = find_key(node, parts[-1])
    if key is None and sign == "+" and isinstance(node, ConfigDict):
        key = parts[-1]
    if key is None and sign == "+" and parts[-1] == str(len(node)):
        node.append(value)
        return
    node[_existing_key(node, parts[-1], override) if key is None else key] = value


def _descend(cfg: Any, parts: Sequence[str], override: str, *, add: bool) -> Any:
    """The dict or list that a path leads to; ``add`` makes the dicts that are missing."""
    node = cfg
    for depth, part in enumerate(parts, start=1):
        if add and isinstance(node, ConfigDict) and find_key(node, part) is None:
            node[part] = {}
        node = node[_existing_key(node, part, override)]
        if not isinstance(node, ConfigDict | ConfigList):
            path = ".".join(parts[:depth])
            raise KeyError(
                f"the override {override!r}: {path!r} is {node!r:.80} of type"
                f" {type(node).__name__}, neither a dict nor a list, so nothing inside it can be"
                " overridden"
            )
    return node


def _existing_key(node: Any, part: str, override: str) -> Any:
    key = find_key(node, part)
    if key is None:
        known = node if isinstance(node, dict) else range(len(node))
        adding = "" if override.startswith("~") else f" (to add it, write {'+' + override!r})"
        raise KeyError(
            f"the override {override!r}: the config has no {path_of(node, part)!r}"
            f"{did_you_mean(part, known)}{adding}"
        )
    return key


def parse_value(text: str, override: str) -> Any:
    """The value that the text after the ``=`` of an override means."""
    word = text.strip()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as err:
        if word[:1] in tuple("[({'\""):
            raise ValueError(
                f"the override {override!r}: {text!r} begins like a Python literal, but is none;"
                " names in a list, dict or tuple need quotes, and so does a text that begins so"
            ) from err
        return text
