"""A registry: objects by name, and building them from configurations.

What finds Python objects by their dotted names stands in ``names.py``; it can be imported from
here too, where detectron2 has it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from tabulate import tabulate

from hooktrain.utils.calling import call
from hooktrain.utils.names import did_you_mean, dotted_name, importable_name, locate

__all__ = ["Registry", "did_you_mean", "dotted_name", "importable_name", "locate"]

T = TypeVar("T")

# Tells register() from register(None), which is refused.
_NO_OBJECT = object()


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

    @overload
    def register(
        self, obj: T, *, name: str | Sequence[str] | None = None, force: bool = False
    ) -> T: ...

    @overload
    def register(
        self, *, name: str | Sequence[str] | None = None, force: bool = False
    ) -> Callable[[T], T]: ...

    def register(
        self,
        obj: Any = _NO_OBJECT,
        *,
        name: str | Sequence[str] | None = None,
        force: bool = False,
    ) -> Any:
        """Register an object, or, called without one, give a decorator that does.

        Args:
            obj: The object, if not used as a decorator.
            name: The name to register under, or several; by default the object's ``__name__``.
            force: Replace what is registered under that name, instead of refusing.

        Raises:
            ValueError: If a name is taken and ``force`` is not set; nothing was registered.
            TypeError: If the object is None, or has no ``__name__`` and none is given.
        """
        if obj is _NO_OBJECT:
            return lambda decorated: self.register(decorated, name=name, force=force)
        if obj is None:
            raise TypeError(f"None cannot be registered in the registry {self.name!r}")
        if name is None:
            name = getattr(obj, "__name__", None)
        keys = [name] if isinstance(name, str) else name
        if not isinstance(keys, Sequence) or not keys or not all(isinstance(k, str) for k in keys):
            raise TypeError(
                f"name must be a string or several, or None for an object with a __name__;"
                f" got {name!r} for {obj!r}"
            )
        for key in keys:
            if key in self._objects and not force:
                raise ValueError(
                    f"the registry {self.name!r} already has {self._objects[key]!r} under the name"
                    f" {key!r}; to put {obj!r} in its place, give force=True"
                )
        self._objects |= dict.fromkeys(keys, obj)
        return obj

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False
    ) -> Callable[[T], T]: ...

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, *, module: T
    ) -> T: ...

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: Any = _NO_OBJECT,
    ) -> Any:
        """:meth:`register` with MMEngine's name and arguments: a decorator, unless given a module.

        Example::

            @MODELS.register_module(name=["Net", "net"])
            class Net(nn.Module): ...

            MODELS.register_module(module=torchvision.models.resnet18)
        """
        if not isinstance(name, str | Sequence | None):
            raise TypeError(
                f"name must be a string or several, but got {name!r}; a decorator is written with "
                "parentheses, @REGISTRY.register_module()"
            )
        return self.register(module, name=name, force=force)

    def get(self, name: str) -> Any:
        """The object registered under ``name``.

        Raises:
            KeyError: If there is none; the message suggests the nearest name.
        """
        if name not in self._objects:
            hint = did_you_mean(name, self._objects)
            raise KeyError(f"no object named {name!r} in the registry {self.name!r}{hint}")
        return self._objects[name]

    def find(self, kind: Any) -> Callable[..., Any]:
        """What the ``type`` of a configuration stands for.

        Args:
            kind: A registered name, the dotted name of something to import, or the class or
                function itself.

        Raises:
            KeyError: If no such name is registered; the message suggests the nearest.
            ImportError: If a dotted name leads nowhere; the message suggests the nearest.
            TypeError: If it stands for something that cannot be called.
        """
        if isinstance(kind, str):
            found = locate(kind) if "." in kind and kind not in self else self.get(kind)
        else:
            found = kind
        if callable(found):
            return found  # type: ignore[no-any-return]
        raise TypeError(
            f"'type' for the registry {self.name!r} must be a registered name, a dotted name,"
            f" a class or a function, got {kind!r}"
        )

    def build(self, cfg: Mapping[str, Any], /, **defaults: Any) -> Any:
        """Call what ``cfg["type"]`` stands for with the other items of ``cfg``.

        Args:
            cfg: ``type``, see :meth:`find`, and keyword arguments. It is not changed.
            defaults: Keyword arguments that ``cfg`` may replace; also a default ``type``.

        Raises:
            TypeError: If ``cfg`` is not a dict, or if the arguments are not those that its
                ``type`` takes; the message names both.
            KeyError: If there is no ``type``, or it is not registered.
            ImportError: If ``type`` is a dotted name that leads nowhere.
            Exception: What the constructor itself raises is passed on, with a note.
        """
        if not isinstance(cfg, Mapping):
            raise TypeError(
                f"a configuration for the registry {self.name!r} must be a dict with 'type',"
                f" got {cfg!r}"
            )
        arguments = {**defaults, **cfg}
        if "type" not in arguments:
            raise KeyError(
                f"a configuration for the registry {self.name!r} needs 'type', got {dict(cfg)!r}"
            )
        target = self.find(arguments.pop("type"))
        name = getattr(target, "__qualname__", repr(target))
        what = f"{name} of the registry {self.name!r} with the keys {list(arguments)}"
        return call(target, (), arguments, what)

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._objects.items())

    def __len__(self) -> int:
        return len(self._objects)

    def __repr__(self) -> str:
        table = tabulate(self._objects.items(), headers=["Name", "Object"], tablefmt="fancy_grid")
        return f"Registry of {self.name}:\n{table}"
