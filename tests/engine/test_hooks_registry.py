"""Every hook of the package can be chosen by its name."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase, hooks
from hooktrain.utils.registry import HOOKS

# What a hook cannot be built without; a hook that is not here can be built without arguments.
ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "AutogradProfiler": lambda folder: {
        "enable_predicate": bool,
        "output_dir": str(folder),
    },
    "BestCheckpointer": lambda folder: {
        "eval_period": 1,
        "checkpointer": Checkpointer(nn.Linear(1, 1), str(folder)),
        "val_metric": "accuracy",
    },
    "EMA": lambda folder: {"model": nn.Linear(1, 1)},
    "EarlyStopping": lambda folder: {"metric": "loss"},
    "EvalHook": lambda folder: {"eval_period": 1, "eval_function": dict},
    "PeriodicCheckpointer": lambda folder: {
        "checkpointer": Checkpointer(nn.Linear(1, 1), str(folder)),
        "period": 1,
    },
    "PeriodicWriter": lambda folder: {"writers": []},
    "PreciseBN": lambda folder: {
        "period": 1,
        "model": nn.BatchNorm1d(1),
        "data_loader": [torch.ones(2, 1)],
        "num_iter": 1,
    },
    "Preemption": lambda folder: {
        "checkpointer": Checkpointer(nn.Linear(1, 1), str(folder))
    },
    "TorchProfiler": lambda folder: {
        "enable_predicate": bool,
        "output_dir": str(folder),
    },
    "Watchdog": lambda folder: {"timeout_s": 60.0},
}


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


@pytest.mark.parametrize(
    "name", sorted(hook.__name__ for hook in hooks_of_the_package())
)
def test_a_hook_is_built_by_its_name(name: str, tmp_path: Any) -> None:
    arguments = ARGUMENTS.get(name, lambda folder: {})(tmp_path)
    hook = HOOKS.build({"type": name, **arguments})
    assert type(hook) is getattr(hooks, name)


def test_a_misspelt_hook_suggests_the_nearest() -> None:
    with pytest.raises(KeyError, match="did you mean 'IterationTimer'"):
        HOOKS.build({"type": "IterTimer"})
