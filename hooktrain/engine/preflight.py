"""Checks before the first step of a run, and after its first period."""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from hooktrain.engine.hook_base import EVENTS
from hooktrain.events import EventStorage
from hooktrain.model.batch_norm import get_bn_modules
from hooktrain.model.wrappers import is_model_wrapper, unwrap_model
from hooktrain.solver.build import Wrappers
from hooktrain.solver.checks import check_optimizers
from hooktrain.strategy.ddp import refuse_unexchanged
from hooktrain.strategy.environment import count_processes
from hooktrain.utils import comm
from hooktrain.utils.logger import log_once
from hooktrain.utils.names import State, names_used
from hooktrain.utils.tensors import (
    Tensors,
    checksum,
    compute_device,
    is_sharded,
    norm_of,
)

logger = logging.getLogger(__name__)

# Method names of Lightning, MMEngine, transformers and Ultralytics.
_OF_OTHERS = re.compile(
    r"(before|after)_(run|iter|epoch|train_|val|test)"
    r"|on_.+_(start|end|begin|step|save|checkpoint)"
    r"|on_(before|after|save|log|evaluate|predict|exception)"
    r"|optimizer_step|lr_scheduler_step|configure_gradient_clipping"
    r"|(training|validation|test|predict)_step|(train|val|test)_dataloader"
    r"|configure_optimizers"
)

# Buffers of norms that only evaluations read.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def check_parts(model: nn.Module, optim_wrapper: Wrappers) -> None:
    """Reject impossible set-ups; warn about suspicious ones. Nothing is computed.

    Args:
        model: the model.
        optim_wrapper: the wrapper of the model's optimizer, or several.

    Raises:
        ValueError: if the optimizers have no parameter of the model, if the ranks do not
            exchange all gradients, or if the launcher's variables are incomplete.
    """
    check_optimizers(model, optim_wrapper)
    refuse_unexchanged(model)
    started = count_processes()
    if started > comm.get_world_size():
        logger.warning(
            "%d processes were started together, but this one has not joined the others: each "
            "trains its own model. To train one model, first call launch(main), or setup() of a "
            "strategy such as DDPStrategy",
            started,
        )


def trainable(model: nn.Module) -> dict[int, nn.Parameter]:
    """The trainable parameters by their ``id()``, which is faster to compare."""
    return {id(p): p for p in model.parameters() if p.requires_grad}


def set_modes(model: nn.Module) -> None:
    """Put a model into training mode, unless some of its modules are in training mode already."""
    modules = unwrap_model(model).modules()
    if not any(each.training for each in modules if not is_model_wrapper(each)):
        model.train()


def log_modes(model: nn.Module) -> None:
    """Log the layers of a model that stay in evaluation mode, and frozen norms that do not."""
    named = unwrap_model(model).named_modules()
    names = [name for name, module in named if not module.training]
    outer = [name for name in names if name.rpartition(".")[0] not in names]
    if outer and model.training:
        logger.info("Layers that stay in evaluation mode: %s", outer[:10])
    norms = get_bn_modules(model)
    if any(norm.affine and not norm.weight.requires_grad for norm in norms):
        logger.info(
            "A frozen BatchNorm still updates its statistics: its eval() stops that"
        )


def log_iteration_size(trainer: Any) -> None:
    """Log the sizes of an iteration and an epoch, since other trainers count differently."""
    loader = trainer.data_loader
    of_rank = getattr(loader, "batch_size", None) or 0
    size = getattr(loader, "total_batch_size", of_rank * comm.data_parallel_size())
    if size and trainer.epoch_length:
        logger.info(
            "An iteration takes %d samples of all ranks (batches on each: %d); an epoch is %d "
            "iterations",
            trainer.batches_per_step * size,
            trainer.batches_per_step,
            trainer.epoch_length,
        )


def warn_about_calls_in_loss(trainer: Any) -> None:
    """Warn about calls in ``compute_loss`` that change what the trainer does with the loss.

    Without accumulation the trainer drops gradients that ``compute_loss`` leaves, which may be
    intended, as for an adversarial example.
    """
    used = set(names_used(getattr(trainer, "compute_loss", None)))
    calls = used & {"backward", "zero_grad"}
    if calls and trainer.batches_per_step > 1:
        logger.warning(
            "compute_loss calls %s, which changes the gradients that the trainer accumulates: "
            "compute those of an adversarial example by torch.autograd.grad()",
            calls,
        )
    if {"autocast", "scale"} <= used:
        logger.warning(
            "compute_loss calls autocast and scale. If it scales the loss by a GradScaler, nothing "
            "unscales the gradients: AmpOptimWrapper(optimizer, 'float16') does both"
        )


def check_accumulation(batch: Any, losses: Tensors, count: int) -> None:
    """Log what seldom is meant in an accumulation of ``count`` batches.

    Args:
        batch: one of the batches.
        losses: its losses, as the model or ``compute_loss`` returned them.
        count: the number of batches.
    """
    # transformers' BatchEncoding is a mapping, but no dict.
    leaves = tree_leaves({**batch} if isinstance(batch, Mapping) else batch)
    with suppress(RuntimeError):  # sparse and nested tensors cannot be compared
        # -100 is the default of torch's cross entropy. Host-device synchronisations, as below.
        if any((each == -100).any() for each in leaves if isinstance(each, Tensor)):
            log_once(
                logger.info,
                "Labels of -100 are ignored, yet each of the accumulated batches counts alike, "
                "whatever its number of other labels. A trainer's weight(data) can return this "
                "number",
            )
    for name, loss in losses.items():
        divisor: Any = getattr(loss.grad_fn, "_saved_other", None)
        if hasattr(divisor, "tolist") and divisor.tolist() == count:
            log_once(
                logger.info,
                "%s is divided by %d: if this is the number of accumulated batches, the trainer, "
                "which takes their mean, divides by it once more",
                name,
                count,
            )


def warn_about_missing_calls(trainer: Any) -> None:
    """Warn about calls that are missing in an overridden ``run_step``.

    Args:
        trainer: a trainer with a model, during a run.
    """
    waiting = []
    for hook in trainer.hooks:
        # A CallbackHook has a function for the event, or None.
        functions = getattr(hook, "_functions", {})
        if names_used(functions.get("after_backward", hook.after_backward)):
            waiting.append(type(hook).__qualname__)
    if waiting and not trainer._run.has_backward:
        logger.warning(
            "run_step does not call self.after_backward(), which %s may need", waiting
        )
    used = set(names_used(trainer.run_step))
    if "zero_grad" not in used and _adds_up(trainer.model, trainer):
        logger.warning(
            "Gradients add up over all iterations: run_step must call "
            "self.optim_wrapper.zero_grad()"
        )
    wrapper = trainer.optim_wrapper
    does_more = (
        trainer.batches_per_step > 1
        or hasattr(wrapper, "dtype")
        or getattr(wrapper, "_clipping", None)
    )
    if does_more and {"optimizer", "step"} <= used and "optim_wrapper" not in used:
        logger.warning(
            "run_step calls the torch optimizer, so the OptimWrapper around it clips, accumulates "
            "and scales nothing: call self.optim_wrapper.update_params(loss)"
        )


def log_zero_gradients(model: nn.Module) -> None:
    """Log that all gradients are 0, if there are any."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # Host-device synchronisation, once a run.
    if gradients and not any(grad.any() for grad in gradients):
        logger.info(
            "All gradients of this iteration are 0. Is a factor of the loss 0, or do they "
            "underflow in float16? AmpOptimWrapper(optimizer, 'float16') scales the loss"
        )


def warn_about_untrained_modules(trainer: Any) -> None:
    """Warn about modules beside the model, such as a criterion, that no optimizer trains.

    Those in training mode without gradients, such as a teacher, are logged.
    """
    for name, part in _modules_beside(trainer).items():
        if _adds_up(part, trainer):
            logger.warning(
                "%s gets gradients that no optimizer uses: make it a part of the model, or set "
                "requires_grad_(False)",
                name,
            )
        # To initialise and to load a parameter changes it a few times.
        is_trained = [p.grad is not None or p._version > 4 for p in part.parameters()]
        if part.training and is_trained and not any(is_trained):
            logger.info(
                "%s is in training mode, but has no gradients: a teacher with dropout or batch "
                "norm needs eval()",
                name,
            )


def _modules_beside(trainer: Any) -> dict[str, nn.Module]:
    """The modules beside the model that the code of a step names."""
    found = {}
    for step in (getattr(trainer, "compute_loss", None), trainer.run_step):
        # After vars(trainer), Python would take longer to find its attributes, in each step.
        for name in names_used(step):
            known = getattr(step, "__globals__", {}).get(name)
            part = getattr(trainer, name, known)
            if isinstance(part, nn.Module) and part is not trainer.model:
                found[name] = part
    return found


def _adds_up(module: nn.Module, trainer: Any) -> bool:
    """Whether the gradients of a module have never been freed in a run."""
    # Each backward pass into the same gradient raises its version. A freed one begins again.
    changes = [p.grad._version for p in module.parameters() if p.grad is not None]
    others = trainer.done - trainer.start_iter - 1
    return bool(min(changes, default=0) >= others > 2)


def warn_about_rank_differences(model: nn.Module) -> None:
    """Warn, once a run, if the ranks have different weights or buffers. A collective.

    A checkpoint has those of the main process. Running statistics of norms are not compared, since
    no training step reads them. Neither are sharded weights, and sharded and sparse buffers.
    """
    if comm.get_world_size() == 1:
        return
    # Host-device synchronisation, as for the checksums.
    norm = norm_of(p for p in trainable(model).values() if not is_sharded(p))
    checksums = {}
    # DistributedDataParallel may send the first rank's buffers before each forward pass.
    if not getattr(model, "broadcast_buffers", False):
        bare = unwrap_model(model)
        saved = bare.state_dict()
        for name, buffer in bare.named_buffers():
            if name in saved and not name.endswith(_STATISTICS):
                checksums[name] = checksum(buffer)
    norms, buffers = zip(*comm.all_gather((norm, checksums)), strict=True)
    if min(norms) < 0.999999 * max(norms):
        log_once(
            logger.warning,
            "The ranks have different weights. To exchange gradients, pass the trainer "
            "create_ddp_model(model), and call self.model, not the module inside it. A hook that "
            "changes weights must do so on every rank",
        )
    different = names_that_differ(checksums, buffers)
    if different:
        log_once(
            logger.warning,
            "Buffers differ between the ranks, but all ranks would resume with those of the main "
            "process: %s",
            str(different[:5]),
        )


def log_metrics_that_differ(storage: EventStorage) -> None:
    """Log which metrics the ranks have recorded with different values. A collective.

    Only the main process's are written. Measurements of the machine may differ.

    Args:
        storage: the metrics of a run, in which some values may be waiting on a device.
    """
    own = storage.latest()
    names = names_that_differ(own, comm.all_gather(own))
    different = list(filter(storage.is_reproducible, names))
    if different:
        logger.info(
            "The ranks have recorded different values of %s, and the main process's are written. "
            "If compute_loss returns such values beside the losses, their means are written",
            different[:5],
        )


def names_that_differ(own: State, others: Iterable[State]) -> list[str]:
    """The names of values that differ from another state's, if it has that name."""
    # By their texts, since NaN does not equal itself.
    return [
        name
        for name, value in own.items()
        if any(repr(other.get(name, value)) != repr(value) for other in others)
    ]


def without_masks(model: nn.Module, broken: set[str]) -> set[str]:
    """The names of :func:`non_finite` without buffers of -inf, such as a mask, and their copies."""
    masks = tuple(
        f".{name} is inf"
        for name, buffer in unwrap_model(model).named_buffers()
        if (buffer == -math.inf).any() and buffer.max() < math.inf  # synchronises
    )
    return {name for name in broken if not f".{name}".endswith(masks)}


def unsaved_attributes(model: nn.Module) -> State:
    """The numbers and tensors among a model's attributes, which a state_dict() lacks.

    Returns:
        The id of each, and how often it was changed in place, by name.
    """
    return {
        f"{path}.{name}": (id(value), getattr(value, "_version", 0))
        for path, module in unwrap_model(model).named_modules(prefix="model")
        for name, value in {**vars(type(module)), **vars(module)}.items()
        # A tensor of a graph is computed anew, and an inference tensor counts no changes.
        if type(value) in (int, float)
        or (type(value) is Tensor and not (value.grad_fn or value.is_inference()))
    }


def log_unsaved_attributes(model: nn.Module, before: State) -> None:
    """Log which of the :func:`unsaved_attributes` have changed since ``before``."""
    changed = names_that_differ(unsaved_attributes(model), [before])
    if changed:
        logger.info(
            "These attributes change in the run, and a checkpoint has them only if they are "
            "buffers or part of get_extra_state(): %s",
            changed[:5],
        )


def log_parts(model: nn.Module) -> None:
    """Log a table of a model's children, with the model itself in its last row.

    It shows the numbers of all and of trainable parameters, and the modes. The log file also lists
    all modules.
    """
    bare = unwrap_model(model)
    logger.debug("Model:\n%s", bare)
    rows = []
    for name, part in [*bare.named_children(), ("", bare)]:
        known = [p for p in part.parameters() if not is_lazy(p)]
        size = sum(p.numel() for p in known)
        trained = sum(p.numel() for p in known if p.requires_grad)
        mode = "train" if part.training else "eval"
        kind = type(unwrap_model(part)).__name__
        rows.append((name, kind, size, trained, mode))
    logger.info(
        "The model, on %d x %s:\n%s",
        comm.get_world_size(),
        compute_device(bare).type,
        tabulate(rows, ["name", "type", "parameters", "trained", "mode"], intfmt=","),
    )


def warn_about_events(kind: type) -> None:
    """Warn about methods of a class that look like events, and about events without ``super()``.

    The names in a method's code show whether it calls the method of its base class, which costs
    nothing when the method runs.

    Args:
        kind: a class of hooks or of trainers.
    """
    for name in vars(kind):
        is_meant = _OF_OTHERS.match(name) or (
            name[0] != "_" and get_close_matches(name, EVENTS, 1, 0.85)
        )
        callers = (method for key, method in vars(kind).items() if key != name)
        is_called = any(name in names_used(method) for method in callers)
        if is_meant and not is_called and not hasattr(kind.__base__, name):
            logger.warning(
                "%s.%s is not an event, so only your own code calls it; the events are %s. A "
                "trainer's own step is run_step(), its own loss compute_loss(data)",
                kind.__name__,
                name,
                ", ".join(EVENTS),
            )
    for name in (*EVENTS, "__init__"):
        used = [names_used(vars(base).get(name)) for base in kind.__mro__]
        # A method that uses no names does nothing, so it need not be called.
        busy = list(filter(None, used))
        if any(name not in names for names in busy[:-1]):
            logger.warning(
                "%s.%s does not call super().%s(), so the method of its base class does not run",
                kind.__name__,
                name,
                name,
            )
