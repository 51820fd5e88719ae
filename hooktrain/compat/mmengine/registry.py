"""MMEngine's registries: its own where it is installed, else hooktrain's, which have no scopes.

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


@cache
def of_registries(name: str) -> Any:
    """What ``from mmengine.registry import name`` gives: a registry, their class, or None."""
    ours: Any = getattr(registry, name, None)
    if find_spec("mmengine") is None:
        return ours or registry.Registry(name.lower())
    theirs: Any = import_module("mmengine.registry")
    if name not in APART:
        return getattr(theirs, name, None)
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
