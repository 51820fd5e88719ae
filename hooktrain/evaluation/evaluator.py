"""Runs a model over a data set and passes its outputs to evaluators."""

import inspect
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, repeat
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hooktrain.data import StreamSampler, TrainLoader
from hooktrain.evaluation.testing import Results
from hooktrain.model.sharding import is_unit
from hooktrain.model.wrappers import call_model
from hooktrain.utils import comm, timer
from hooktrain.utils.logger import log_once, pretty_seconds
from hooktrain.utils.names import add_note, did_you_mean
from hooktrain.utils.tensors import (
    Device,
    checksum,
    compute_device,
    is_sharded,
    mover_to,
    to_device,
    with_items,
)
from hooktrain.utils.workers import start_workers

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 5.0
_END = object()
_NO_MEAN = (
    "%s of a batch is not the mean over its samples, so the result depends on the size of the "
    "batches: MetricEvaluator(..., whole=True) calls it once for all batches"
)
# The code objects of metric functions that were checked.
_seen: set[Any] = set()
# Names of the first parameter of metrics that take the targets first.
_NAMES_OF_TARGETS = {"target", "targets", "label", "labels", "y_true"}


class DatasetEvaluator(ABC):
    """The base class of evaluators, which collect data from each batch and compute results.

    Subclass it for a metric. :func:`inference_on_dataset` calls :meth:`reset` once,
    :meth:`process` with each batch, and :meth:`evaluate` at the end. A class without a ``reset`` or
    a ``process`` cannot be instantiated: without ``reset``, an evaluator would count the data of
    earlier evaluations again.
    """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""

    @abstractmethod
    def process(self, inputs: Any, outputs: Any) -> None:
        """Process one batch.

        Args:
            inputs: the batch of the data loader, on the device of the model.
            outputs: the outputs of the model for this batch.
        """

    def evaluate(self) -> Results | None:
        """Compute the results of all batches. Every rank calls it, so it may be collective.

        Returns:
            Metrics by task, such as ``{"classification": {"accuracy": 99.0}}``. Return the same on
            all ranks if the ranks base decisions on them, such as when to stop.
        """
        return None


class MetricEvaluator(DatasetEvaluator):
    """Evaluates by a metric of outputs and targets.

    The targets of a batch are the last item of a tuple or list, or the item ``target_key``.

    Args:
        metric: a function of outputs and targets that returns the mean over a batch. Its results
            are averaged over the samples of all ranks, in float64. A function without a closure is
            also called with the halves of the first batch, to check that it is a mean.
            Alternatively an object with ``update(outputs, targets)``, ``compute()`` and
            ``reset()``, such as torchmetrics' objects, which communicate between the ranks
            themselves.
        target_key: the key of the targets if a batch is a dict, otherwise their index.
        whole: whether the function is called once, with the outputs and targets of all batches of
            all ranks, on the CPU of the main process. This is required for a metric that is not a
            mean over the samples, such as F1, R2, AUC or a correlation. Tensors are concatenated,
            also those in dicts and tuples, and lists are chained.

    The result has the name of the function, or of the object's class. To name several objects, use
    torchmetrics' ``MetricCollection({"top1": ..., "top5": ...})``.

    Raises:
        TypeError: for a class instead of an object.
        ValueError: for a function that takes the targets first, such as scikit-learn's.
    """

    def __init__(
        self, metric: Any, target_key: str | int = "label", *, whole: bool = False
    ) -> None:
        _check_metric(metric)
        self._name = getattr(metric, "__name__", type(metric).__name__)
        if not hasattr(metric, "compute"):
            metric = _Whole(metric) if whole else _Mean(metric)
        self._metric = metric
        self._target_key = target_key

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self._metric.reset()

    @torch.no_grad()
    def process(self, inputs: Any, outputs: Any) -> None:
        """Process one batch."""
        targets = targets_of(inputs, self._target_key)
        try:
            if hasattr(self._metric, "to") and isinstance(outputs, Tensor):
                self._metric.to(outputs.device)
            self._metric.update(outputs, targets)
        except Exception as error:
            add_note(
                error,
                f"{self._name} gets the outputs (in evaluation mode a model must return these, not "
                "a loss), then the targets, and must return one number; for several numbers pass a "
                "list of metrics",
            )
            raise

    def evaluate(self) -> Results:
        """Compute the metric over the batches of all ranks, under its name. Collective."""
        result = self._metric.compute()
        if isinstance(result, Mapping):
            return dict(result)
        return {self._name: result}


class _Mean:
    """Averages a metric that is a mean over a batch over all samples."""

    def __init__(self, metric: Callable[[Any, Any], Any]) -> None:
        self._metric = metric
        self.reset()

    def reset(self) -> None:
        self._sum: Any = 0.0
        self._count = 0

    def update(self, outputs: Any, targets: Any) -> None:
        count = _number_of_samples(outputs, targets)
        mean = self._metric(outputs, targets)
        _warn_about_non_mean(self._metric, outputs, targets, count, mean)
        # In float64 whatever the metric's type, except on MPS, which has no doubles.
        dtype = torch.float32 if getattr(mean, "is_mps", False) else torch.float64
        mean = torch.as_tensor(mean, dtype=dtype).reshape(())
        self._sum = self._sum + mean * count
        self._count += count

    def compute(self) -> Any:
        # A host-device synchronisation, once an evaluation.
        own = (float(self._sum), self._count)
        sums, counts = zip(*comm.all_gather(own), strict=True)
        return math.fsum(sums) / sum(counts)


class _Whole(_Mean):
    """Computes a metric of all batches together."""

    def reset(self) -> None:
        self._batches: list[Any] = []

    def update(self, outputs: Any, targets: Any) -> None:
        self._batches.append((outputs, targets))

    def compute(self) -> Any:
        # A host-device synchronisation, once an evaluation.
        own = to_device(self._batches, torch.device("cpu"))
        batches = [*chain.from_iterable(comm.all_gather(own))]
        return comm.on_main_process(lambda: self._metric(*_joined(batches)))


def _number_of_samples(outputs: Any, targets: Any) -> int:
    """The length of the targets, or of the first task's targets if there are several tasks.

    A list or tuple of targets has an item for each sample or for each task. The outputs decide: a
    list has an item for each sample; a tensor, or a tuple or dict of tensors, has all samples.
    """
    if isinstance(targets, list | tuple) and not isinstance(outputs, list):
        targets = outputs[0] if isinstance(outputs, tuple) else outputs
    while isinstance(targets, Mapping):
        targets = next(iter(targets.values()))
    return len(targets)


def _warn_about_non_mean(
    metric: Any, outputs: Any, targets: Any, size: int, whole: Any
) -> None:
    """Warn if a function's result for a batch is not the mean of the results for its halves.

    Each function is checked once, with its first batch of two or more samples. A function with a
    closure is not checked, since it may count its calls.
    """
    if not inspect.isfunction(metric) or metric.__closure__ or metric.__code__ in _seen:
        return
    half = size // 2
    if half == 0:
        return
    _seen.add(metric.__code__)
    # Outputs may not be sliceable, and a half may be too small.
    with suppress(Exception):
        # Host-device synchronisation, once per function.
        first = float(metric(outputs[:half], targets[:half]))
        second = float(metric(outputs[half:], targets[half:]))
        error = abs(half * first + (size - half) * second - size * whole)
        # In bfloat16 the rounding error of a mean is up to 0.2 %.
        is_fine = getattr(outputs, "dtype", None) in (torch.float32, torch.float64)
        tolerance = 0.0003 if is_fine else 0.003
        if error > tolerance * size * (abs(first) + abs(second)):
            logger.warning(_NO_MEAN, metric.__name__)


def _joined(parts: Any) -> Any:
    """Concatenate the values of several batches."""
    first = parts[0]
    if isinstance(first, Tensor):
        # Models of transformers return the loss of a batch too, as a single number.
        return torch.cat([torch.atleast_1d(part) for part in parts])
    if isinstance(first, Mapping):
        return with_items(
            first, {key: _joined([part[key] for part in parts]) for key in first}
        )
    if isinstance(first, tuple):
        return [_joined(each) for each in zip(*parts, strict=True)]
    return [*chain.from_iterable(parts)]


def _check_metric(metric: Any) -> None:
    if isinstance(metric, type):
        raise TypeError(f"pass an object, not a class: {metric.__name__}(...)")
    first = ""
    with suppress(TypeError, ValueError):  # some functions have no signature
        signature = inspect.signature(getattr(metric, "update", metric))
        first = next(iter(signature.parameters), "")
    if first in _NAMES_OF_TARGETS:
        raise ValueError(
            f"a metric gets the outputs first, then the targets, but {metric!r} begins with "
            f"{first!r}: pass a function of (outputs, targets) that calls it"
        )


def targets_of(batch: Any, key: str | int) -> Any:
    """The targets in a batch: the last item of a tuple or list, or the item ``key``."""
    if isinstance(batch, tuple | list) and isinstance(key, str):
        if len(batch) > 2:
            log_once(
                logger.info,
                f"The targets are the last of {len(batch)} items of a batch; target_key=1 (or "
                "label_key=1) takes the second",
            )
        return batch[-1]
    if isinstance(batch, Mapping) and key not in batch:
        hint = did_you_mean(key, batch)
        raise KeyError(f"a batch has no {key!r} (label_key or target_key){hint}")
    return batch[key]


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one.

    Args:
        evaluators: the evaluators, each of which gets every batch, in this order. An object
            without ``process`` is a metric for :class:`MetricEvaluator`.
    """

    def __init__(self, evaluators: Sequence[Any]) -> None:
        # A class in place of its object has no evaluator's type either, and is refused.
        self._evaluators = [
            each if hasattr(type(each), "process") else MetricEvaluator(each)
            for each in evaluators
        ]

    def reset(self) -> None:
        """Reset each evaluator."""
        for evaluator in self._evaluators:
            evaluator.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        """Pass the batch to each evaluator."""
        for evaluator in self._evaluators:
            evaluator.process(inputs, outputs)

    def evaluate(self) -> Results:
        """Combine the results of the evaluators on this rank in one dict.

        Raises:
            ValueError: if two evaluators return results under the same name.
        """
        merged: Results = {}
        for evaluator in self._evaluators:
            results = evaluator.evaluate()
            if results is None:
                if comm.is_main_process():
                    name = type(evaluator).__name__
                    logger.warning("%s.evaluate() returned nothing", name)
                continue
            twice = merged.keys() & results.keys()
            if twice:
                raise ValueError(
                    f"several evaluators return results under the names {sorted(twice)}: rename "
                    "them by torchmetrics' MetricCollection({'name': metric, ...})"
                )
            merged.update(results)
        return merged


def inference_on_dataset(
    model: Callable[[Any], Any],
    data_loader: Iterable[Any] | Mapping[str, Iterable[Any]],
    evaluator: Any,
    *,
    step: str | Callable[[Any, Any], Any] = "test_step",
) -> Results:
    """Call a model with every batch of a loader, without gradients, and evaluate its outputs.

    Batches are moved to the device of the model. If the model has a ``test_step``, it is called
    instead of the model itself. As in training, the items of a dict whose keys are parameters of
    the model's ``forward`` are passed as keyword arguments.

    A module is put into evaluation mode. Afterwards, even after an error, each of its submodules is
    back in its previous mode. The progress is logged, at most every five seconds.

    Each rank calls this with its own share of the data, which may be empty. The ranks of a sharded
    model compute together, so a rank with fewer batches calls the model with stand-ins, which the
    evaluator does not get.

    The host waits for the accelerator only at the end, so only the total time is exact.

    Args:
        model: a module, or any function of a batch. A function has no mode, and its batches are
            not moved.
        data_loader: a loader that yields the batches once, or a dict of several loaders by name,
            which are evaluated one after the other.
        evaluator: a :class:`DatasetEvaluator`, a metric for :class:`MetricEvaluator`, or a list of
            these. None only measures the speed. With several loaders, one evaluator for all, or a
            dict of evaluators by the same names.
        step: the method to call instead of the model, if the model has it: ``"val_step"`` during
            training, ``"test_step"`` afterwards. Or a function of the model and a batch, such as
            ``lambda model, batch: model(batch[0])``.

    Returns:
        The results of the evaluator, or ``{}`` for None. For several loaders, a dict of these.

    Raises:
        KeyError: if a loader has no evaluator of its name.
        TypeError: if ``data_loader`` is a data set.
        ValueError: if a single process got no batch, or if the loader never ends.
    """
    if isinstance(data_loader, Mapping):
        results = {}
        for name, loader in data_loader.items():
            logger.info("Evaluating %s:", name)
            own = evaluator[name] if isinstance(evaluator, Mapping) else evaluator
            results[name] = inference_on_dataset(model, loader, own, step=step)
        return results
    sampler = getattr(data_loader, "sampler", None)
    if isinstance(data_loader, TrainLoader) or isinstance(sampler, StreamSampler):
        raise ValueError(
            f"data_loader never ends; use build_test_loader(): {data_loader!r}"
        )
    _warn_about_samples(data_loader)
    if evaluator is None:
        evaluator = []
    if not isinstance(evaluator, Sequence):
        evaluator = [evaluator]
    evaluator = DatasetEvaluators(evaluator)
    evaluator.reset()
    module = as_module(model)
    inner = model
    if isinstance(model, DistributedDataParallel):
        # DDP's forward may exchange buffers, and would wait for ranks with fewer batches.
        inner = model.module
    if callable(step):
        forward = partial(step, inner)
    else:
        forward = getattr(inner, step, None) or partial(call_model, inner)
    move = mover_to(module)
    # If several ranks compute one batch together, only the first one's evaluator processes it.
    place = comm.get_rank() * comm.data_parallel_size()
    is_first = place % comm.get_world_size() == 0
    with inference_context(module), torch.no_grad():
        for inputs, is_own in _with_progress(data_loader, module):
            inputs = move(inputs)
            try:
                outputs = forward(inputs)
            except TypeError as error:
                add_note(
                    error,
                    "to call the model in another way, pass step=a function of (model, "
                    "batch); several loaders are passed as a dict by name",
                )
                raise
            if is_own and is_first:
                evaluator.process(inputs, outputs)
        if module.training:
            logger.warning(
                "Evaluated in training mode: model.train() was called during the evaluation"
            )
    return evaluator.evaluate()  # type: ignore[no-any-return]


def _warn_about_samples(loader: Any) -> None:
    """Warn about a loader that drops samples, or repeats some to fill up the ranks' shares."""
    if not isinstance(loader, DataLoader):
        return
    size = length_hint(loader.dataset)
    given = getattr(loader.sampler, "total_size", size)
    if loader.drop_last:
        given -= length_hint(loader.sampler) % (loader.batch_size or 1)
    if given != size:
        log_once(
            logger.warning,
            f"The loader does not yield each of its {size} samples once, as build_test_loader() "
            "does without drop_last",
        )


def _with_progress(
    data_loader: Iterable[Any], module: nn.Module
) -> Iterator[tuple[Any, bool]]:
    """The batches to call the model with, and whether each is this rank's own.

    Progress is logged from time to time, and the duration at the end.
    """
    start = last_line = time.perf_counter()
    done = 0
    own = start_workers(data_loader)
    batches: Any = zip(own, repeat(True))
    device = compute_device(module)
    if computes_together(module):
        batches = in_step(own, device)
    before: list[Any] = []
    for done, batch in enumerate(batches, 1):
        # Its first batch has started any loader inside the given one, which draws a seed.
        before = before or _random_state(device)
        yield batch
        timer.beat()
        now = time.perf_counter()
        if now - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = now
            _log_progress(done, now - start)
    if done == 0 and comm.get_world_size() == 1:
        raise ValueError(f"data_loader has no batch to evaluate: {data_loader!r}")
    if done and _random_state(device) != before:
        log_once(
            logger.info,
            "The evaluation drew random numbers. If it should not, is the data augmented, or does "
            "the model draw in evaluation mode, as F.dropout(x) does without training=False?",
        )
    if device.type != "cpu":
        # A host-device synchronisation.
        torch.accelerator.synchronize(device)
    _log_progress(done, time.perf_counter() - start)


def _random_state(device: torch.device) -> list[Any]:
    """What changes when a global generator draws: Python's, numpy's, and torch's on two devices."""
    module = torch.get_device_module(device)
    return [
        random.getstate(),
        repr(np.random.get_state()),
        checksum(torch.get_rng_state()),
        checksum(getattr(module, "get_rng_state", torch.get_rng_state)()),
    ]


def _log_progress(done: int, seconds: float) -> None:
    logger.info(
        "Evaluated %d %s in %s (%.4f s each)",
        done,
        "batch" if done == 1 else "batches",
        pretty_seconds(seconds),
        seconds / max(1, done),
    )


def as_module(model: Any) -> nn.Module:
    """The model itself, or an empty module for anything else, such as a function."""
    return model if isinstance(model, nn.Module) else nn.Module()


@contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards restore the mode of each submodule."""
    before = model.training
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        # Some modules do more in train() than set the flag, such as unmerging weights.
        model.train(before)
        for module, mode in modes:
            module.training = mode


def computes_together(model: nn.Module) -> bool:
    """Whether a call of the model is a collective, since its parameters are sharded over ranks."""
    # After a forward pass the parameters of the outermost unit may still be unsharded.
    has_units = any(map(is_unit, model.modules()))
    return has_units or any(map(is_sharded, model.parameters()))


def in_step(
    data_loader: Iterable[Any], device: Device = "cpu"
) -> Iterator[tuple[Any, bool]]:
    """The batches of this rank, followed by stand-ins as long as another rank has batches.

    For each batch the ranks exchange one number on ``device``, so loaders need no length and may
    end at different times. A stand-in is the rank's own last batch. A rank without any batch gets
    the first batch of another rank, which is pickled, so loaders should yield tensors on the CPU.

    Yields:
        A batch, and whether it is this rank's own instead of a stand-in.
    """
    batches = iter(data_loader)
    batch = next(batches, _END)
    stand_in = batch
    owners = comm.all_gather(batch is not _END)
    if True in owners and False in owners:
        owner = owners.index(True)
        stand_in = comm.broadcast(batch, src=owner)
    while comm.any_rank(batch is not _END, device):
        is_own = batch is not _END
        if is_own:
            stand_in = batch
        yield stand_in, is_own
        batch = next(batches, _END)
