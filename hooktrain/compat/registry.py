"""A registry of objects that a configuration selects by name, as in fvcore and MMEngine."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hooktrain.utils.names import call, did_you_mean, locate


class Registry:
    """Maps names to classes and functions, which a config selects by name.

    Iterating yields ``(name, object)`` pairs; ``in`` checks names.

    Example::

        BACKBONES = Registry("backbone")

        @BACKBONES.register()
        class MyBackbone: ...

        BACKBONES.build({"type": "MyBackbone", "depth": 50})

    Args:
        name: the name of the registry, for error messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._objects: dict[str, Any] = {}

    def register(self, obj: Any = None) -> Any:
        """Register an object under its name; without an object, return a decorator."""
        return self.register_module(module=obj)

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: Any = None,
    ) -> Any:
        """Register an object, or return a decorator that registers one.

        Example::

            @MODELS.register_module(name=["Net", "net"])
            class Net(nn.Module): ...

            MODELS.register_module(module=torchvision.models.resnet18)

        Args:
            name: the name to register under, or several; None is the object's ``__name__``.
            force: whether to replace an object that is registered under that name.
            module: the object; if it is None, a decorator is returned.

        Returns:
            The object, or the decorator.

        Raises:
            TypeError: if the decorator is used without parentheses.
            ValueError: if a name is taken and ``force`` is not set.
        """
        if callable(name):
            raise TypeError(f"write @REGISTRY.register_module() above {name!r}")
        if module is None:
            return lambda decorated: self.register_module(name, force, decorated)
        if name is None:
            name = module.__name__
        names = [name] if isinstance(name, str) else name
        for each in names:
            if each in self and not force:
                raise ValueError(
                    f"the registry {self.name!r} already has {self._objects[each]!r} as "
                    f"{each!r}; to replace it by {module!r}, pass force=True"
                )
        self._objects |= dict.fromkeys(names, module)
        return module

    def get(self, name: str) -> Any:
        """The object registered under ``name``.

        Raises:
            KeyError: if the name is not registered; the message suggests the nearest name.
        """
        if name not in self:
            text = f"no {name!r} in the registry {self.name!r}"
            raise KeyError(text + did_you_mean(name, self._objects))
        return self._objects[name]

    def find(self, kind: Any) -> Any:
        """The class or function that the ``type`` of a configuration refers to.

        Args:
            kind: a registered name, the dotted name of an importable object, or the class
                or function itself.

        Raises:
            KeyError: if the name is not registered; the message suggests the nearest one.
            ImportError: if a dotted name cannot be imported.
        """
        if not isinstance(kind, str):
            return kind
        if "." in kind and kind not in self:
            return locate(kind)
        return self.get(kind)

    def build(self, cfg: Mapping[str, Any], /, **defaults: Any) -> Any:
        """Call ``cfg["type"]`` with the other items of ``cfg``.

        Args:
            cfg: a dict of ``type``, see :meth:`find`, and keyword arguments. It is not changed.
            defaults: default items, possibly with ``type``, which those of ``cfg`` override.

        Raises:
            KeyError: if there is no ``type``, or it is not registered.
            Exception: the error of the constructor, with a note that names it.
        """
        arguments = {**defaults, **cfg}
        if "type" not in arguments:
            text = f"the registry {self.name!r} needs a dict with 'type', got {cfg!r}"
            raise KeyError(text)
        target = self.find(arguments.pop("type"))
        where = f"of the registry {self.name!r} with the keys {list(arguments)}"
        return call(target, (), arguments, where)

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._objects.items())
