"""Checks that optimizers belong to a model and train it."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hooktrain.solver.build import Wrappers
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import by_name

logger = logging.getLogger(__name__)

# The number of in-place changes of the parameters, and the learning rates of the groups.
Version: TypeAlias = tuple[int, list[float]]

# The optimizers that a hook schedules, and the learning rates at the end of its last run.
scheduled: WeakKeyDictionary[Optimizer, list[float]] = WeakKeyDictionary()


def model_mismatch(owner: str, parameters: Iterable[Tensor], trained: nn.Module) -> str:
    """An error message if none of some parameters is the trained model's; otherwise "".

    Args:
        owner: the name of the owner of the parameters, such as ``"the optimizer"``.
        parameters: the parameters, at least one of which must be the model's.
        trained: the trainer's model. If it has no parameters, there is no error.
    """
    own = set(trained.parameters())
    if not own or not own.isdisjoint(parameters):
        return ""
    return (
        f"{owner} has the parameters of another model than the trainer's: build it from the "
        "model that is trained"
    )


def check_optimizers(model: nn.Module, optim_wrapper: Wrappers) -> None:
    """Warn about parameters that are not trained, or not the model's.

    Args:
        model: the model.
        optim_wrapper: the wrapper or wrappers that will train it.

    Raises:
        ValueError: if the optimizers have no parameter of the model.
    """
    names = parameter_names(model)
    wrappers = by_name(optim_wrapper).values()
    trained = {p for wrapper in wrappers for p in wrapper.parameters}
    problem = model_mismatch("the optimizer", trained, model)
    if problem:
        raise ValueError(problem)
    low = {p.dtype for p in trained} & {torch.float16, torch.bfloat16}
    if low:
        logger.info(
            "Weights in %s lose updates smaller than 0.4 %% of their values, and float16 cannot "
            "represent gradients below 6e-8: AmpOptimWrapper trains float32 weights in lower "
            "precision",
            low,
        )
    unsaved = len(trained - names.keys())
    if unsaved:
        logger.warning(
            "%d parameters of the optimizer are not the model's, so they are not saved",
            unsaved,
        )
    left = [n for p, n in names.items() if p.requires_grad and p not in trained]
    if left:
        logger.warning(
            "%d trainable parameters are in no optimizer, so they are not trained: %s, ... "
            "If this is intended, set requires_grad_(False)",
            len(left),
            left[:5],
        )
    for name in _hidden(model, names.keys() | trained):
        logger.warning(
            "%s has no effect on training: use nn.Parameter, nn.ModuleList or "
            "nn.ModuleDict, or requires_grad_(False)",
            name,
        )
    for wrapper in wrappers:
        if hasattr(wrapper.optimizer, "eval"):
            logger.info(
                "%s has eval() and train(), as schedule-free ones do: only your own hooks call "
                "them, before and after evaluations and saves",
                type(wrapper.optimizer).__name__,
            )
        # timm's schedulers multiply each lr by it at construction.
        scales = {group.get("lr_scale", 1.0) for group in wrapper.param_groups}
        if len(scales) > 1 and len(set(rates_of(wrapper))) == 1:
            logger.warning(
                "lr_scale in the optimizer's groups has an effect only with timm's schedulers: "
                "for each group, run group['lr'] *= group.pop('lr_scale')"
            )


def _hidden(model: nn.Module, known: Set[Tensor]) -> Iterator[str]:
    """The names of attributes without effect: unregistered trainable tensors, or a freeze.

    Args:
        model: the model.
        known: the tensors that are registered or trained.
    """
    for path, module in model.named_modules(prefix="model"):
        for key, value in vars(module).items():
            is_freeze = key == "requires_grad" and not value and _trainable(module)
            if is_freeze or any(
                _trainable(item) - known for item in tree_leaves(value)
            ):
                yield f"{path}.{key}"


def _trainable(item: Any) -> set[Tensor]:
    tensors = item.parameters() if isinstance(item, nn.Module) else [item]
    return {
        tensor
        for tensor in tensors
        if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_leaf
    }


def versions(optim_wrapper: Wrappers) -> dict[str, Version]:
    """How often parameters were changed, and the learning rates, by optimizer name."""
    return {
        name: (sum(p._version for p in wrapper.parameters), rates_of(wrapper))
        for name, wrapper in by_name(optim_wrapper).items()
    }


def rates_of(optimizer: Optimizer | OptimWrapper) -> list[float]:
    """The learning rates of an optimizer's groups; 1 for a group without one.

    Host-device synchronisation, if they are tensors.
    """
    return [float(group.get("lr", 1.0)) for group in optimizer.param_groups]


def warn_about_idle_optimizers(
    model: nn.Module, optim_wrapper: Wrappers, before: Mapping[str, Version]
) -> None:
    """Warn about optimizers that train nothing, and schedulers that are never stepped.

    The log names the parameters that have had no gradient.

    Args:
        model: the model.
        optim_wrapper: the wrapper, or several by name.
        before: the :func:`versions` at the start of the run.
    """
    now = versions(optim_wrapper)
    names = parameter_names(model)
    for name, wrapper in by_name(optim_wrapper).items():
        optimizer = wrapper.optimizer
        (changes, rates), (changes_before, rates_before) = now[name], before[name]
        # Some optimizers write to p.data, which does not count as a change, but have a state.
        is_idle = changes == changes_before and not optimizer.state
        if is_idle and wrapper.should_update():
            logger.warning(
                "The optimizer %s has not made a step so far",
                name or type(optimizer).__name__,
            )
        # A parameter gets its state with its first gradient. LBFGS has one state for all, and SGD
        # without momentum none.
        trained = {p for p in wrapper.parameters if p.requires_grad}
        without_state = trained - optimizer.state.keys()
        unused = [names.get(p) for p in without_state if p.grad is None]
        if 0 < len(unused) < len(trained) and len(optimizer.state) != 1:
            logger.info("Parameters without a gradient so far: %s", unused[:10])
        # A schedule may begin and end at 0, and a short run is over in the first period.
        bases = [group.get("initial_lr", 0.0) for group in optimizer.param_groups]
        if not any(rates + rates_before + bases):
            logger.warning("The learning rate is 0, so nothing is learned")
        # torch's schedulers wrap the method and set this attribute.
        has_scheduler = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if has_scheduler and optimizer not in scheduled:
            is_stepped = rates != rates_before
            logger.log(
                logging.INFO if is_stepped else logging.WARNING,
                "The optimizer has a scheduler that %s: hooks.LRScheduler(scheduler=...) steps and "
                "saves it",
                "only your own hooks may save" if is_stepped else "is not stepped",
            )
