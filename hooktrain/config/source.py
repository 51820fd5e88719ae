"""A config as Python source: to save it, and, in a shorter form, to read it in a log."""

import keyword
import logging
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from hooktrain.config.config_dict import ConfigDict
from hooktrain.utils.names import importable_name

_WIDTH = 100
_LITERALS = (str, bytes, int, bool, float, type(None))

logger = logging.getLogger(__name__)


def config_source(cfg: ConfigDict) -> str:
    """A Python file that `LazyConfig.load` reads as a config equal to ``cfg``.

    A value that has no source is replaced by a call that fails, with a warning that names its key.

    Raises:
        ValueError: If a top-level key cannot be the name of a variable.
    """
    source = _Source(taken=cfg)
    for key in cfg:
        if not _is_name(key) or key.startswith("__"):
            raise ValueError(f"a top-level key must be a name to be saved, got {key!r}")
    statements = [f"{key} = {source.value(value, key)}\n" for key, value in cfg.items()]
    # Without __all__, a file's config is its public dicts and lists.
    if any(k.startswith("_") or not isinstance(v, dict | list) for k, v in cfg.items()):
        statements.insert(0, f"__all__ = {list(cfg)!r}\n")
    return "\n".join(["# Written by LazyConfig.save", source.imports(), *statements])


def config_outline(cfg: ConfigDict, prefix: str) -> Iterator[str]:
    """A config as readable lines ``<prefix>train.max_iter = 100``, for people only."""
    for key, value in cfg.items():
        nested = (
            type(value) is ConfigDict and len(value) > 0 and "_target_" not in value
        )
        if nested and all(map(_is_name, value)):
            yield from config_outline(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {_Source(cfg, for_people=True).value(value, str(key))}\n"


def _is_name(key: Any) -> bool:
    # Python reads a name that is not ASCII as its normal form, which may be another string.
    ascii_name = isinstance(key, str) and key.isascii() and key.isidentifier()
    return ascii_name and not keyword.iskeyword(key)


class _Source:
    """Writes values as expressions, and collects the imports that they need.

    Args:
        taken: Names that imports must not take, because the file assigns them.
        for_people: Write full names instead of imports, calls as if they were made, and some form
            of every value.
    """

    def __init__(self, taken: Iterable[str], for_people: bool = False) -> None:
        self._for_people = for_people
        # The module and the name in it that each name in the file stands for, if it is imported.
        self._names: dict[str, tuple[str, str] | None] = dict.fromkeys(taken)

    def imports(self) -> str:
        """The import statements."""
        imported = sorted(
            (origin, local) for local, origin in self._names.items() if origin
        )
        return "".join(
            f"from {module} import {name}{'' if local == name else f' as {local}'}\n"
            for (module, name), local in imported
        )

    def value(self, value: Any, path: str, indent: int = 0) -> str:
        """The expression for one value, whose lines after the first are indented."""
        if isinstance(value, np.generic) and type(value.item()) in _LITERALS:
            value = value.item()
        if type(value) in (dict, ConfigDict):
            return self._dict(value, path, indent)
        if type(value) is list:
            return _brackets("[", self._items(value, path, indent), "]", indent)
        if type(value) is tuple:
            items = self._items(value, path, indent)
            return _brackets("(", items, ",)" if len(items) == 1 else ")", indent)
        if type(value) is float and not math.isfinite(value):
            return f"float({str(value)!r})"
        if type(value) is partial:
            lines = self._items((value.func, *value.args), path, indent)
            if value.keywords:
                lines.append(f"**{self.value(value.keywords, path, indent + 4)}")
            return _brackets(f"{self._name(partial, path)}(", lines, ")", indent)
        if isinstance(value, range | PurePath | torch.device):
            kind = type(value)  # the repr is a call of it
            return self._name(kind, path) + repr(value).removeprefix(kind.__name__)
        return repr(value) if type(value) in _LITERALS else self._name(value, path)

    def _items(self, items: Iterable[Any], path: str, indent: int) -> list[str]:
        return [self.value(v, f"{path}.{i}", indent + 4) for i, v in enumerate(items)]

    def _dict(self, value: dict[Any, Any], path: str, indent: int) -> str:
        args = value.get("_args_", ())
        is_call = "_target_" in value and (args or "_args_" not in value)
        is_call = is_call and all(map(_is_name, value))
        items = {
            k: self.value(v, f"{path}.{k}", indent + 4)
            for k, v in value.items()
            if k != "_args_" or not is_call
        }
        if not is_call:
            lines = [f"{self.value(k, path)}: {v}" for k, v in items.items()]
            return _brackets("{", lines, "}", indent)
        target = items.pop("_target_")
        if not self._for_people:
            target = f"{self._local('hooktrain.config', 'LazyCall')}({target})"
        elif isinstance(value["_target_"], str):
            target = value["_target_"]
        lines = self._items(args, f"{path}._args_", indent)
        lines += [f"{k}={v}" for k, v in items.items()]
        return _brackets(f"{target}(", lines, ")", indent)

    def _name(self, value: Any, path: str) -> str:
        """The expression for a class or function."""
        try:
            module, name = importable_name(value)
        except ValueError as err:
            if not self._for_people:
                logger.warning("The saved config lacks %s: %s", path, err)
                # Fails when it is made, and then says what is missing.
                return self.value({"_target_": f"NOT SAVED: {value!r:.80}"}, path)
            text = repr(value)
            return text if "\n" not in text else f"<{type(value).__name__}>"
        if self._for_people:
            return f"{module}.{name}"
        outer, dot, inner = name.partition(".")
        return self._local(module, outer) + dot + inner

    def _local(self, module: str, name: str) -> str:
        """Import a name; gives the name that it has in the file."""
        local = name
        while self._names.get(local, (module, name)) != (module, name):
            local += "_"
        self._names[local] = module, name
        return local


def _brackets(opening: str, items: list[str], closing: str, indent: int) -> str:
    """Items in brackets: on one line if they fit, otherwise a line for each."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    pad = " " * indent
    inner = "".join(f"{pad}    {item},\n" for item in items)
    return f"{opening}\n{inner}{pad}{closing[-1]}"
