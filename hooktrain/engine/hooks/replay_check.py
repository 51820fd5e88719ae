"""Detects silent data corruption: wrong results of a machine that reports no error."""

import copy
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from torch import Tensor, nn
from torch.random import fork_rng

from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.trainers import SimpleTrainer
from hooktrain.events import EventStorage
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm
from hooktrain.utils.periods import Period, PeriodLike
from hooktrain.utils.tensors import (
    Tensors,
    as_bytes,
    compute_device,
    is_sharded,
    local_box,
    local_tensor,
)

Rows: TypeAlias = Iterable[tuple[str, Tensor]]  # named tensors of one dimension

_DIFFERS = (
    "iteration %d makes no update: it was computed twice, with different results on these ranks: "
    "%s. In the first check of a run, suspect a nondeterministic step "
    "(torch.use_deterministic_algorithms); later, suspect the machine, and resume from the last "
    "checkpoint on another one. Ranks exchange gradients and shards of weights, so first suspect "
    "a rank whose weights or buffers differ, then one whose loss differs"
)
_REPLICAS = (
    "iteration %d makes no update: the weights of the ranks %s differ from those of most ranks "
    "that should have the same. If there are only two, either may be wrong. Resume on another "
    "machine, from a checkpoint that is older than the previous check"
)


class ReplayCheck(HookBase):
    """Every ``period`` iterations, computes a step twice, and ends the run if a bit differs.

    The batches of such a step are copied. After the backward pass, and before the update, the
    losses, gradients and buffers are computed again with the same random numbers. A healthy machine
    gets the same bits. The hook leaves weights, buffers, generators and the position in the data
    exactly as they would be without it. A nondeterministic step fails the first check, and the
    error says so.

    Both passes use the same weights, so they cannot reveal a weight that was already wrong. A check
    therefore also compares the sum of the weights' bytes between ranks that hold the same weights:
    all ranks, or the replicas of a shard (HSDP). Not compared are shards that only one rank holds,
    buffers, and weights that ranks do not synchronize: those that DistributedDataParallel ignores,
    and unsharded ones beside shards.

    Changes that hooks make to the gradients in ``after_backward`` come after the check.

    A check costs a forward and a backward pass, and memory for a second set of gradients.

    Args:
        period: in iterations, or like ``"1 epoch"``. The first iteration of a run is not checked,
            since DistributedDataParallel rearranges its buckets in it.

    Raises:
        TypeError: when training starts, if the trainer or its model has its own step.
        RuntimeError: on all ranks, if a check finds a difference.
    """

    needs_every_rank = True

    def __init__(self, period: PeriodLike) -> None:
        self._period = Period(period)

    def before_train(self) -> None:
        """Refuse a step that cannot be computed without its update."""
        if self.trainer.__class__.run_step is not SimpleTrainer.run_step:
            raise TypeError(
                "ReplayCheck computes the gradients of SimpleTrainer.run_step() twice, but this "
                "trainer or its model has its own step, which may update in between"
            )

    trainer: SimpleTrainer

    def before_step(self) -> None:
        """If a check is due, make the step compute its gradients twice."""
        trainer = self.trainer
        if self._period.is_due(trainer) and trainer.iter > trainer.start_iter:
            trainer.replay = self._compute_twice

    def _compute_twice(self, batches: Iterator[Any]) -> Any:
        trainer = self.trainer
        trainer.replay = None
        model = unwrap_model(trainer.model)
        parts = _parts(model)
        taken = [next(batches) for _ in range(trainer.batches_per_step)]
        # Copies, since the model, or faulty memory, may change a batch.
        again, buffers = copy.deepcopy((taken, list(model.buffers())))
        device = compute_device(model)
        devices = [] if device.type == "cpu" else [device]
        states = random.getstate(), np.random.get_state()
        with fork_rng(devices, device_type=device.type):
            losses = trainer.compute_gradients(iter(taken))
        random.setstate(states[0])
        np.random.set_state(states[1])
        first = list(_computed(model, losses))
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        trainer.optim_wrapper.inner_count -= len(taken)
        # With CUDA graphs these losses overwrite the first ones. The metrics that the model
        # records are dropped, since the first pass has recorded them.
        with EventStorage(trainer.iter):
            losses = trainer.compute_gradients(iter(again))
        second = _computed(model, losses)

        def compare() -> tuple[str, tuple[int, int]]:
            text = _difference(first, second)
            if text and _parts(model) != parts:
                text = f"rank {comm.get_rank()}: the sum of the bytes of its weights"
            return text, parts

        texts, everywhere = zip(*comm.on_all_ranks(compare), strict=True)
        found = list(filter(None, texts))
        if found:
            raise RuntimeError(_DIFFERS % (trainer.iter, found[:8]))
        _compare_ranks(trainer.iter, everywhere)
        return losses


def _parts(model: nn.Module) -> tuple[int, int]:
    """A checksum of which parts of the weights this rank has, and the sum of their bytes."""
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    has_shards = any(map(is_sharded, model.parameters()))
    parts, sums = [], []
    for name, each in model.named_parameters():
        if is_sharded(each) or not (has_shards or name in ignored):
            parts.append((name, local_box(each)))
            sums.append(as_bytes(local_tensor(each.detach())).sum())
    total = int(sum(sums))  # host-device synchronisation
    return crc32(repr(parts).encode()), total


def _compare_ranks(iteration: int, everywhere: Sequence[tuple[int, int]]) -> None:
    """Raise an error that names the ranks whose sum differs from that of most of their replicas."""
    # Of the sums of the same parts, the most frequent comes last and remains.
    usual = dict(sorted(everywhere, key=Counter(everywhere).__getitem__))
    others = [
        rank for rank, (parts, total) in enumerate(everywhere) if usual[parts] != total
    ]
    if others:
        raise RuntimeError(_REPLICAS % (iteration, others))


def _computed(model: nn.Module, losses: Tensors) -> Rows:
    """Copies of a step's losses, buffers and gradients (last, since DDP averages them)."""
    gradients = ((f"{name}.grad", p.grad) for name, p in model.named_parameters())
    for name, each in chain(losses.items(), model.named_buffers(), gradients):
        if each is not None:
            yield name, local_tensor(each.detach()).to_dense().flatten().clone()


def _difference(first: Rows, second: Rows) -> str:
    """The first number whose bits differ, with both values; "" if there is none."""
    for (name, before), (_, after) in zip(first, second, strict=True):
        wrong = as_bytes(before) != as_bytes(after)
        if wrong.any():  # host-device synchronisation
            place = int(wrong.nonzero()[0]) // before.itemsize
            one, other = before[place].item(), after[place].item()
            return f"rank {comm.get_rank()}: {name} is {one!r}, and then {other!r}"
    return ""
