"""A config as Python source: to save it, and, in a shorter form, to read it in a log."""

import keyword
import math
from collections.abc import Iterable
from typing import Any

from hooktrain.config.config_dict import ConfigDict, ConfigList
from hooktrain.config.references import raw_items
from hooktrain.utils.registry import dotted_name, importable_name

_WIDTH = 100
_LITERALS = (str, bytes, int, bool, float, type(None))


def config_source(cfg: ConfigDict) -> str:
    """A Python file that `LazyConfig.load` reads as a config equal to ``cfg``.

    Raises:
        TypeError: If a value has no source, such as a lambda, tensor or open file; the message
            names its key.
        ValueError: If a top-level key begins with two underscores.
    """
    source = _Source(taken=map(str, cfg))
    statements = []
    for key, value in raw_items(cfg):
        if not isinstance(key, str):
            raise TypeError(f"a top-level key must be a string to be saved, got {key!r}")
        if key.startswith("__"):
            raise ValueError(f"the top-level key {key!r} means something else to Python")
        name = key if _is_name(key) else f"{source.local('builtins', 'globals')}()[{key!r}]"
        statements.append(f"{name} = {source.value(value, key)}\n")
    # Without __all__, a file's config is its public dicts and lists.
    containers = all(isinstance(v, ConfigDict | ConfigList) for _, v in raw_items(cfg))
    if not containers or any(key.startswith("_") for key in cfg):
        statements.insert(0, f"__all__ = {source.value(ConfigList(dict.keys(cfg)), '__all__')}\n")
    return "\n".join(["# Written by LazyConfig.save", source.imports(), *statements])


def config_outline(cfg: ConfigDict, prefix: str) -> str:
    """A config as readable lines ``<prefix>train.max_iter = 100``, for people only."""
    outline = _Outline(taken=())
    return "".join(outline.lines(cfg, prefix))


def _is_name(key: Any) -> bool:
    # Python reads a name that is not ASCII as its normal form, which may be another string.
    ascii_name = isinstance(key, str) and key.isascii() and key.isidentifier()
    return ascii_name and not keyword.iskeyword(key)


def _is_call(raw: dict[Any, Any]) -> bool:
    """Whether a call can stand for a dict: whether it has a target and arguments with names."""
    target, args = raw.get("_target_"), raw.get("_args_")
    return (
        (callable(target) or isinstance(target, str | ConfigDict))
        and ("_args_" not in raw or (isinstance(args, ConfigList) and len(args) > 0))
        and all(map(_is_name, raw))
    )


class _Source:
    """Writes values as expressions, and collects the imports that they need.

    Args:
        taken: Names that imports must not take, because the file assigns them.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._imports: dict[tuple[str, str], str] = {}

    def local(self, module: str, name: str) -> str:
        """Import a name, and give the name that it has in the file."""
        if (module, name) not in self._imports:
            free = name
            while free in self._taken:
                free += "_"
            self._taken.add(free)
            self._imports[module, name] = free
        return self._imports[module, name]

    def imports(self) -> str:
        """The import statements."""
        lines = []
        for (module, name), local in sorted(self._imports.items()):
            lines.append(f"from {module} import {name}{'' if local == name else f' as {local}'}\n")
        return "".join(lines)

    def value(self, value: Any, path: str, indent: int = 0) -> str:
        """The expression for one value, whose lines after the first are indented."""
        if isinstance(value, ConfigDict):
            return self._dict(dict(raw_items(value)), path, indent)
        if isinstance(value, ConfigList):
            return _brackets("[", self._items(value, path, indent), "]", indent)
        if type(value) is tuple:
            items = self._items(value, path, indent)
            return _brackets("(", items, ",)" if len(items) == 1 else ")", indent)
        if type(value) is float and not math.isfinite(value):
            sign = "-" if value < 0 else ""
            return sign + self.local("math", "nan" if math.isnan(value) else "inf")
        return repr(value) if type(value) in _LITERALS else self.name(value, path)

    def name(self, value: Any, path: str) -> str:
        """The expression for a class or function."""
        try:
            module, name = importable_name(value)
        except ValueError as err:
            raise TypeError(f"{path} cannot be saved: {err}") from err
        outer, dot, inner = name.partition(".")
        return self.local(module, outer) + dot + inner

    def opening(self, target: Any, path: str, indent: int) -> str:
        """What stands before the arguments of a call."""
        call = self.local("hooktrain.config", "LazyCall")
        return f"{call}({self.value(target, f'{path}._target_', indent)})("

    def _dict(self, raw: dict[Any, Any], path: str, indent: int) -> str:
        if not _is_call(raw):
            items = [
                f"{self.value(k, path)}: {self.value(v, f'{path}.{k}', indent + 4)}"
                for k, v in raw.items()
            ]
            return _brackets("{", items, "}", indent)
        opening = self.opening(raw.pop("_target_"), path, indent)
        args = self._items(raw.pop("_args_", ()), f"{path}._args_", indent)
        args += [f"{k}={self.value(v, f'{path}.{k}', indent + 4)}" for k, v in raw.items()]
        return _brackets(opening, args, ")", indent)

    def _items(self, items: Any, path: str, indent: int) -> list[str]:
        raw = raw_items(items) if isinstance(items, ConfigList) else enumerate(items)
        return [self.value(v, f"{path}.{i}", indent + 4) for i, v in raw]


class _Outline(_Source):
    """The same for people: full names instead of imports, and every value has some form."""

    def name(self, value: Any, path: str) -> str:
        try:
            return dotted_name(value)
        except ValueError:
            text = repr(value)
            return text if "\n" not in text else f"<{type(value).__name__}>"

    def opening(self, target: Any, path: str, indent: int) -> str:
        name = target if isinstance(target, str) else self.value(target, path, indent)
        return f"{name}("

    def local(self, module: str, name: str) -> str:
        return name

    def lines(self, cfg: ConfigDict, prefix: str) -> Iterable[str]:
        for key, value in raw_items(cfg):
            inner = isinstance(value, ConfigDict) and len(value) > 0 and "_target_" not in value
            if inner and all(map(_is_name, value)):
                yield from self.lines(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key} = {self.value(value, str(key))}\n"


def _brackets(opening: str, items: list[str], closing: str, indent: int) -> str:
    """Items in brackets: on one line if they fit, otherwise a line for each."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    pad = " " * indent
    inner = "".join(f"{pad}    {item},\n" for item in items)
    return f"{opening}\n{inner}{pad}{closing[-1]}"
