"""What is asked before the first step of a run, and after its first period."""

import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hooktrain.evaluation.evaluator import computes_together
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver.build import Wrappers
from hooktrain.solver.checks import check_optimizers
from hooktrain.utils import comm
from hooktrain.utils.names import names_used
from hooktrain.utils.tensors import compute_device

logger = logging.getLogger(__name__)

# Events of Lightning, MMEngine and transformers.
_OF_OTHERS = re.compile(
    r"(before|after)_(run|iter|epoch|train_|val|test)|on_.+_(start|end|begin)"
)


def check_parts(model: nn.Module, optim_wrapper: Wrappers) -> None:
    """Refuse what cannot be meant, and warn of what can. Nothing is computed.

    Args:
        model: the model.
        optim_wrapper: one or several, which are to train it.

    Raises:
        ValueError: if the optimizers have no parameter of the model.
    """
    check_optimizers(model, optim_wrapper)
    is_wrapped = any(hasattr(module, "no_sync") for module in model.modules())
    is_whole = is_wrapped or computes_together(model)
    if comm.get_world_size() > 1 and not is_whole:
        logger.warning(
            "Each rank trains a model of its own: give the trainer create_ddp_model(model)"
        )


def warn_of_lost_calls(trainer: Any) -> None:
    """Name the calls that a ``run_step`` of somebody's own has left out so far.

    Args:
        trainer: with a model, in a run.
    """
    users = (hook for hook in trainer.hooks if names_used(hook.after_backward))
    waiting = [type(hook).__qualname__ for hook in users]
    if waiting and not trainer._has_backward:
        logger.warning(
            "run_step has not called self.after_backward(), which %s may need", waiting
        )
    # Gradients that are not freed change in each iteration, and those that are begin anew.
    gradients = (p.grad for p in trainer.model.parameters())
    changes = min((grad._version for grad in gradients if grad is not None), default=0)
    count = trainer.done - trainer.start_iter
    if "zero_grad" not in names_used(trainer.run_step) and changes >= count - 1 > 2:
        logger.warning(
            "The gradients of all iterations add up: run_step needs "
            "self.optim_wrapper.zero_grad()"
        )


def log_size(model: nn.Module) -> None:
    """Log how many parameters a model has, and for the log file the model itself."""
    bare = unwrap_model(model)
    logger.debug("Model:\n%s", bare)
    sizes = [(p.numel(), p.requires_grad) for p in bare.parameters() if not is_lazy(p)]
    logger.info(
        "%s parameters, %s of them trainable, on %d x %s",
        f"{sum(size for size, _ in sizes):,}",
        f"{sum(size for size, is_trained in sizes if is_trained):,}",
        comm.get_world_size(),
        compute_device(bare).type,
    )


def warn_of_events(kind: type, events: Sequence[str]) -> None:
    """Name the methods of a class that other trainers would call, and those without ``super()``.

    Whether a method calls that of its base class is read from the names in its code. So it costs
    nothing when the method is called.

    Args:
        kind: a class of hooks or of trainers.
        events: the methods that are called.
    """
    for name in vars(kind):
        is_meant = _OF_OTHERS.match(name) or (
            name[0] != "_" and get_close_matches(name, events, 1, 0.85)
        )
        if is_meant and not hasattr(kind.__base__, name):
            logger.warning(
                "Nothing calls %s.%s: there is %s",
                kind.__name__,
                name,
                ", ".join(events),
            )
    for name in (*events, "__init__"):
        used = [names_used(vars(base).get(name)) for base in kind.__mro__]
        # A method that uses no name does nothing that could be left out.
        busy = list(filter(None, used))
        if any(name not in names for names in busy[:-1]):
            logger.warning(
                "%s.%s does not call super().%s(), so what its base class does there is left out",
                kind.__name__,
                name,
                name,
            )
