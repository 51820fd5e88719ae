"""Every hook of the package can be chosen by its name."""

import importlib
import pkgutil

from hooktrain.engine import HookBase, hooks
from hooktrain.utils.registry import HOOKS


def hooks_of_the_package() -> set[type[HookBase]]:
    """What is defined in the modules of the folder, found without a list of them."""
    modules = [
        importlib.import_module(f"{hooks.__name__}.{info.name}")
        for info in pkgutil.iter_modules(hooks.__path__)
    ]
    return {
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type)
        and issubclass(found, HookBase)
        and found.__module__ == module.__name__
        and not found.__name__.startswith("_")
    }


def test_every_hook_of_the_package_is_registered_by_its_name() -> None:
    ours = {hook for _, hook in HOOKS if hook.__module__.startswith("hooktrain.")}
    assert ours == hooks_of_the_package()
    assert all(HOOKS.get(hook.__name__) is hook for hook in ours)
    assert "HookBase" not in HOOKS
