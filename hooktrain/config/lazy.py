"""Configs in Python: a :class:`LazyCall` describes a call, and :func:`instantiate` executes it.

:class:`LazyConfig` loads configs, and saves them as JSON.
"""

import builtins
import json
import logging
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hooktrain.config.config_dict import (
    ConfigDict,
    from_omegaconf,
    resolve,
    restore_references,
)
from hooktrain.config.overrides import apply_overrides
from hooktrain.config.plain_data import NOT_SAVED, dotted_lines, to_data
from hooktrain.utils.file_io import AnyPath, atomic_write
from hooktrain.utils.names import Keys, call, dotted

logger = logging.getLogger(__name__)

_OF_THE_SCRIPT = (
    "The saved config has %s, which is defined in this script: import it from a module, so that "
    "other programs find it"
)

# The config files that are running, each loaded by the one before it.
_running: list[Path] = []


class LazyCall:
    """Describes a call as a config, which :func:`instantiate` executes.

    Example::

        layer = LazyCall(torch.nn.Linear)(8, out_features=4)
        layer.out_features = 2
        instantiate(layer)  # torch.nn.Linear(8, out_features=2)

    Args:
        target: a callable, its dotted name, or a config of one.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, /, *args: Any, **kwargs: Any) -> ConfigDict:
        """The config of a call with these arguments."""
        positional = {"_args_": list(args)} if args else {}
        return ConfigDict(_target_=self._target, **positional, **kwargs)


def instantiate(cfg: Any) -> Any:
    """Build the objects that a config describes, children first.

    A dict with the key ``_target_`` (a callable, its dotted name, or a config that gives a
    callable) becomes the result of that call, with the list ``_args_`` as positional and the other
    items as keyword arguments; :class:`LazyCall` makes such dicts. Other dicts, lists and tuples
    become plain ones with built contents. Any other value is returned as it is.

    Args:
        cfg: a config whose references are resolved, a part of one, or any other value.

    Raises:
        Exception: the error of a target, with a note that names the target and its path.
    """
    return _built(from_omegaconf(cfg, resolve=True), ())


def _built(value: Any, path: Keys) -> Any:
    kind = type(value)
    if isinstance(value, LazyCall):
        raise TypeError(
            f"LazyCall({value._target!r}) is not called ({dotted(path) or 'the config'}): "
            "add the arguments in parentheses"
        )
    if kind in (list, tuple):
        return kind(_built(item, (*path, i)) for i, item in enumerate(value))
    if kind not in (dict, ConfigDict):
        return value
    kwargs = {key: _built(item, (*path, key)) for key, item in value.items()}
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
    def load(filename: AnyPath, keys: str | Sequence[str] | None = None) -> Any:
        """Load the config of a Python file, which is run, or of a file that :meth:`save` wrote.

        In a Python file, relative imports (``from .common.train import train``) load the files
        beside it, without any ``__init__.py``. Each import runs the file again and returns its
        dicts as ConfigDicts, so the importing file may change them. Absolute imports are Python's.

        Loading a saved file runs and imports nothing; only :func:`instantiate` does.

        Args:
            filename: a ``.py`` file, or a JSON file of any other name.
            keys: the name or names of the globals to return.

        Returns:
            Without ``keys``, a ConfigDict of the public global dicts and lists of the file. With
            ``keys``, that object or a tuple of these objects. References are resolved in the whole
            config after all files have run; a file that imports another sees its references.

        Raises:
            ValueError: if the file is neither Python nor JSON, or a reference names no key.
            FileNotFoundError: if the file, or the file of a relative import, does not exist. A
                relative import must name a file, not a folder.
            KeyError: if the file has no global of that name.
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
        """Save a config as JSON, from which :meth:`load` reads an equivalent config.

        References are saved as they were written, classes and functions by their dotted names,
        and tuples as lists. The file appears only when it is complete.

        If a value cannot be saved, such as a lambda, a tensor or a function of the config file
        itself, a warning names its key, and :func:`instantiate` refuses the saved value. A class or
        function of the running script causes a warning too, since another program would not find
        it, or find its own of the same name.

        Args:
            cfg: a whole config.
            filename: any name that does not end in ``.py``.

        Raises:
            ValueError: if the name ends in ``.py``.
        """
        if Path(filename).suffix == ".py":
            raise ValueError(
                "a config is saved as JSON: use a name such as 'config.json', not "
                f"{str(filename)!r}"
            )
        for line in LazyConfig.to_py(cfg, "").splitlines():
            if NOT_SAVED in line:
                logger.warning("The saved config lacks %s", line)
            elif "'__main__" in line:
                logger.warning(_OF_THE_SCRIPT, line)
        with atomic_write(filename) as file:
            # A path may have bytes that are no UTF-8, for which Python has surrogates.
            file.write(LazyConfig.to_json(cfg).encode("utf-8", "surrogatepass"))

    @staticmethod
    def to_json(cfg: ConfigDict) -> str:
        """The JSON text that :meth:`save` writes."""
        data = to_data(restore_references(cfg.copy()))
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def to_py(cfg: ConfigDict, prefix: str = "cfg.") -> str:
        """A config as lines such as ``cfg.train.max_iter = 100``, for a log."""
        return "".join(dotted_lines(to_data(cfg), prefix))


def _read_json(path: Path) -> ConfigDict:
    try:
        return ConfigDict(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is neither a .py file nor JSON written by LazyConfig.save: "
            f"{error}"
        ) from None


def _run(path: Path) -> ConfigDict:
    """Run a Python file whose relative imports load files beside it; return its globals."""

    def import_(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = None,
        level: int = 0,
    ) -> Any:
        if level == 0:
            return builtins.__import__(name, globals, locals, fromlist)
        # One dot is the folder of the importing file; each further dot is one folder up.
        folder = Path(*path.parts[:-level])
        below = name.replace(".", "/")
        names = _run(folder / f"{below}.py")
        return SimpleNamespace(**names)

    # The file gets its own copy of the builtins, so that no other file sees this __import__.
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
