"""What is asked before the first step of a run, and after its first period."""

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hooktrain.evaluation.evaluator import computes_together
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.utils import comm
from hooktrain.utils.periods import in_iterations

logger = logging.getLogger(__name__)

# Events of Lightning, MMEngine and transformers.
_OF_OTHERS = re.compile(
    r"(before|after)_(run|iter|epoch|train_|val|test)|on_.+_(start|end|begin)"
)


def end_of_run(
    start: int, max_iter: int | None, max_epochs: float | None, epoch_length: int | None
) -> int:
    """The iteration to end before.

    Args:
        start: the first iteration.
        max_iter: the end, or None.
        max_epochs: the same in epochs, counted from iteration 0, or None.
        epoch_length: the iterations of an epoch, if known.

    Raises:
        ValueError: without an end after the start, for two that differ, or for epochs of
            unknown length.
    """
    if max_epochs is not None:
        end = in_iterations(f"{max_epochs} epochs", epoch_length)
        if max_iter not in (None, end):
            raise ValueError(
                f"a run has one end: give {max_iter=} or {max_epochs=}, and None for the "
                "other one"
            )
        max_iter = end
    if not isinstance(max_iter, SupportsIndex) or not 0 <= start <= max_iter:
        raise ValueError(
            "train(max_iter=...) needs whole numbers max_iter >= start_iter >= 0, but got "
            f"{max_iter=} and start_iter={start!r} (if that was not given, "
            f"{start} iterations are done already)"
        )
    if start == max_iter:
        logger.info("Nothing is left to train: max_iter=%d is reached", max_iter)
    return max_iter


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


def check_parts(model: nn.Module, optim_wrapper: Any) -> None:
    """Refuse what cannot be meant, and warn of what can. Nothing is computed.

    Args:
        model: the model.
        optim_wrapper: one or several, which are to train it.

    Raises:
        ValueError: if the optimizers have no parameter of the model.
    """
    names = parameter_names(model)
    wrappers = wrappers_by_name(optim_wrapper).values()
    groups = [group for each in wrappers for group in each.param_groups]
    trained = {p for group in groups for p in group["params"]}
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
    for name in _lists_of_layers(model):
        logger.warning("%s has layers that are not trained: use nn.ModuleList", name)
    if comm.get_world_size() > 1:
        _check_ranks(model)


def _lists_of_layers(model: nn.Module) -> Iterator[str]:
    """The names of plain lists and tuples of layers, which are no part of a model."""
    for path, module in model.named_modules(prefix="model"):
        for key, value in vars(module).items():
            items = value if isinstance(value, list | tuple) else ()
            if any(isinstance(item, nn.Module) for item in items):
                yield f"{path}.{key}"


def versions(wrapper: OptimWrapper) -> list[int]:
    """How often each parameter of an optimizer was changed so far."""
    return [p._version for group in wrapper.param_groups for p in group["params"]]


def warn_of_idle(wrapper: OptimWrapper, name: str, before: list[int]) -> None:
    """Name an optimizer that has done nothing, and does not accumulate.

    Args:
        wrapper: its wrapper.
        name: its name among several, or "".
        before: what :func:`versions` gave when the run began.
    """
    # Some write to p.data, which has no version; but they have a state.
    is_idle = versions(wrapper) == before and not wrapper.optimizer.state
    if is_idle and wrapper.should_update():
        logger.warning(
            "The optimizer %s has made no step so far",
            name or type(wrapper.optimizer).__name__,
        )


def _check_ranks(model: nn.Module) -> None:
    """Warn if several ranks would train models of their own."""
    is_wrapped = any(hasattr(module, "no_sync") for module in model.modules())
    if not is_wrapped and not computes_together(model):
        logger.warning(
            "Each rank trains a model of its own: give the trainer create_ddp_model(model)"
        )


def log_size(model: nn.Module) -> None:
    """Log how many parameters a model has, and for the log file a table of its parts.

    What several parts share is counted in each of them, and once in the total.
    """
    bare = unwrap_model(model)
    rows: list[tuple[Any, ...]] = []
    for name, part in [*bare.named_children(), ("total", bare)]:
        there = [p for p in part.parameters() if not is_lazy(p)]
        count = sum(p.numel() for p in there)
        trainable = sum(p.numel() for p in there if p.requires_grad)
        size = sum(p.nbytes for p in there)
        rows.append((name, count, trainable, size / 1e6))
    headers = ["part", "parameters", "trainable", "MB"]
    table = tabulate(rows, headers, intfmt=",", floatfmt=",.2f")
    logger.debug("%s:\n%s", type(bare).__name__, table)
    device = there[0].device.type if there else "cpu"
    logger.info(
        "%s parameters, on %d x %s", f"{count:,}", comm.get_world_size(), device
    )


def warn_of_events(hook: object) -> None:
    """Name the methods of a hook that other trainers would call."""
    kind = type(hook)
    for name in vars(kind):
        if _OF_OTHERS.match(name) and not hasattr(kind.__base__, name):
            logger.warning(
                "Nothing calls %s.%s: there are before_train, before_step, after_backward, "
                "after_step and after_train",
                kind.__name__,
                name,
            )
