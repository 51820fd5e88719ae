"""Whether optimizers belong to a model, and whether they train it."""

import logging
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from hooktrain.solver.build import Wrappers
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name

logger = logging.getLogger(__name__)


def another_model(owner: str, parameters: Iterable[Tensor], trained: nn.Module) -> str:
    """Why something does not belong to the model that a trainer trains, or "".

    Args:
        owner: what has the parameters, such as ``"the optimizer"``.
        parameters: one of them has to be the model's.
        trained: the trainer's model. If it has no parameters, it fits everything.
    """
    own = set(trained.parameters())
    if not own or not own.isdisjoint(parameters):
        return ""
    return (
        f"{owner} has the parameters of another model than the trainer: build it from the "
        "model that is trained"
    )


def check_optimizers(model: nn.Module, optim_wrapper: Wrappers) -> None:
    """Warn of parameters that are not trained, or not the model's.

    Args:
        model: the model.
        optim_wrapper: one or several, which are to train it.

    Raises:
        ValueError: if the optimizers have no parameter of the model.
    """
    names = parameter_names(model)
    wrappers = wrappers_by_name(optim_wrapper).values()
    trained = {p for wrapper in wrappers for p in wrapper.parameters}
    problem = another_model("the optimizer", trained, model)
    if problem:
        raise ValueError(problem)
    unsaved = len(trained - names.keys())
    if unsaved:
        logger.warning(
            "%d parameters of the optimizer are not the model's, nor saved", unsaved
        )
    left = [n for p, n in names.items() if p.requires_grad and p not in trained]
    if left:
        logger.warning(
            "%d trainable parameters are in no optimizer, and stay as they are: %s, ... "
            "If that is meant, set requires_grad_(False)",
            len(left),
            left[:5],
        )


def versions(optim_wrapper: Wrappers) -> dict[str, list[int]]:
    """How often each parameter was changed so far, by the names of the optimizers."""
    wrappers = wrappers_by_name(optim_wrapper).items()
    return {name: [p._version for p in each.parameters] for name, each in wrappers}


def warn_of_idle(optim_wrapper: Wrappers, before: Mapping[str, list[int]]) -> None:
    """Name each optimizer that has done nothing, and does not accumulate.

    Args:
        optim_wrapper: one or several.
        before: what :func:`versions` gave when the run began.
    """
    now = versions(optim_wrapper)
    for name, wrapper in wrappers_by_name(optim_wrapper).items():
        # Some write to p.data, which has no version; but they have a state.
        is_idle = now[name] == before[name] and not wrapper.optimizer.state
        if is_idle and wrapper.should_update():
            logger.warning(
                "The optimizer %s has made no step so far",
                name or type(wrapper.optimizer).__name__,
            )
