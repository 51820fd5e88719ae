"""Configs written in Python: `LazyCall` describes a call, `instantiate` makes it.

`LazyConfig` loads them, and saves them as JSON.
"""

import builtins
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hooktrain.config.config_dict import (
    ConfigDict,
    from_omegaconf,
    logger,
    resolve,
    restore_references,
)
from hooktrain.config.overrides import apply_overrides
from hooktrain.config.plain_data import NOT_SAVED, dotted_lines, to_data
from hooktrain.utils.file_io import AnyPath, atomic_write
from hooktrain.utils.names import call, dotted

Keys = str | Sequence[str] | None

# The files that are running, each loaded by the one before it.
_running: list[Path] = []


class LazyCall:
    """Writes a call down as a config, to be made by `instantiate`.

    Example::

        layer = LazyCall(torch.nn.Linear)(8, out_features=4)
        layer.out_features = 2
        instantiate(layer)  # torch.nn.Linear(8, out_features=2)

    Args:
        target: What to call: a callable, its dotted name, or a config that gives a callable.
    """

    def __init__(self, target: Any) -> None:
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
            argument the note suggests the nearest parameter.
    """
    return _built(from_omegaconf(cfg, resolve=True), ())


def _built(value: Any, path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if isinstance(value, LazyCall):
        raise TypeError(
            f"LazyCall({value._target!r}) is not called ({dotted(path) or 'the config'}): "
            "its arguments follow in parentheses"
        )
    if kind in (list, tuple):
        items = []
        for index, item in enumerate(value):
            items.append(_built(item, (*path, index)))
        return kind(items)
    if kind not in (dict, ConfigDict):
        return value
    kwargs = {}
    for key, item in value.items():
        kwargs[key] = _built(item, (*path, key))
    if "_target_" not in kwargs:
        return kwargs
    target = kwargs.pop("_target_")
    args = kwargs.pop("_args_", ())
    where = dotted(path) or "the config"
    return call(target, args, kwargs, f"({where})")


class LazyConfig:
    """Loads, overrides, saves and shows configs."""

    apply_overrides = staticmethod(apply_overrides)

    @staticmethod
    def load(filename: AnyPath, keys: Keys = None) -> Any:
        """The config in a Python file, which is run, or in a file that `save` has written.

        In a Python file, relative imports (``from .common.train import train``) mean files beside
        it and need no ``__init__.py``. Each import runs them again, and their dicts arrive as
        ConfigDicts, so the file may change what it imports. Absolute imports are Python's own.

        Nothing in a saved file is run or imported before `instantiate`.

        Args:
            filename: A ``.py`` file, or any other with JSON.
            keys: The name, or names, of the wanted globals of the file.

        Returns:
            Without ``keys``, a ConfigDict of the public global dicts and lists of the file. With
            ``keys``, that object or the tuple of them. References are resolved in the whole
            config, when all files have run; what a file loads or imports has them as texts.

        Raises:
            ValueError: If the file is neither, or a reference names nothing.
            FileNotFoundError: If there is no such file, or none that a relative import names. It
                names a file, not a folder.
            KeyError: If there is no global of that name.
        """
        path = Path(filename).absolute()
        if path.suffix == ".py":
            names = _run(path)
            cfg = ConfigDict()
            for name, value in names.items():
                if name[0] != "_" and isinstance(value, dict | list):
                    cfg[name] = value
        else:
            names = cfg = _read_json(path)
        if not _running:
            resolve(cfg)
        dict.update(names, cfg)
        if keys is None:
            return cfg
        if isinstance(keys, str):
            return names[keys]
        return tuple(names[key] for key in keys)

    @staticmethod
    def save(cfg: ConfigDict, filename: AnyPath) -> None:
        """Write a config as JSON, which `load` reads, and which describes the same objects.

        References are kept as they were written. Classes and functions are saved by their dotted
        names, tuples as lists. The file appears only when it is complete.

        A value that cannot be saved, such as a lambda, a tensor or a function of the config file
        itself, is a warning that names its key. `instantiate` refuses to make it.

        Args:
            cfg: A whole config.
            filename: Any name but that of a Python file.

        Raises:
            ValueError: If the file is a ``.py`` file.
        """
        if Path(filename).suffix == ".py":
            hint = "a config is saved as JSON: give a name like 'config.json'"
            raise ValueError(f"{hint}, not {str(filename)!r}")
        for line in LazyConfig.to_py(cfg, "").splitlines():
            if NOT_SAVED in line:
                logger.warning("The saved config lacks %s", line)
        with atomic_write(filename) as file:
            file.write(LazyConfig.to_json(cfg).encode())

    @staticmethod
    def to_json(cfg: ConfigDict) -> str:
        """The text of the file that `save` writes."""
        written = restore_references(cfg.copy())
        data = to_data(written)
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def to_py(cfg: ConfigDict, prefix: str = "cfg.") -> str:
        """A config as lines such as ``cfg.train.max_iter = 100``, for a log."""
        data = to_data(cfg)
        return "".join(dotted_lines(data, prefix))


def _read_json(path: Path) -> ConfigDict:
    try:
        return ConfigDict(json.loads(path.read_bytes()))
    except ValueError as error:
        what = "neither a .py file nor JSON, as LazyConfig.save writes it"
        raise ValueError(f"{str(path)!r} is {what}: {error}") from None


def _run(path: Path) -> ConfigDict:
    """Run a Python file, in which relative imports mean files beside it."""

    def import_(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = None,
        level: int = 0,
    ) -> Any:
        if level == 0:
            return builtins.__import__(name, globals, locals, fromlist)
        # One dot is the folder of the importing file, and each further dot is one folder above.
        folder = Path(*path.parts[:-level])
        below = name.replace(".", "/")
        names = _run(folder / f"{below}.py")
        return SimpleNamespace(**names)

    # The file gets a copy of the builtins, so that no other file sees this __import__.
    own_builtins = {**vars(builtins), "__import__": import_}
    _running.append(path)
    try:
        names = runpy.run_path(
            str(path),
            init_globals={"__builtins__": own_builtins},
            run_name=f"config:{path}",
        )
    finally:
        _running.pop()
    del names["__builtins__"]
    return ConfigDict(names)
