"""Averages of the weights that a model has during training."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils.tensors import local_tensor

logger = logging.getLogger(__name__)

Tensors: TypeAlias = dict[str, Tensor]


class BaseAveragedModel(nn.Module):
    """An average of the weights of a model, matched by their names.

    A subclass overrides :meth:`blending_weight`, which says how much of the present
    weights comes in.

    It is a module: as a child of a model, such as the teacher of a student, it is saved
    with it. Parameters are averaged in their own data type, so keep the model in
    float32: in bfloat16 a small weight changes nothing. Buffers are copied at each
    update. So the statistics of BatchNorm are those of the model's own weights, which is
    good enough for a moving average. For others measure them before use, in training
    mode, by :func:`hooktrain.model.update_bn_stats`.

    Args:
        model: is copied. Data parallel wrappers and ``torch.compile`` are looked through.
        interval: average the parameters at the first update and at every so many from
            there, at least 1.
        device: where the average is kept. None is where the model is.

    Attributes:
        module: the averaged model, in eval mode, without gradients. That of a sharded
            model holds shards under their names and cannot be called: evaluate it in
            :meth:`swap`.
        steps: the number of updates so far, all of them; an int64 tensor.
    """

    steps: Tensor

    def __init__(
        self,
        model: nn.Module,
        interval: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.interval = interval
        self.module = _copy(unwrap_model(model)).to(device)
        self.module.eval()
        self.module.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(0, device=device))
        # The same number. To read the tensor would wait for the device in each update.
        self._steps = 0
        self.register_load_state_dict_post_hook(_read_steps)  # type: ignore[no-untyped-call]
        self._averaged: set[str] = set()  # the names; all else is copied
        for name, parameter in self.module.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                self._averaged.add(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the averaged model."""
        return self.module(*args, **kwargs)

    def blending_weight(self, steps: int) -> float:
        """How much of the present weights comes in, in [0, 1]; 1 forgets the average.

        Args:
            steps: the number of updates before this one, a multiple of ``interval``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the present weights of the model into the average.

        One kernel for all parameters, and no synchronisation with the device.

        Raises:
            ValueError: if the model has other parameters or buffers than the average.
        """
        averages, weights = self._matched(model)
        for name in averages.keys() - self._averaged:
            averages[name].copy_(weights[name])
        if self._steps % self.interval == 0:
            old = []
            new = []
            for name in self._averaged:
                average = averages[name]
                old.append(average)
                new.append(weights[name].to(average.device))
            self._average(old, new)
        self._steps += 1
        self.steps += 1

    def _average(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        weight = self.blending_weight(self._steps)
        torch._foreach_lerp_(averages, weights, weight)

    def reset(self, model: nn.Module) -> None:
        """Start again from the present weights of the model."""
        averages, weights = self._matched(model)
        _write(averages, weights)
        self._steps = 0
        self.steps.zero_()

    @contextmanager
    def swap(self, model: nn.Module) -> Iterator[None]:
        """Put the averaged weights and buffers into the model, and its own back later.

        They are written in place, so everybody who holds the tensors sees the same
        values. The model's own come back bit for bit, even after an error. This takes
        the memory of one more copy of the model.

        Raises:
            ValueError: if the model has other parameters or buffers than the average.
        """
        averages, weights = self._matched(model)
        own = {name: weight.detach().clone() for name, weight in weights.items()}
        _write(weights, averages)
        try:
            yield
        finally:
            # An evaluation leaves whole tensors in a sharded model: match them again.
            _, weights = self._matched(model)
            _write(weights, own)

    def _matched(self, model: nn.Module) -> tuple[Tensors, Tensors]:
        """The tensors of the average and of the model, by the same names."""
        averages = _tensors(self.module)
        weights = _tensors(unwrap_model(model))
        different = averages.keys() ^ weights.keys()
        if different:
            names = sorted(different)[:5]
            raise ValueError(f"the model and its average differ in {names}")
        return averages, weights


class ExponentialMovingAverage(BaseAveragedModel):
    """The exponential moving average of a model's weights: ``momentum`` comes in.

    ``average = (1 - momentum) * average + momentum * weight``, starting from the weights
    at construction (Polyak averaging; Mean Teacher, arXiv:1703.01780).

    Args:
        model: see :class:`BaseAveragedModel`.
        momentum: in (0, 1]; 1 keeps a plain copy. Others call ``1 - momentum`` the decay:
            it is probably meant where this is above 0.5, which is warned of.
        interval: see :class:`BaseAveragedModel`.
        device: see :class:`BaseAveragedModel`.
        warmup: use ``max(momentum, 9 / (10 + n))`` after ``n`` updates, which forgets the
            start sooner.

    Raises:
        ValueError: for a momentum out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        interval: int = 1,
        device: torch.device | str | None = None,
        *,
        warmup: bool = False,
    ) -> None:
        super().__init__(model, interval, device)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum must be in (0, 1]: {momentum!r}")
        if 0.5 < momentum < 1:
            logger.warning(
                "momentum=%g is the weight of the new value, and forgets fast. For a decay "
                "of %g give momentum=%g",
                momentum,
                momentum,
                1 - momentum,
            )
        self.momentum = momentum
        self.warmup = warmup

    def blending_weight(self, steps: int) -> float:
        """``momentum``, or more during the warm-up."""
        if not self.warmup:
            return self.momentum
        decay = (1 + steps) / (10 + steps)
        return max(self.momentum, 1 - decay)


class StochasticWeightAverage(BaseAveragedModel):
    """The equal average of the weights at each interval (SWA, arXiv:1803.05407).

    The first update copies the weights, so those at construction do not count. To begin
    late in training, see the hook :class:`hooktrain.engine.hooks.EMA`. Measure the
    statistics of BatchNorm before the average is used, see :class:`BaseAveragedModel`.
    """

    def blending_weight(self, steps: int) -> float:
        """One part of all that were averaged, with this one."""
        return 1 / (steps // self.interval + 1)


@torch.no_grad()
def _write(targets: Tensors, sources: Tensors) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])


def _read_steps(average: Any, _: Any) -> None:
    average._steps = int(average.steps)  # waits for the device


def _copy(model: nn.Module) -> nn.Module:
    """A copy; of a sharded model, which torch cannot copy, the tensors alone."""
    if not any(map(_is_sharded, model.modules())):
        return copy.deepcopy(model)
    _tensors(model)  # so that each rank copies its part
    return _copy_tensors(model, {})


def _copy_tensors(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Bare modules with copies of the tensors; in ``memo``, what is copied already."""
    bare = nn.Module()
    bare._parameters = copy.deepcopy(module._parameters, memo)
    bare._buffers = copy.deepcopy(module._buffers, memo)
    bare._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module.named_children():
        bare.add_module(name, _copy_tensors(child, memo))
    return bare


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(type(module), "reshard")  # a method of torch's FSDPModule


def _tensors(model: nn.Module) -> Tensors:
    """Parameters and buffers by name, each once; of sharded ones this rank's part."""
    for module in model.modules():
        if _is_sharded(module):  # an evaluation leaves the tensors whole
            module.reshard()  # type: ignore[operator]
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: local_tensor(tensor) for name, tensor in named}
