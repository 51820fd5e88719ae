"""Do model and optimizer belong together? Asked once, before the first step of a run."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hooktrain.solver.optim_state import parameter_names

logger = logging.getLogger(__name__)


def check_parts(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse what cannot be meant, and warn of what can. Nothing is computed.

    Args:
        model: the model.
        optimizers: those that are to train it.

    Raises:
        ValueError: if the optimizers have no parameter of the model.
    """
    groups = [group for each in optimizers for group in each.param_groups]
    parameters = {p for group in groups for p in group["params"]}
    for check in CHECKS:
        check(model, parameters)


def refuse_another_model(model: nn.Module, parameters: set[Any]) -> None:
    """The optimizer was built from the parameters of another model."""
    names = parameter_names(model)
    if names and parameters.isdisjoint(names):
        raise ValueError(
            "the optimizer has the parameters of another model than the trainer: build "
            "it from the model that is trained"
        )


def warn_of_unsaved_parameters(model: nn.Module, parameters: set[Any]) -> None:
    """Some of what is trained is not in the model, and so in no checkpoint."""
    others = parameters - parameter_names(model).keys()
    if others:
        text = "%d parameters of the optimizer are not the model's, nor saved"
        logger.warning(text, len(others))


def warn_of_untrained_parameters(model: nn.Module, parameters: set[Any]) -> None:
    """Some parameters would be trained, and no optimizer has them."""
    names = parameter_names(model)
    left = [n for p, n in names.items() if p.requires_grad and p not in parameters]
    if left:
        text = (
            "%d trainable parameters are in no optimizer, and stay as they are: %s, ..."
        )
        text += " If that is meant, set requires_grad_(False)"
        logger.warning(text, len(left), left[:5])


def warn_of_layers_in_lists(model: nn.Module, parameters: set[Any]) -> None:
    """Layers in a plain list or tuple are no part of a model."""
    for path, module in model.named_modules(prefix="model"):
        for key, value in vars(module).items():
            items = value if isinstance(value, list | tuple) else ()
            if any(isinstance(item, nn.Module) for item in items):
                text = "%s.%s has layers that are not trained: use nn.ModuleList"
                logger.warning(text, path, key)


CHECKS: list[Callable[[nn.Module, set[Any]], None]] = [
    refuse_another_model,
    warn_of_unsaved_parameters,
    warn_of_untrained_parameters,
    warn_of_layers_in_lists,
]
