"""Registries: what a configuration chooses by name."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate
from torch import nn

from hooktrain.utils.names import call, did_you_mean, locate

logger = logging.getLogger(__name__)


class Registry:
    """A table from names to objects, for what a config chooses by name.

    Iterating gives ``(name, object)`` pairs; ``in`` and ``len`` are about the names.

    Example::

        BACKBONES = Registry("backbone")

        @BACKBONES.register()
        class MyBackbone: ...

        BACKBONES.get("MyBackbone")
        BACKBONES.build({"type": "MyBackbone", "depth": 50})

    Args:
        name: What the registry holds, for error messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._objects: dict[str, Any] = {}

    def register(
        self,
        obj: Any = None,
        *,
        name: str | Sequence[str] | None = None,
        force: bool = False,
    ) -> Any:
        """Register an object, or return a decorator that does.

        Args:
            obj: The object; without one, a decorator is returned.
            name: The name to register under, or several; by default the object's ``__name__``.
            force: Replace what is registered under that name.

        Returns:
            The object, or the decorator.

        Raises:
            ValueError: If a name is taken and ``force`` is not set. Nothing was registered.
            AttributeError: If it has no ``__name__`` and none is given.
        """
        if obj is None:
            return lambda decorated: self.register(decorated, name=name, force=force)
        keys = [name] if isinstance(name, str) else name or [obj.__name__]
        for key in keys:
            if key in self and not force:
                raise ValueError(
                    f"the registry {self.name!r} already has {self._objects[key]!r} under the name"
                    f" {key!r}; to put {obj!r} in its place, give force=True"
                )
        self._objects |= dict.fromkeys(keys, obj)
        return obj

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: Any = None,
    ) -> Any:
        """:meth:`register` with MMEngine's name and arguments: a decorator, or given a module.

        Example::

            @MODELS.register_module(name=["Net", "net"])
            class Net(nn.Module): ...

            MODELS.register_module(module=torchvision.models.resnet18)
        """
        if callable(name):  # without parentheses
            raise TypeError(f"write @REGISTRY.register_module() above {name!r}")
        return self.register(module, name=name, force=force)

    def get(self, name: str) -> Any:
        """The object registered under ``name``.

        Raises:
            KeyError: If there is none; the message suggests the nearest name.
        """
        if name not in self:
            hint = did_you_mean(name, self._objects)
            raise KeyError(
                f"no object named {name!r} in the registry {self.name!r}{hint}"
            )
        return self._objects[name]

    def find(self, kind: Any) -> Any:
        """What the ``type`` of a configuration means.

        Args:
            kind: A registered name, the dotted name of something to import, or the class or
                function itself. ``"mmengine.SGD"`` is what is registered as ``"SGD"``, if it cannot
                be imported.

        Raises:
            KeyError: If no such name is registered; the message suggests the nearest.
            ImportError: If there is nothing with such a dotted name.
        """
        if not isinstance(kind, str):
            return kind
        if "." not in kind or kind in self:
            return self.get(kind)
        try:
            return locate(kind)
        except ImportError:
            name = kind.partition(".")[
                2
            ]  # after a scope: MMEngine's registries have them
            if name not in self:
                raise
            return self.get(name)

    def build(self, cfg: Mapping[str, Any], /, **defaults: Any) -> Any:
        """Call ``cfg["type"]`` with the other items of ``cfg``.

        Args:
            cfg: ``type``, see :meth:`find`, and keyword arguments. It is not changed.
            defaults: Keyword arguments that ``cfg`` may replace, ``type`` among them.

        Raises:
            KeyError: If there is no ``type``, or it is not registered.
            Exception: What the constructor raises, with a note that has its name and the keys.
        """
        arguments = {**defaults, **cfg}
        if "type" not in arguments:
            raise KeyError(
                f"a config for the registry {self.name!r} needs 'type', got {cfg!r}"
            )
        target = self.find(arguments.pop("type"))
        where = f"of the registry {self.name!r} with the keys {list(arguments)}"
        return call(target, (), arguments, where)

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._objects.items())

    def __len__(self) -> int:
        return len(self._objects)

    def __repr__(self) -> str:
        table = tabulate(
            self._objects.items(), headers=["Name", "Object"], tablefmt="fancy_grid"
        )
        return f"Registry of {self.name}:\n{table}"


# What a configuration may choose by ``type``. Each part of the package registers what it has when
# it is imported; add your own with ``@MODELS.register_module()``.
HOOKS = Registry("hooks")
MODELS = Registry("models")
MODEL_WRAPPERS = Registry("model wrappers")
OPTIMIZERS = Registry("optimizers")
OPTIM_WRAPPERS = Registry("optimizer wrappers")
OPTIM_WRAPPER_CONSTRUCTORS = Registry("constructors of optimizer wrappers")
PARAM_SCHEDULERS = Registry("parameter schedulers")
STRATEGIES = Registry("strategies")

MODEL_WRAPPERS.register(nn.DataParallel)
MODEL_WRAPPERS.register(nn.parallel.DistributedDataParallel)
