"""Runs a model over a data set and hands its outputs to evaluators."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import cycle, islice, repeat
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooktrain.utils import comm, timer
from hooktrain.utils.logger import pretty_seconds, show_progress
from hooktrain.utils.names import did_you_mean
from hooktrain.utils.tensors import is_sharded, mover_to
from hooktrain.utils.workers import start_workers

logger = logging.getLogger(__name__)

_CALLBACKS = ("on_start", "before_inference", "after_inference", "on_end")
_SECONDS_BETWEEN_LINES = 5.0
_WARMUP_BATCHES = 5
_END = object()
_limit: ContextVar[tuple[int | None, list[float]]] = ContextVar(
    "_limit", default=(None, [])
)


class DatasetEvaluator:
    """Takes what it needs of each batch, and sums it up at the end.

    Subclass it for a metric. :func:`inference_on_dataset` calls :meth:`reset` once,
    :meth:`process` with each batch, and :meth:`evaluate` at the end.
    """

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""

    def process(self, inputs: Any, outputs: Any) -> None:
        """Take in one batch.

        Args:
            inputs: what the data loader gave, on the device of the model.
            outputs: what the model made of it.
        """

    def evaluate(self) -> Mapping[str, Any] | None:
        """Sum up all batches, of all ranks: every rank calls it.

        Returns:
            Metrics by task, such as ``{"classification": {"accuracy": 99.0}}``. Give the same on
            every rank if ranks decide by it, for example when to stop.
        """
        return None


class MetricEvaluator(DatasetEvaluator):
    """Evaluates by a metric of outputs and targets.

    The targets of a batch are its last item, or what it has under ``target_key``.

    Args:
        metric: a function of outputs and targets that returns the mean over a batch. Its results
            are averaged over the samples of all ranks. Or an object with ``update(outputs,
            targets)``, ``compute()`` and ``reset()``, such as those of torchmetrics, which bring
            the ranks together by themselves.
        target_key: of the targets in a batch that is a dict.

    Raises:
        TypeError: if it is neither.
    """

    def __init__(self, metric: Any, target_key: str = "label") -> None:
        if not callable(metric):
            raise TypeError(
                f"an evaluator needs process(), or is a metric to call: {metric!r}"
            )
        self._metric, self._target_key = metric, target_key
        self._adds_up = hasattr(metric, "compute")
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self._sum, self._count = torch.zeros(()), 0
        if self._adds_up:
            self._metric.reset()

    @torch.no_grad()
    def process(self, inputs: Any, outputs: Any) -> None:
        """Take in one batch."""
        targets = targets_of(inputs, self._target_key)
        if self._adds_up:
            if isinstance(outputs, Tensor) and hasattr(self._metric, "to"):
                self._metric.to(outputs.device)
            self._metric.update(outputs, targets)
        else:
            self._sum = self._sum + self._metric(outputs, targets) * len(targets)
            self._count += len(targets)

    def evaluate(self) -> dict[str, Any]:
        """The metric over all batches of all ranks, by its name. Collective."""
        if self._adds_up:
            result = self._metric.compute()
        else:
            # The transfer waits for the device: a host-device synchronisation, once an evaluation.
            sums, counts = zip(
                *comm.all_gather((float(self._sum), self._count)), strict=True
            )
            result = math.fsum(sums) / sum(counts)
        name = getattr(self._metric, "__name__", type(self._metric).__name__)
        return dict(result) if isinstance(result, Mapping) else {name: result}


def targets_of(batch: Any, key: str) -> Any:
    """The targets in a batch: the last item of a tuple or list, else what is under ``key``.

    Raises:
        ValueError: if there is nothing of that name.
    """
    if isinstance(batch, tuple | list):
        return batch[-1]
    if key not in (keys := batch if isinstance(batch, Mapping) else ()):
        text = f"a batch must be a tuple, or a dict with targets under {key!r}, and this is a "
        raise ValueError(
            f"{text}{type(batch).__name__} without{did_you_mean(key, keys)}"
        )
    return batch[key]


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one.

    Args:
        evaluators: each one gets every batch, in this order. One without ``process`` is a metric
            for :class:`MetricEvaluator`.

    Raises:
        TypeError: for something that is neither.
    """

    def __init__(self, evaluators: Sequence[Any]) -> None:
        if kinds := [each for each in evaluators if isinstance(each, type)]:
            raise TypeError(
                f"evaluators must be objects, but got the class {kinds[0]!r}"
            )
        self._evaluators = [
            each if hasattr(each, "process") else MetricEvaluator(each)
            for each in evaluators
        ]

    def reset(self) -> None:
        """Reset each evaluator."""
        for evaluator in self._evaluators:
            evaluator.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        """Give the batch to each evaluator."""
        for evaluator in self._evaluators:
            evaluator.process(inputs, outputs)

    def evaluate(self) -> dict[str, Any]:
        """The results of all evaluators in one dictionary, on each rank those returned there.

        Raises:
            TypeError: an evaluator returns something else.
            ValueError: two evaluators give results under one name.
        """
        merged: dict[str, Any] = {}
        for evaluator in self._evaluators:
            results: Any = evaluator.evaluate() or {}
            if not isinstance(results, Mapping):
                kind = type(evaluator).__name__
                raise TypeError(
                    f"{kind}.evaluate must return a dict of results, not {results!r}"
                )
            if twice := sorted(merged.keys() & results.keys()):
                raise ValueError(
                    f"several evaluators give results under the names {twice!r}"
                )
            merged.update(results)
        return merged


def inference_on_dataset(
    model: Callable[[Any], Any],
    data_loader: Iterable[Any],
    evaluator: Any,
    callbacks: Mapping[str, Callable[[], None]] | None = None,
    step: str = "test_step",
) -> dict[str, Any]:
    """Call a model with every batch of a loader, without gradients, and evaluate its outputs.

    A model that owns its steps has its ``test_step`` called, any other is called itself, with
    batches on its device.

    A module is in evaluation mode meanwhile; afterwards, and after an error too, each of its
    submodules is back in the mode it was in. A bar on the terminal shows the progress; where nobody
    watches one, a line does, at most every five seconds.

    With several ranks each one calls this with its own share of the data, which may be empty. The
    ranks of a sharded model compute together: those with fewer batches call it with stand-ins,
    which the evaluator does not see.

    Times are those of the host. An accelerator is waited for only before a line is logged and after
    the warm-up, so totals are right, and work that was queued counts where the host waited for it.

    Args:
        model: a module, or any function of a batch.
        data_loader: gives the batches once; without a length there is no ETA.
        evaluator: a :class:`DatasetEvaluator`, or a metric as :class:`MetricEvaluator` takes it; or
            several of them in a list. None only measures the speed.
        callbacks: functions without arguments: ``on_start`` and ``on_end`` are called once,
            ``before_inference`` and ``after_inference`` around each call of the model.
        step: the method to call instead of the model, if the model has it: ``"val_step"`` during
            training, ``"test_step"`` afterwards.

    Returns:
        What the evaluator returned, or ``{}`` for nothing.

    Raises:
        TypeError: ``data_loader`` is a data set, or ``evaluator`` is no evaluator, or returns no
            dict.
        ValueError: the only rank got no batch, the loader never ends, or a callback's name is
            unknown.
    """
    for part in (data_loader, getattr(data_loader, "sampler", None)):
        if isinstance(part, cycle) or getattr(part, "endless", False):
            raise ValueError(
                f"data_loader never ends, so build_test_loader() it: {data_loader!r}"
            )
    for name in callbacks or {}:
        if name not in _CALLBACKS:
            raise ValueError(
                f"there is no callback {name!r}{did_you_mean(name, _CALLBACKS)}"
            )
    callbacks = {**dict.fromkeys(_CALLBACKS, lambda: None), **(callbacks or {})}
    if not isinstance(evaluator, Sequence):
        evaluator = () if evaluator is None else [evaluator]
    evaluator = DatasetEvaluators(evaluator)
    evaluator.reset()
    module = (
        model if isinstance(model, nn.Module) else nn.Module()
    )  # a function has no parameters
    accelerator = next(
        (p.device for p in module.parameters() if p.device.type != "cpu"), None
    )
    total, (limit, estimates) = length_hint(data_loader, -1), _limit.get()
    progress = _Progress(total if limit is None else min(total, limit), accelerator)
    # DDP's own forward may exchange buffers, and would wait for ranks that have fewer batches.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    forward = getattr(inner, step, inner)
    together = computes_together(module)
    move = mover_to(module)
    with inference_context(module), torch.no_grad():
        callbacks["on_start"]()
        mine = islice(start_workers(data_loader), limit)
        for inputs, own in in_step(mine) if together else zip(mine, repeat(True)):
            inputs = move(inputs)
            progress.lap("Dataloading")
            callbacks["before_inference"]()
            outputs = forward(inputs)
            callbacks["after_inference"]()
            progress.lap("Inference")
            if own:
                evaluator.process(inputs, outputs)
            progress.end_batch()
        callbacks["on_end"]()
    if progress.batches == 0 and comm.get_world_size() == 1:
        raise ValueError(f"data_loader gave no batch to evaluate: {data_loader!r}")
    progress.log_summary()
    results: dict[str, Any] = evaluator.evaluate()
    if limit is not None:
        estimates.append(progress.seconds_per_batch() * max(total, progress.batches))
    return results


@contextmanager
def first_batches(count: int) -> Iterator[list[float]]:
    """Let evaluations inside of the block look at so many batches only, to see that they work.

    Yields:
        A list. Each evaluation appends the seconds that it would take for all of its batches.
    """
    estimates: list[float] = []
    token = _limit.set((count, estimates))
    try:
        yield estimates
    finally:
        _limit.reset(token)


@contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards each submodule is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        # For modules whose train() does more than set the flag, such as unmerging weights.
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


def computes_together(model: nn.Module) -> bool:
    """Whether a call of the model is a collective, since its parameters are sharded over ranks."""
    # Right after a forward pass the outermost parameters may still be whole.
    wrapped = any(hasattr(module, "reshard") for module in model.modules())
    return wrapped or any(map(is_sharded, model.parameters()))


def in_step(data_loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """The batches of this rank, and then stand-ins for as long as another rank has batches.

    Each batch costs one exchange of one number, so that loaders need no length and may end at
    different times. A stand-in is the rank's own last batch; a rank that has none gets the first
    of another rank, which is pickled, so loaders should give tensors on the CPU.

    Yields:
        A batch, and whether it is one of this rank's, not a stand-in.
    """
    batches = iter(data_loader)
    stand_in = batch = next(batches, _END)
    owners = comm.all_gather(batch is not _END)
    if True in owners and False in owners:
        stand_in = comm.broadcast(batch, src=owners.index(True))
    while comm.any_rank(batch is not _END):
        stand_in = stand_in if batch is _END else batch
        yield stand_in, batch is not _END
        batch = next(batches, _END)


class _Progress:
    """Measures where the time goes, and logs it from time to time.

    Args:
        total: the number of batches; -1 if that is unknown.
        accelerator: where the model computes; None on the CPU.
    """

    def __init__(self, total: int, accelerator: torch.device | None) -> None:
        logger.debug("Start inference on %s batches", "?" if total < 0 else total)
        self._total, self._accelerator = total, accelerator
        self.batches = self._warmup = 0
        self._seconds = dict.fromkeys(("Dataloading", "Inference", "Eval"), 0.0)
        self._start = self._lap_end = self._last_line = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap under a name."""
        now = time.perf_counter()
        self._seconds[name] += now - self._lap_end
        self._lap_end = now

    def end_batch(self) -> None:
        """Count a batch, and show that."""
        self.lap("Eval")
        timer.beat()
        self.batches += 1
        left = (
            (self._lap_end - self._start) / self.batches * (self._total - self.batches)
        )
        watched = show_progress("Evaluating", self.batches, self._total, max(0.0, left))
        if not watched and self._lap_end - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._log_line()
        if self.batches == min(_WARMUP_BATCHES, self._total - 1):
            self._synchronize()
            self._warmup = self.batches
            self._seconds = dict.fromkeys(self._seconds, 0.0)

    def seconds_per_batch(self) -> float:
        """The mean so far, with the first ones."""
        return (time.perf_counter() - self._start) / max(1, self.batches)

    def log_summary(self) -> None:
        """Log the whole time, and the means of a batch, without the first few of them."""
        self._synchronize()
        measured = max(1, self.batches - self._warmup)
        whole, compute = sum(self._seconds.values()), self._seconds["Inference"]
        text = "Evaluated %d batches in %s (%.4f s each, %.4f s in the model)"
        duration = pretty_seconds(self._lap_end - self._start)
        logger.info(text, self.batches, duration, whole / measured, compute / measured)

    def _synchronize(self) -> None:
        """Wait for the accelerator."""
        if self._accelerator is not None:
            torch.accelerator.synchronize(
                self._accelerator
            )  # a host-device synchronisation
        self.lap("Inference")

    def _log_line(self) -> None:
        self._synchronize()
        self._last_line = self._lap_end
        mean = {n: s / (self.batches - self._warmup) for n, s in self._seconds.items()}
        mean["Total"] = sum(mean.values())
        times = " ".join(
            f"{name}: {seconds:.4f} s/iter." for name, seconds in mean.items()
        )
        done = str(self.batches)
        if self._total >= 0:
            left = mean["Total"] * max(0, self._total - self.batches)
            done, times = f"{done}/{self._total}", f"{times} ETA={pretty_seconds(left)}"
        logger.info("Inference done %s. %s", done, times)
