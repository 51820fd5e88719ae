"""Configs written in Python: `LazyCall` describes a call, `instantiate` makes it.

`LazyConfig` loads and saves them.
"""

import builtins
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hooktrain.config.config_dict import (
    ConfigDict,
    dotted,
    resolve,
    restore_references,
    to_config,
)
from hooktrain.config.overrides import apply_overrides
from hooktrain.config.source import config_outline, config_source
from hooktrain.utils.file_io import atomic_write
from hooktrain.utils.names import call, did_you_mean


class LazyCall:
    """Writes a call down as a config, to be made by `instantiate`.

    Example::

        layer = LazyCall(torch.nn.Linear)(8, out_features=4)
        layer.out_features = 2
        instantiate(layer)  # torch.nn.Linear(8, out_features=2)

    Args:
        target: What to call: a callable, its dotted name, or a config that gives a callable.

    Raises:
        TypeError: If the target is none of these.
    """

    def __init__(self, target: Callable[..., Any] | str | Mapping[str, Any]) -> None:
        if not (callable(target) or isinstance(target, str | Mapping)):
            raise TypeError(
                f"LazyCall needs a callable, its name or a config, got {target!r}"
            )
        self._target = target

    def __call__(self, /, *args: Any, **kwargs: Any) -> ConfigDict:
        """The config of a call with these arguments."""
        positional = {"_args_": list(args)} if args else {}
        return ConfigDict(_target_=self._target, **positional, **kwargs)


def instantiate(cfg: Any) -> Any:
    """Build what a config describes, its children first.

    A dict with the key ``_target_`` (a callable, its dotted name, or a config that gives a
    callable) is replaced by what the target returns, called with the list ``_args_`` and with the
    other items as keyword arguments; `LazyCall` writes such dicts. Other dicts, lists and tuples
    come back as plain ones with their contents built; everything else comes back as it is.

    Args:
        cfg: A config whose references are resolved, a part of one, or anything else.

    Raises:
        Exception: What a target raises, with a note about the path and the target; for an unknown
            argument the note suggests the nearest parameter. (Python 3.10 has no notes; there it
            is logged.)
    """
    return _built(cfg, ())


def _built(value: Any, path: tuple[Any, ...]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_built(v, (*path, i)) for i, v in enumerate(value))
    if type(value) not in (dict, ConfigDict):
        return value
    kwargs = {k: _built(v, (*path, k)) for k, v in value.items()}
    if "_target_" not in kwargs:
        return kwargs
    target, args = kwargs.pop("_target_"), kwargs.pop("_args_", ())
    return call(target, args, kwargs, f"({dotted(path) or 'the config'})")


class LazyConfig:
    """Loads, overrides, saves and shows configs that are Python files."""

    apply_overrides = staticmethod(apply_overrides)

    @staticmethod
    def load(
        filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None
    ) -> Any:
        """Run a Python file and give the config that it defines.

        In the file, relative imports (``from .common.train import train``) mean files beside it
        and need no ``__init__.py``. Each import runs them again, and their dicts arrive as
        ConfigDicts, so the file may change what it imports. Absolute imports are Python's own.

        Args:
            filename: A ``.py`` file.
            keys: The name, or names, of the wanted globals of the file.

        Returns:
            Without ``keys``, a ConfigDict of the public global dicts and lists of the file, or of
            the names in its ``__all__``, if it has one. With ``keys``, that object or the tuple of
            them. References are resolved in the whole config.

        Raises:
            ValueError: If the file is no ``.py`` file, or a reference names nothing.
            FileNotFoundError: If there is no such file, or none that a relative import names.
            ImportError: If files import each other in a circle.
            KeyError: If there is no global of that name.
        """
        path = _python_file(filename)
        names = vars(_run(path))
        public = [
            n for n, v in names.items() if n[:1] != "_" and isinstance(v, dict | list)
        ]
        cfg = ConfigDict(
            {n: _pick(names, n, path) for n in names.get("__all__", public)}
        )
        names |= resolve(cfg)
        if keys is None:
            return cfg
        if isinstance(keys, str):
            return _pick(names, keys, path)
        return tuple(_pick(names, key, path) for key in keys)

    @staticmethod
    def load_rel(filename: str, keys: str | Sequence[str] | None = None) -> Any:
        """`load` of a path that is relative to the file of the calling code."""
        caller = Path(sys._getframe(1).f_code.co_filename)
        return LazyConfig.load(caller.parent / filename, keys)

    @staticmethod
    def save(cfg: ConfigDict, filename: str | os.PathLike[str]) -> None:
        """Write a config to one Python file, from which `load` gives an equal config.

        References are kept as they were written, classes and functions are imported by name. The
        file appears only when it is complete.

        A value that cannot be saved, such as a lambda, a tensor or a function of the config file
        itself, is a warning that names its key. In the file stands a call in its place, which
        `instantiate` refuses to make.

        Raises:
            ValueError: If the file is no ``.py`` file.
        """
        path = _python_file(filename)
        with atomic_write(path) as file:
            file.write(LazyConfig.source(cfg).encode())

    @staticmethod
    def source(cfg: ConfigDict) -> str:
        """The text of the file that `save` writes."""
        return config_source(restore_references(cfg.copy()))

    @staticmethod
    def to_py(cfg: ConfigDict, prefix: str = "cfg.") -> str:
        """A config as short lines that look like Python, for a log.

        Calls are written as if they were made. Unlike what `save` writes, it need not be loadable.
        """
        return "".join(config_outline(cfg, prefix))


def _python_file(filename: str | os.PathLike[str]) -> Path:
    path = Path(os.path.abspath(filename))
    if path.suffix != ".py":
        raise ValueError(f"a config must be a .py file, got {str(filename)!r}")
    return path


def _pick(names: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in names:
        public = [n for n in names if not n.startswith("_")]
        raise KeyError(
            f"the config file {str(path)!r} has no {name!r}{did_you_mean(name, public)}"
        )
    return names[name]


def _run(path: Path) -> ModuleType:
    """Run a config file as a module that nobody else sees."""

    def import_(name: str, *args: Any, **kwargs: Any) -> Any:
        # An import statement gives globals, locals, the list of names and the level.
        if len(args) == 4 and args[3] > 0:
            return _import_relative(path, name, args[2] or (), args[3])
        return builtins.__import__(name, *args, **kwargs)

    module = ModuleType(f"config:{path}")
    if module.__name__ in sys.modules:
        raise ImportError(
            f"config files import each other in a circle, {path} among them"
        )
    names = vars(module)
    # The file's own copy of the builtins: only this file sees the other __import__.
    names.update(
        __file__=str(path), __builtins__={**vars(builtins), "__import__": import_}
    )
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    sys.modules[module.__name__] = (
        module  # dataclasses look there while their class is made
    )
    try:
        exec(code, names)
    finally:
        del sys.modules[module.__name__]
    names |= {
        n: to_config(value) for n, value in names.items() if not n.startswith("__")
    }
    return module


def _import_relative(
    importer: Path, name: str, fromlist: Sequence[str], level: int
) -> Any:
    """What ``from <dots><name> import <fromlist>`` gives in the config file ``importer``."""
    target = Path(*importer.parts[:-level]).joinpath(*name.split("."))
    file = target.with_name(f"{target.name}.py")
    if name and (file.is_file() or not target.is_dir()):
        return _run(file)
    # A folder, from which files are imported.
    return SimpleNamespace(**{item: _run(target / f"{item}.py") for item in fromlist})
