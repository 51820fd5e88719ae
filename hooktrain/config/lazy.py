"""Configs written in Python: `LazyCall` describes a call, `LazyConfig` loads and saves files."""

import builtins
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hooktrain.config.config_dict import ConfigDict
from hooktrain.config.overrides import apply_overrides
from hooktrain.config.source import config_outline, config_source
from hooktrain.utils.file_io import atomic_write
from hooktrain.utils.registry import did_you_mean


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
        is_config = isinstance(target, Mapping) and "_target_" in target
        if not (callable(target) or isinstance(target, str) or is_config):
            raise TypeError(
                "the target of a LazyCall must be a callable, its dotted name or another LazyCall's"
                f" config, got {target!r}"
            )
        self._target = target

    def __call__(self, /, *args: Any, **kwargs: Any) -> ConfigDict:
        """The config of a call with these arguments."""
        for key in ("_target_", "_args_"):
            if key in kwargs:
                raise TypeError(
                    f"{key!r} is what LazyCall itself writes, so it cannot be an argument"
                )
        positional = {"_args_": list(args)} if args else {}
        return ConfigDict({"_target_": self._target, **positional, **kwargs})


class LazyConfig:
    """Loads, overrides, saves and shows configs that are Python files."""

    @staticmethod
    def load(filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None) -> Any:
        """Run a Python file and give the config that it defines.

        The file runs in a namespace of its own at each load. In it, relative imports
        (``from .common.train import train``) mean files beside it and need no ``__init__.py``;
        these, too, are run anew for each import, and their dicts arrive as ConfigDicts, so that the
        file may change what it imports. Absolute imports are Python's own.

        Args:
            filename: A ``.py`` file.
            keys: The name, or names, of the wanted globals of the file.

        Returns:
            Without ``keys``, a ConfigDict of the public global dicts and lists of the file, or of
            the names in its ``__all__``, if it has one. With ``keys``, that object or the tuple of
            them; references in them still resolve in the whole config.

        Raises:
            ValueError: If the file is no ``.py`` file.
            FileNotFoundError: If there is no such file.
            ImportError: If a relative import names a file that does not exist.
            KeyError: If there is no global of that name.
        """
        path = Path(os.path.abspath(filename))
        if path.suffix != ".py":
            raise ValueError(f"a config must be a .py file, got {str(filename)!r}")
        if not path.is_file():
            raise FileNotFoundError(f"the config file {str(filename)!r} does not exist")
        names = vars(_run(path, ()))
        public = [
            n for n, v in names.items() if not n.startswith("_") and isinstance(v, dict | list)
        ]
        cfg = ConfigDict({n: _pick(names, n, path) for n in names.get("__all__", public)})
        if keys is None:
            return cfg
        wanted = (keys,) if isinstance(keys, str) else keys
        found = tuple(_pick(cfg if key in cfg else names, key, path) for key in wanted)
        return found[0] if isinstance(keys, str) else found

    @staticmethod
    def load_rel(filename: str, keys: str | Sequence[str] | None = None) -> Any:
        """`load` of a path that is relative to the file of the calling code."""
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        caller = frame.f_back.f_code.co_filename
        if not os.path.isfile(caller):
            raise ValueError(f"load_rel must be called from a file, not from {caller!r}")
        return LazyConfig.load(Path(caller).parent / filename, keys)

    @staticmethod
    def save(cfg: ConfigDict, filename: str | os.PathLike[str]) -> None:
        """Write a config to one Python file, from which `load` gives an equal config.

        References are kept as they are, classes and functions are imported by name. The file
        appears only when it is complete.

        Raises:
            TypeError: If a value cannot be saved, such as a lambda, tensor or open file; the
                message names its key, and nothing is written.
            ValueError: If the file is no ``.py`` file.
        """
        path = Path(filename)
        if path.suffix != ".py":
            raise ValueError(f"a config is saved to a .py file, got {str(filename)!r}")
        source = config_source(_checked(cfg))
        with atomic_write(path, "w") as file:
            file.write(source)

    @staticmethod
    def to_py(cfg: ConfigDict, prefix: str = "cfg.") -> str:
        """A config as short lines that look like Python, for a log.

        Calls are written as if they were made. Unlike what `save` writes, it need not be loadable.
        """
        return config_outline(_checked(cfg), prefix)

    apply_overrides = staticmethod(apply_overrides)


def _checked(cfg: ConfigDict) -> ConfigDict:
    if not isinstance(cfg, ConfigDict):
        raise TypeError(f"cfg must be a ConfigDict, got {type(cfg).__name__}")
    return cfg


def _pick(names: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in names:
        public = [n for n in names if not n.startswith("_")]
        raise KeyError(f"the config file {str(path)!r} has no {name!r}{did_you_mean(name, public)}")
    return names[name]


def _run(path: Path, above: tuple[Path, ...]) -> ModuleType:
    """Run a config file as a module that nobody else sees; ``above`` are those importing it."""
    if path in above:
        files = " -> ".join(map(str, (*above, path)))
        raise ImportError(f"config files import each other in a circle: {files}")

    def import_(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0:
            return builtins.__import__(name, globals, locals, fromlist or (), 0)
        return _import_relative(path, name, fromlist or (), level, (*above, path))

    module = ModuleType(f"config:{path}")
    names = vars(module)
    # The file's own copy of the builtins: only this file sees the other __import__.
    names.update(__file__=str(path), __builtins__={**vars(builtins), "__import__": import_})
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    sys.modules[module.__name__] = module  # dataclasses look there while their class is made
    try:
        exec(code, names)
    finally:
        del sys.modules[module.__name__]
    for name, value in list(names.items()):
        if type(value) is dict and not name.startswith("__"):
            names[name] = ConfigDict(value)
    return module


def _import_relative(
    importer: Path, name: str, fromlist: Sequence[str], level: int, above: tuple[Path, ...]
) -> ModuleType:
    """What ``from <dots><name> import <fromlist>`` gives in the config file ``importer``."""
    statement = f"from {'.' * level}{name} import {', '.join(fromlist)}"
    folder = Path(*importer.parts[:-level])
    target = folder.joinpath(*name.split("."))
    file = target.with_name(f"{target.name}.py")
    if name and file.is_file():
        return _run(file, above)
    if not target.is_dir():
        raise ImportError(f"relative import {statement!r} in {importer}: {file} does not exist")
    # A folder: what is imported from it are its files.
    module = ModuleType(f"config:{target}")
    for item in fromlist:
        file = target / f"{item}.py"
        if not file.is_file():
            raise ImportError(f"relative import {statement!r} in {importer}: {file} does not exist")
        setattr(module, item, _run(file, above))
    return module
