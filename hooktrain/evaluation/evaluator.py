"""Runs a model over a data set and hands its outputs to evaluators."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, repeat
from operator import length_hint
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hooktrain.utils import comm, timer
from hooktrain.utils.dtensor import is_sharded
from hooktrain.utils.logger import pretty_seconds, show_progress
from hooktrain.utils.registry import did_you_mean
from hooktrain.utils.workers import start_workers

logger = logging.getLogger(__name__)

_CALLBACKS = ("on_start", "before_inference", "after_inference", "on_end")
_SECONDS_BETWEEN_LINES = 5.0
_WARMUP_BATCHES = 5
_END = object()


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
            inputs: what the data loader gave.
            outputs: what the model made of it.
        """

    def evaluate(self) -> Mapping[str, Any] | None:
        """Sum up all batches, of all ranks: every rank calls it.

        Returns:
            Metrics by task, such as ``{"classification": {"accuracy": 99.0}}``. Give the same on
            every rank if ranks decide by it, for example when to stop.
        """
        return None


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one.

    Args:
        evaluators: each one gets every batch, in this order.

    Raises:
        TypeError: for something that is no evaluator.
    """

    def __init__(self, evaluators: Sequence[DatasetEvaluator]) -> None:
        self._evaluators = tuple(evaluators)
        if wrong := [e for e in evaluators if isinstance(e, type) or not hasattr(e, "process")]:
            raise TypeError(f"evaluators must be DatasetEvaluator objects, but got {wrong[0]!r}")

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
                raise TypeError(f"{kind}.evaluate must return a dict of results, not {results!r}")
            if twice := sorted(merged.keys() & results.keys()):
                raise ValueError(f"several evaluators give results under the names {twice!r}")
            merged.update(results)
        return merged


def inference_on_dataset(
    model: Callable[[Any], Any],
    data_loader: Iterable[Any],
    evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
    callbacks: Mapping[str, Callable[[], None]] | None = None,
    step: str = "test_step",
) -> dict[str, Any]:
    """Call a model with every batch of a loader, without gradients, and evaluate its outputs.

    A model that owns its steps has its ``test_step`` called, any other is called itself.

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
        evaluator: one or several; None only measures the speed.
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
            raise ValueError(f"data_loader never ends, so build_test_loader() it: {data_loader!r}")
    for name in callbacks or {}:
        if name not in _CALLBACKS:
            raise ValueError(f"there is no callback {name!r}{did_you_mean(name, _CALLBACKS)}")
    callbacks = {**dict.fromkeys(_CALLBACKS, lambda: None), **(callbacks or {})}
    several = [] if evaluator is None else evaluator
    evaluator = DatasetEvaluators(several if isinstance(several, Sequence) else [several])
    evaluator.reset()
    module = model if isinstance(model, nn.Module) else nn.Module()  # a function has no parameters
    accelerator = next((p.device for p in module.parameters() if p.device.type != "cpu"), None)
    progress = _Progress(length_hint(data_loader, -1), accelerator)
    # DDP's own forward may exchange buffers, and would wait for ranks that have fewer batches.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    forward = getattr(inner, step, inner)
    together = computes_together(module)
    with inference_context(module), torch.no_grad():
        callbacks["on_start"]()
        mine = start_workers(data_loader)
        for inputs, own in in_step(mine) if together else zip(mine, repeat(True)):
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
    return evaluator.evaluate()


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
        logger.info("Start inference on %s batches", "?" if total < 0 else total)
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
        left = (self._lap_end - self._start) / self.batches * (self._total - self.batches)
        watched = show_progress("Evaluating", self.batches, self._total, max(0.0, left))
        if not watched and self._lap_end - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._log_line()
        if self.batches == min(_WARMUP_BATCHES, self._total - 1):
            self._synchronize()
            self._warmup = self.batches
            self._seconds = dict.fromkeys(self._seconds, 0.0)

    def log_summary(self) -> None:
        """Log the whole time, and that of the model alone, without the first few batches."""
        self._synchronize()
        measured, ranks = max(1, self.batches - self._warmup), comm.get_world_size()
        text = "Total inference %stime: %s (%.6f s / iter per device, on %d devices)"
        whole, compute = sum(self._seconds.values()), self._seconds["Inference"]
        for name, seconds in (("", whole), ("pure compute ", compute)):
            logger.info(text, name, pretty_seconds(seconds), seconds / measured, ranks)

    def _synchronize(self) -> None:
        """Wait for the accelerator."""
        if self._accelerator is not None:
            torch.accelerator.synchronize(self._accelerator)  # a host-device synchronisation
        self.lap("Inference")

    def _log_line(self) -> None:
        self._synchronize()
        self._last_line = self._lap_end
        mean = {n: s / (self.batches - self._warmup) for n, s in self._seconds.items()}
        mean["Total"] = sum(mean.values())
        times = " ".join(f"{name}: {seconds:.4f} s/iter." for name, seconds in mean.items())
        done = str(self.batches)
        if self._total >= 0:
            left = mean["Total"] * max(0, self._total - self.batches)
            done, times = f"{done}/{self._total}", f"{times} ETA={pretty_seconds(left)}"
        logger.info("Inference done %s. %s", done, times)
