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
from hooktrain.config.plain_data import dotted_lines, to_data
from hooktrain.utils.names import did_you_mean
from hooktrain.utils.periods import PERIOD

# Words of command lines and of JSON that literal_eval does not parse.
_WORDS = {"true": True, "false": False, "none": None, "null": None, "": ""}


def apply_overrides(cfg: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Change a config in place by a list of overrides, and resolve its references again.

    - ``a.b=3`` sets an existing key. The value is everything after the first ``=``: a Python
      literal (number, quoted text, list, tuple, dict), one of true, false, none, null in any case,
      or else a string. It replaces the old value; dicts are not merged. A string that replaces
      anything but a string or None needs quotes, except periods such as ``1 epoch`` or
      ``10 minutes``.
    - ``+a.b=3`` sets a key that need not exist, and adds the missing dicts on its path.
    - ``a.items.0=3`` changes a list item; ``a='${b.c}'`` sets a reference.

    Args:
        cfg: a whole config; it is changed.
        overrides: the overrides, applied in turn.

    Returns:
        ``cfg`` itself.

    Raises:
        KeyError: if a key does not exist. The message quotes the override and suggests the nearest
            key.
        ValueError: if an override has no ``=`` or an empty key, if a string needs quotes, or if a
            reference names no key.
    """
    restore_references(cfg)
    for override in overrides:
        _apply(cfg, override)
    return resolve(cfg)


def _apply(cfg: ConfigDict, override: str) -> None:
    path, equals, text = override.removeprefix("+").partition("=")
    parts = path.split(".")
    if not all(parts) or not equals:
        raise ValueError(
            "an override is 'key=value' or '+key=value', with a key like "
            f"'train.max_iter', not {override!r} (--resume takes no path, it resumes from "
            "train.output_dir; to load only weights, use train.init_checkpoint=PATH)"
        )
    node: Any = cfg
    *above, last = parts
    for part in above:
        key = _find(cfg, node, part, override)
        if isinstance(node, dict):
            node.setdefault(key, {})
        node = node[key]
    key = _find(cfg, node, last, override)
    value = parse_value(text)
    if value == text and key in known_keys(node):
        _check_text(text, node[key], override)
    node[key] = to_config(value)


def _find(cfg: ConfigDict, node: Any, part: str, override: str) -> Any:
    """The key that a part of a path means in a dict or list. With +, it may be a new key."""
    container = None if isinstance(node, tuple) else node
    found = find_key(container, part)
    if found is not None:
        return found
    if override.startswith("+") and isinstance(node, dict):
        return part
    # Longer paths come first: dataloader.train.total_batch_size ends in batch_size.
    lines = dotted_lines(to_data(cfg), "")
    paths = [line.partition(" = ")[0] for line in lines]
    elsewhere = [path for path in paths if path.endswith(part)]
    hint = did_you_mean(part, elsewhere or known_keys(container))
    # A new key in a call is an argument, and a new key at the top may be hooks or writers. In any
    # other dict it would have no effect.
    if container is cfg or "_target_" in known_keys(container):
        hint += " (a + before the key adds it)"
    raise KeyError(f"the override {override!r}: the config has no {part!r}{hint}")


def parse_value(text: str) -> Any:
    """The value of the text after the ``=`` of an override."""
    word = text.strip()
    lowered = word.lower()
    if lowered in _WORDS:
        return _WORDS[lowered]
    try:
        # In parentheses, so that "7#x" is not read as 7 with a comment.
        return ast.literal_eval(f"({word})")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _check_text(text: str, old: Any, override: str) -> None:
    """Refuse an unquoted string, probably a typo, that replaces another kind of value."""
    if "${" in text or PERIOD.fullmatch(text):
        return
    if isinstance(old, int | float | list | tuple | dict):
        raise ValueError(
            f"the override {override!r} replaces {old!r:.60} by a string: use a value of the "
            "same kind, or a period such as '1 epoch', or put quotes around the string. To change "
            "the class of a call, override its _target_: optimizer._target_=torch.optim.Adam"
        )
