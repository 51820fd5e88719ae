"""Changes to a config from the command line, such as ``train.max_iter=100``."""

import ast
from collections.abc import Sequence
from typing import Any

from hooktrain.config.config_dict import (
    ConfigDict,
    find_key,
    known_keys,
    resolve,
    restore_references,
    to_config,
)
from hooktrain.utils.epochs import EPOCHS
from hooktrain.utils.names import did_you_mean

# What literal_eval does not read, but command lines and other config languages write.
_WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "none": None,
    "null": None,
    "": "",
}
_WORDS |= {word: float(word) for word in ("inf", "-inf", "nan")}
# True or False in some languages, and a text in others: only in the place of a bool is it clear.
_SWITCHES = {"yes": True, "no": False, "on": True, "off": False}


def apply_overrides(cfg: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Change a config in place by a list of overrides, and resolve its references again.

    - ``a.b=3`` sets an existing key. The value is a Python literal (number, quoted string, list,
      tuple, dict), one of true, false, none, null, inf, -inf, nan in any case, or else a plain
      string, all after the first ``=``. It replaces what was there; dicts are not merged. In the
      place of True or False, yes, no, on and off are clear too; elsewhere they need quotes. In the
      place of a number or a call (``_target_``) a string needs quotes, unless it is like
      ``1 epoch``. In the place of an integer, ``1e4`` is one.
    - ``+a.b=3`` sets a key that need not exist, and makes the dicts on the way; for a list, the
      index that is its length appends.
    - ``~a.b`` deletes a key or a list item.
    - ``a.items.0=3`` changes a list item; ``a='${b.c}'`` sets a reference.

    Args:
        cfg: A whole config; it is changed.
        overrides: The overrides, applied in turn.

    Returns:
        ``cfg`` itself.

    Raises:
        KeyError: If a key does not exist. The message quotes the override, and suggests the
            nearest key.
        ValueError: If an override has no ``=``, an empty key, or an unfinished literal, or says
            yes, no, on or off without quotes; if another word is to replace True, False, a number
            or a call; if True or False is to replace a dict that has ``enabled``; or if a
            reference names nothing.
    """
    restore_references(cfg)
    for override in overrides:
        _apply(cfg, override)
    return resolve(cfg)


def _apply(cfg: ConfigDict, override: str) -> None:
    sign = override[:1] if override[:1] in ("+", "~") else ""
    path, equals, text = override[len(sign) :].partition("=")
    parts = path.split(".")
    if not all(parts) or bool(equals) == (sign == "~"):
        forms = (
            "'key=value', '+key=value' or '~key', where key is like 'train.max_iter'"
        )
        raise ValueError(f"the override {override!r} is none of {forms}")
    node: Any = cfg
    for depth in range(1, len(parts)):
        key = _find(node, parts[:depth], override)
        node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
    if sign == "~":
        del node[_find(node, parts, override)]
        return
    if sign == "+" and isinstance(node, list) and parts[-1] == str(len(node)):
        node.append(to_config(parse_value(text, override)))
    else:
        key = _find(node, parts, override)
        old = node.get(key) if isinstance(node, dict) else node[key]
        node[key] = to_config(_replacement(old, text, override))


def _replacement(old: Any, text: str, override: str) -> Any:
    """The value of an override; True, False, numbers, whole ones and calls stay what they are."""
    is_switch = isinstance(old, bool)
    if is_switch and (word := text.strip().lower()) in _SWITCHES:
        return _SWITCHES[word]
    value = parse_value(text, override)
    if is_switch and isinstance(value, str):
        raise ValueError(
            f"the override {override!r} replaces {old!r}: write true or false"
        )
    keeps_kind = isinstance(old, int | float) or (
        isinstance(old, dict) and "_target_" in old
    )
    if keeps_kind and value == text and not EPOCHS.fullmatch(text) and "${" not in text:
        hint = "give a value of its kind, or put quotes around a text"
        raise ValueError(f"the override {override!r} replaces {old!r:.60}: {hint}")
    if isinstance(value, bool) and isinstance(old, dict) and "enabled" in old:
        raise ValueError(
            f"the override {override!r} replaces a dict: give its .enabled={text}"
        )
    is_power = type(old) is int and isinstance(value, float) and "e" in text.lower()
    return int(value) if is_power and value.is_integer() else value


def _find(node: Any, parts: Sequence[str], override: str) -> Any:
    """The key of a dict or list that the last part of a path means; + may name a new one."""
    container = node if isinstance(node, dict | list) else None
    key = find_key(container, parts[-1])
    if key is None and override.startswith("+") and isinstance(node, dict):
        return parts[-1]
    if key is None:
        hint = did_you_mean(parts[-1], known_keys(container))
        adding = (
            ""
            if override.startswith("~")
            else f" (to add it, write {'+' + override!r})"
        )
        name = ".".join(parts)
        raise KeyError(
            f"the override {override!r}: the config has no {name!r}{hint}{adding}"
        )
    return key


def parse_value(text: str, override: str) -> Any:
    """The value that the text after the ``=`` of an override means."""
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        # In brackets, so that 7#x is no 7 with a comment.
        return ast.literal_eval(f"({word})")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as err:
        if word[:1] in tuple("[({'\"") or word.lower() in _SWITCHES:
            raise ValueError(
                f"the override {override!r}: {text!r} is no Python literal, but looks like a value;"
                " write true or false, and put quotes around a text, also in a list, dict or tuple"
            ) from err
        return text
