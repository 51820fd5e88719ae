"""MMEngine's registries: its own where it is installed, else one table for all scopes.

What other packages register and look up, such as mmcv's layers or the transforms of a data set,
is in mmengine's own registries. So these serve code after the recipe too. Only those of
``APART`` are others, as mmengine has classes of the same names there.
"""

from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hooktrain.utils import registry

APART = (
    "MODEL_WRAPPERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS",
    "STRATEGIES",
)


class Registry(registry.Registry):
    """A registry with MMEngine's arguments, for where mmengine is not installed.

    Args:
        name: see :class:`hooktrain.utils.registry.Registry`.
        build_func: called as ``build_func(cfg, ..., registry=self)`` in place of :meth:`build`.
        parent: shares its objects with this one, whatever their scopes.
        ignored: such as ``scope`` and ``locations``: import the modules that register.
    """

    def __init__(
        self, name: str, build_func: Any = None, parent: Any = None, **ignored: Any
    ) -> None:
        super().__init__(name)
        self.build_func = build_func
        if parent is not None:
            self._objects = parent._objects

    def __contains__(self, name: object) -> bool:
        return _without_scope(name) in self._objects

    def get(self, name: str) -> Any:
        """What is registered under a name, with or without a scope."""
        return super().get(_without_scope(name))

    def build(self, cfg: Any, /, **kwargs: Any) -> Any:
        """As the base class does, with ``default_args`` for keys that ``cfg`` lacks."""
        if self.build_func is not None:
            return self.build_func(cfg, registry=self, **kwargs)
        defaults = kwargs.pop("default_args", None) or {}
        return super().build(cfg, **{**defaults, **kwargs})


def _without_scope(name: Any) -> str:
    scope, _, own = str(name).partition(".")
    return own or scope


@cache
def of_registries(name: str) -> Any:
    """What ``from mmengine.registry import name`` gives: a registry, or their class."""
    ours: Any = getattr(registry, name, None)
    if find_spec("mmengine") is None:
        return Registry if name == "Registry" else Registry(name.lower(), parent=ours)
    theirs: Any = import_module("mmengine.registry")
    if name not in APART:
        return getattr(theirs, name)
    root = theirs.Registry(name.lower(), scope="mmengine")
    root.module_dict.update(ours)
    ours._objects = root.module_dict  # one table for both
    return root


def _find(name: str, kind: Any) -> Any:
    """What a registry of the core finds, or MMEngine's in the default scope."""
    ours = getattr(registry, name)
    if isinstance(kind, str) and kind not in ours and find_spec("mmengine"):
        root = of_registries(name)
        with suppress(RuntimeError), root.switch_scope_and_registry(None) as scoped:
            if found := scoped.get(kind):
                return found
    return registry.Registry.find(ours, kind)


for _name, _registry in vars(registry).items():
    if isinstance(_registry, registry.Registry):
        _registry.find = partial(_find, _name)  # type: ignore[method-assign]
