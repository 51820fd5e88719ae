"""MMEngine's registries: its own if it is installed, otherwise hooktrain's, which have no scopes.

Other packages register layers (mmcv) or transforms of data sets in mmengine's own registries,
and look them up there, so migrated code gets these registries too. Those in ``APART`` are
separate, since mmengine's hold different classes under the same names: they contain hooktrain's
classes, and mmengine's classes of other names.
"""

from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from warnings import catch_warnings, simplefilter

from hooktrain.compat.mmengine.param_scheduler import adapted
from hooktrain.compat.registry import Registry

APART = (
    "MODEL_WRAPPERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS",
    "STRATEGIES",
)


class ScopedRegistry(Registry):
    """A registry that also searches mmengine's, in the default scope."""

    def find(self, kind: Any) -> Any:
        """See :meth:`hooktrain.compat.registry.Registry.find`."""
        if isinstance(kind, str) and kind not in self and find_spec("mmengine"):
            ours = get_registry(self.name)
            for root in (ours, getattr(import_module("mmengine.registry"), self.name)):
                with (
                    suppress(RuntimeError),
                    root.switch_scope_and_registry(None) as scoped,
                ):
                    found = scoped.get(kind)
                    if found:
                        return found
        return super().find(kind)


MODELS = ScopedRegistry("MODELS")
MODEL_WRAPPERS = ScopedRegistry("MODEL_WRAPPERS")
OPTIMIZERS = ScopedRegistry("OPTIMIZERS")
OPTIM_WRAPPERS = ScopedRegistry("OPTIM_WRAPPERS")
OPTIM_WRAPPER_CONSTRUCTORS = ScopedRegistry("OPTIM_WRAPPER_CONSTRUCTORS")
PARAM_SCHEDULERS = ScopedRegistry("PARAM_SCHEDULERS")
STRATEGIES = ScopedRegistry("STRATEGIES")


@cache
def get_registry(name: str) -> Any:
    """The object that ``from mmengine.registry import name`` imports, or None.

    It is a registry, or the class ``Registry``.
    """
    ours: Any = globals().get(name)
    if find_spec("mmengine") is None:
        return ours or Registry(name)
    theirs: Any = import_module("mmengine.registry")
    with catch_warnings():
        simplefilter("ignore")  # torch warns about mmengine's imports
        import_module("mmengine.runner")  # registers mmengine's classes
    if name not in APART:
        return getattr(theirs, name, None)
    root = theirs.Registry(name.lower(), scope="mmengine")
    known = getattr(theirs, name).module_dict
    root.module_dict.update({key: adapted(each) for key, each in known.items()})
    root.module_dict.update(ours)
    ours._objects = root.module_dict  # one table for both
    return root
