"""Finds what a machine computes wrong without an error."""

import copy
import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from statistics import mode
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.random import fork_rng

from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.trainers import SimpleTrainer
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.utils import comm
from hooktrain.utils.env import determinism
from hooktrain.utils.periods import Period
from hooktrain.utils.tensors import compute_device, is_sharded, local_tensor

_DIFFERS = (
    "iteration %d makes no update: it was computed twice, and a loss, a buffer or the gradient of "
    "a parameter differs: %s. In the first check of a run, suspect a step that is not "
    "deterministic%s; after that, the machine. Where ranks exchange gradients, it is the rank "
    "whose loss or buffer differs"
)
_REPLICAS = (
    "the weights of the ranks differ: their bytes add up to %d, but not on the ranks %s. Of two "
    "ranks either may be wrong. Go on from a checkpoint before that, on another machine"
)


class ReplayCheck(HookBase):
    """Computes a step twice every ``period`` iterations, and ends the run if a bit differs.

    The batches of such a step are copied. After its backward pass the losses, gradients and buffers
    are computed again with the same random numbers, before anything is updated. A healthy machine
    gets the same bits. All else is as without the hook: the bits of weights, buffers and
    generators, and the position in the data. A step that is not deterministic differs in the first
    check, and the error says so.

    What both passes share shows no difference, such as a weight that changed before. So a check
    also adds the bytes of the weights that each rank has as a whole. The sum travels with the
    metrics: the next exchange (``gather_metric_period``), which also comes before each checkpoint,
    ends the run if a rank has another one. Shards and buffers differ anyway, and are left out.

    A check costs a forward and a backward pass, and memory for another set of gradients.

    Args:
        period: in iterations, or like ``"1 epoch"``. The first iteration of a run is not checked,
            since DistributedDataParallel arranges its buckets there.

    Raises:
        TypeError: when training starts, if the trainer or its model has a step of its own.
        RuntimeError: on all ranks, for a difference.
    """

    needs_every_rank = True

    def __init__(self, period: int | str) -> None:
        self._period = Period(period)

    def before_train(self) -> None:
        """Refuse a step that cannot be computed without its update."""
        if self.trainer.run_step.__func__ is not SimpleTrainer.run_step:
            raise TypeError(
                "ReplayCheck computes the gradients of SimpleTrainer.run_step() twice, and this "
                "trainer or its model has a step of its own, which may update in between"
            )

    def before_step(self) -> None:
        """Let a due step compute its gradients twice."""
        trainer = self.trainer
        if self._period.is_due(trainer) and trainer.iter > trainer.start_iter:
            trainer.compute_gradients = self._compute_twice

    def _compute_twice(self, batches: Iterator[Any]) -> Any:
        trainer = self.trainer
        del trainer.compute_gradients  # the method of its class is there again
        model = unwrap_model(trainer.model)
        self._compare_ranks(model)
        taken = [next(batches) for _ in range(trainer.batches_per_step)]
        # Copies, since a model may change its batch, and so may broken memory.
        again, buffers = copy.deepcopy((taken, list(model.buffers())))
        device = compute_device(model)
        devices = [] if device.type == "cpu" else [device]
        states = random.getstate(), np.random.get_state()
        with fork_rng(devices, device_type=device.type):
            result = trainer.compute_gradients(iter(taken))
        random.setstate(states[0])
        np.random.set_state(states[1])
        first = list(_rows(model, result[0]))
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        for wrapper in wrappers_by_name(trainer.optim_wrapper).values():
            wrapper.inner_count -= wrapper.accumulative_counts
        second = _rows(model, trainer.compute_gradients(iter(again))[0])
        texts = comm.on_all_ranks(partial(_difference, first, second))
        found = list(filter(None, texts))
        if found:
            raise RuntimeError(_DIFFERS % (trainer.iter, found[:8], determinism()))
        return result

    def _compare_ranks(self, model: nn.Module) -> None:
        """Let the next exchange compare the weights that every rank has as a whole."""
        total = 0
        for parameter in model.parameters():
            if not is_sharded(parameter):
                row = parameter.detach().flatten().view(torch.uint8)
                total += int(row.sum())  # host-device synchronisation
        self.trainer.compare_ranks(total, partial(_name_ranks, total))


def _name_ranks(own: int) -> None:
    """Name the ranks whose sums differ from most. A collective."""
    sums = comm.all_gather(own)
    others = [rank for rank, each in enumerate(sums) if each != mode(sums)]
    raise RuntimeError(_REPLICAS % (mode(sums), others))


def _rows(model: nn.Module, losses: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Copies of what a step computes on this rank. What DDP does not average comes first."""
    gradients = ((name, each.grad) for name, each in model.named_parameters())
    for name, each in chain(losses.items(), model.named_buffers(), gradients):
        if each is not None:
            yield name, local_tensor(each.detach()).flatten().clone()


def _difference(first: Iterable[Any], second: Iterable[Any]) -> str:
    """The first number whose bits differ, with both values; "" if there is none."""
    for (name, before), (_, after) in zip(first, second, strict=True):
        wrong = before.view(torch.uint8) != after.view(torch.uint8)
        if wrong.any():  # host-device synchronisation
            place = int(wrong.nonzero()[0]) // before.itemsize
            one, other = before[place].item(), after[place].item()
            return f"rank {comm.get_rank()}: {name} has {one!r}, and then {other!r}"
    return ""
