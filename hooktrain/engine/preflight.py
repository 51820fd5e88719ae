"""What is asked before the first step of a run, and after its first period."""

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hooktrain.evaluation.evaluator import computes_together
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.utils import comm
from hooktrain.utils.tensors import compute_device

logger = logging.getLogger(__name__)

# Events of Lightning, MMEngine and transformers.
_OF_OTHERS = re.compile(
    r"(before|after)_(run|iter|epoch|train_|val|test)|on_.+_(start|end|begin)"
)


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


def warn_of_lost_calls(trainer: Any) -> None:
    """Name the calls that a ``run_step`` of somebody's own has left out so far.

    Args:
        trainer: with a model, in a run.
    """
    hooks = trainer._named_hooks()
    waiting = [key for key in hooks if _names_used(hooks[key].after_backward)]
    if waiting and not trainer._has_backward:
        logger.warning(
            "run_step has not called self.after_backward(), which %s may need", waiting
        )
    # Gradients that are not freed change in each iteration, and those that are begin anew.
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    changes = min((gradient._version for gradient in gradients), default=0)
    count = trainer.done - trainer.start_iter
    if "zero_grad" not in _names_used(trainer.run_step) and changes >= count - 1 > 2:
        logger.warning(
            "The gradients of all iterations add up: run_step needs "
            "self.optim_wrapper.zero_grad()"
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
        rows.append((name, count, trainable))
    table = tabulate(rows, ["part", "parameters", "trainable"], intfmt=",")
    logger.debug("%s:\n%s", type(bare).__name__, table)
    device = compute_device(bare).type
    logger.info(
        "%s parameters, on %d x %s", f"{count:,}", comm.get_world_size(), device
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
        used = [_names_used(vars(base).get(name)) for base in kind.__mro__]
        # A method that uses no name does nothing that could be left out.
        busy = list(filter(None, used))
        if any(name not in names for names in busy[:-1]):
            logger.warning(
                "%s.%s does not call super().%s(), so what its base class does there is left out",
                kind.__name__,
                name,
                name,
            )


def _names_used(method: Any) -> tuple[str, ...]:
    """The names of globals, attributes and methods in the code of a Python function."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code.co_names if code else ()
