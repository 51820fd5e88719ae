"""Do the parts of a run belong together? Asked once, before the first step."""

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from hooktrain.engine.hooks import EMA
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper import wrappers_by_name

logger = logging.getLogger(__name__)


def check_parts(trainer: Any) -> None:
    """Refuse what cannot be meant, and warn of what can.

    It compares names and identities: nothing is computed, and no device is waited for.

    Args:
        trainer: a :class:`~hooktrain.engine.trainers.ModelTrainer`. One with its own ``run_step``
            may mean what others cannot: it gets warnings.

    Raises:
        ValueError: if optimizer, checkpointer and model have no parameter in common.
    """
    for module in trainer.model.modules():
        if hasattr(
            type(module), "reshard"
        ):  # it may have whole tensors since an evaluation
            module.reshard()
    names = parameter_names(trainer.model)
    optimizers = [w.optimizer for w in wrappers_by_name(trainer.optim_wrapper).values()]
    stepped = {
        p for each in optimizers for group in each.param_groups for p in group["params"]
    }
    averages = [
        next(h.average.parameters(), None) for h in trainer._hooks if isinstance(h, EMA)
    ]
    known = {*names, *averages}
    strangers = [hook for hook in trainer._hooks if _has_another_model(hook, known)]
    if names and stepped.isdisjoint(names):
        strangers.append(trainer.optim_wrapper)
    for stranger in strangers:
        text = f"{type(stranger).__name__} has the parameters of another model than the trainer"
        if type(trainer).run_step.__module__.startswith("hooktrain."):
            raise ValueError(f"{text}: build it from the model that is trained")
        logger.warning(text)
    for path, module in trainer.model.named_modules(prefix="model"):
        for key, value in vars(module).items():
            items = value if isinstance(value, list | tuple) else ()
            found = {
                p for m in items if isinstance(m, nn.Module) for p in m.parameters()
            }
            if any(p.requires_grad and p not in names for p in found):
                text = "%s.%s has layers that are not trained: use nn.ModuleList"
                logger.warning(text, path, key)
    left = [name for p, name in names.items() if p.requires_grad and p not in stepped]
    if left:
        text = "%d trainable parameters are in no optimizer, and stay as they are: %s, ... If that "
        logger.warning(
            text + "is meant, set requires_grad_(False)", len(left), left[:5]
        )
    if more := len(stepped - names.keys()):
        logger.warning(
            "%d parameters of the optimizer are not the model's, nor saved", more
        )


def _has_another_model(hook: Any, known: Collection[Any]) -> bool:
    """Whether the model of a hook's checkpointer has parameters and none is known."""
    saver = getattr(hook, "checkpointer", getattr(hook, "_checkpointer", None))
    model: Any = getattr(saver, "model", None)
    if not hasattr(model, "parameters") or next(model.parameters(), None) is None:
        return False
    return not any(p in known for p in model.parameters())
