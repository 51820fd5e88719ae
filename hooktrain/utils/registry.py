"""Objects by name: the registries, dotted names of Python objects, and calling what they name."""

import difflib
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

logger = logging.getLogger(__name__)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of an error message about a name that does not exist.

    Args:
        name: The name that was asked for.
        known: The names that exist.

    Returns:
        ``"; did you mean 'x'?"`` if one is near, else a list of (at most twelve) names that exist.
    """
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
    return f"; there is {shown or 'nothing'}"


def refuse_overrides(kind: type, instead: Mapping[str, str]) -> None:
    """Say at once, when a class is defined, that nothing would call a method of it.

    For ``__init_subclass__``.

    Args:
        kind: The class.
        instead: What to do instead of overriding each of these methods, by their names.

    Raises:
        TypeError: If it defines one of them.
    """
    if found := next((name for name in instead if name in vars(kind)), None):
        message = f"{kind.__qualname__}.{found} would never be called: {instead[found]}"
        raise TypeError(message)


def refuse_signatures(kind: type, base: type, on_class: Sequence[str], hint: str = "") -> None:
    """Say at once, when a class is defined, that a method does not take what it is called with.

    For ``__init_subclass__``.

    Args:
        kind: The class.
        base: The one whose methods it overrides; what they need is what they are called with.
        on_class: The class methods that are called on the class, and never on an object.
        hint: More to say.

    Raises:
        TypeError: If it defines one of them for other arguments.
    """
    for name in vars(kind).keys() & vars(base).keys():
        if name.startswith("_") or not callable(original := getattr(base, name)):
            continue
        parameters = inspect.signature(original).parameters.values()
        given = [p.name for p in parameters if p.default is p.empty]
        plain = [inspect.isfunction(vars(c)[name]) for c in (kind, base)]
        called = ["self", *given] if plain == [True, False] and name not in on_class else given
        try:
            inspect.signature(getattr(kind, name)).bind(*called)
        except TypeError as error:
            text = f"{kind.__qualname__}.{name} is called with ({', '.join(given)}): {error}"
            raise TypeError(text + hint) from None


def locate(name: str) -> Any:
    """Import the object with a dotted name, such as ``"torch.optim.SGD"``.

    Modules are imported where needed. If a package has an attribute and a module of the same
    name, the attribute wins, as in an import.

    Raises:
        ImportError: If there is no such object. The message has the part that exists and its
            nearest attribute. An import that fails inside an existing module raises its own error.
    """
    path, *rest = name.split(".")
    found = importlib.import_module(path)
    for part in rest:
        # The path may also be a module that an attribute of its package hides.
        holder = found if hasattr(found, part) else sys.modules.get(path, found)
        if hasattr(holder, part):
            found = getattr(holder, part)
        elif hasattr(holder, "__path__") and find_spec(f"{holder.__name__}.{part}"):
            found = importlib.import_module(f"{holder.__name__}.{part}")
        else:
            hint = did_you_mean(part, [n for n in dir(holder) if not n.startswith("_")])
            raise ImportError(f"cannot locate {name!r}: {path!r} has no {part!r}{hint}")
        path = f"{path}.{part}"
    return found


def importable_name(obj: Any) -> tuple[str, str]:
    """The shortest ``(module, name)`` for which ``from module import name`` gives ``obj``.

    ``name`` is dotted for what is defined in a class. A public re-export is preferred:
    ``("torch.optim", "SGD")``, although the class is defined in ``torch.optim.sgd``.

    Args:
        obj: A class, function, class method, enum member or ``torch.dtype``.

    Raises:
        ValueError: If it cannot be imported by name: a lambda, something defined in a function,
            an ordinary instance.
    """
    if isinstance(obj, torch.dtype):
        return "torch", str(obj).removeprefix("torch.")
    for module, name in _places(obj):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        # Each access gives a new class method: the same one is equal, not identical.
        if type(found) is type(obj) and found == obj:
            return module, name
    raise ValueError(
        f"{obj!r:.80} of type {type(obj).__name__} cannot be imported by name; name a class or"
        " function that is defined at the top of a module"
    )


def _places(obj: Any) -> Iterator[tuple[str, str]]:
    """Where an object may be found as ``(module, name)``, the best place first."""
    owner = type(obj) if isinstance(obj, Enum) else obj
    module, name = getattr(owner, "__module__", None), getattr(owner, "__qualname__", "")
    name = f"{name}.{obj.name}" if isinstance(obj, Enum) else name
    short = name.rpartition(".")[2]
    parts = module.split(".") if isinstance(module, str) else ["_"]
    if any(part.startswith("_") for part in parts):
        # Extensions do not know the public module of their functions: look who has them.
        holders = [m for m, mod in [*sys.modules.items()] if short in getattr(mod, "__dict__", ())]
        for holder in sorted(holders, key=lambda m: ("._" in f".{m}", m.count("."), m)):
            yield holder, short
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length]), name
        yield ".".join(parts[:length]), short  # torch.tanh calls itself _VariableFunctions.tanh


def call(
    target: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str
) -> Any:
    """Call ``target(*args, **kwargs)``, with a note about the target on every error.

    Python 3.10 has no notes on errors; there the note is logged.

    Args:
        target: What to call, or its dotted name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        where: Where the user wrote the call, such as ``"(model.head)"``; it ends the note.

    Raises:
        Exception: What the target raises, with the note. For an argument that it does not know,
            the note suggests the nearest one.
    """
    try:
        target = locate(target) if isinstance(target, str) else target
        return target(*args, **kwargs)
    except Exception as err:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(err))
        known = _parameters(target) if unknown and isinstance(err, TypeError) else []
        hint = did_you_mean(unknown[1], known) if unknown and known else ""
        name = target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
        note = f"while instantiating {name} {where}{hint}"
        getattr(err, "add_note", logger.error)(note)  # Python 3.10 has no notes
        raise


def _parameters(target: Any) -> list[str]:
    """The parameters of a function, or of the constructors of a class and its bases."""
    bases: Sequence[Any] = target.__mro__ if isinstance(target, type) else ()
    callables = [base.__init__ for base in bases] or [target]
    try:
        return [name for each in callables for name in inspect.signature(each).parameters]
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []


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
        self, obj: Any = None, *, name: str | Sequence[str] | None = None, force: bool = False
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
        self, name: str | Sequence[str] | None = None, force: bool = False, module: Any = None
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
            raise KeyError(f"no object named {name!r} in the registry {self.name!r}{hint}")
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
            name = kind.partition(".")[2]  # after a scope: MMEngine's registries have them
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
            raise KeyError(f"a config for the registry {self.name!r} needs 'type', got {cfg!r}")
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
        table = tabulate(self._objects.items(), headers=["Name", "Object"], tablefmt="fancy_grid")
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


def is_model_wrapper(model: nn.Module) -> bool:
    """Whether a model is wrapped in something of ``MODEL_WRAPPERS``, which has it as ``module``."""
    wrappers = tuple(wrapper for _, wrapper in MODEL_WRAPPERS if isinstance(wrapper, type))
    return isinstance(model, wrappers)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside all wrappers, in any order.

    Wrappers are those in ``MODEL_WRAPPERS``, torch's data parallel ones among them, which have the
    model as ``module``, and ``torch.compile``.

    Raises:
        TypeError: If it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be an nn.Module object, but got {model!r:.80}")
    # torch.compile's class is known by its attribute, since importing it takes seconds.
    while (inner := "module" if is_model_wrapper(model) else "_orig_mod") in model._modules:
        model = model.get_submodule(inner)
    return model
