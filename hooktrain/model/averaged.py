"""Averages of a model's weights over the course of training."""

import copy
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.model.sharding import is_unit
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils.tensors import Device, Tensors, local_tensor

logger = logging.getLogger(__name__)


class BaseAveragedModel(nn.Module):
    """An average of the weights of a model, matched by their names.

    A subclass overrides :meth:`blending_weight`, which decides how much weight each update gives
    to the model's current values.

    It is a module, so a model that has it as a child, such as a student with its teacher, saves it
    too. Parameters are averaged in their own data type, so keep the model in float32: in bfloat16
    an update with a small weight is rounded away. Buffers are copied at each update, except those
    that are not saved (``persistent=False``), such as caches. So BatchNorm statistics are those of
    the model's own weights, which is good enough for a moving average. For other averages, measure
    them before use, in training mode, by :func:`hooktrain.model.update_bn_stats`.

    Args:
        model: the model, which is copied without data parallel wrappers and ``torch.compile``.
        interval: the parameters are averaged at the first of every ``interval`` updates; at least
            1.
        device: the device of the average; None takes the model's.

    Attributes:
        module: the averaged model, in evaluation mode, without gradients. The average of a sharded
            model holds shards under their names and cannot be called; evaluate it by :meth:`swap`.
        steps: the number of updates so far, an int64 tensor.
    """

    steps: Tensor

    def __init__(
        self, model: nn.Module, interval: int = 1, device: Device | None = None
    ) -> None:
        super().__init__()
        self.interval = interval
        self.module = _copy(unwrap_model(model)).to(device).requires_grad_(False).eval()
        self.register_buffer("steps", torch.tensor(0, device=device))
        # The same number in Python: reading the tensor would synchronise in each update.
        self._steps = 0
        self.register_load_state_dict_post_hook(_read_steps)  # type: ignore[no-untyped-call]
        # The names of the tensors that are averaged. All others are copied.
        self._averaged = {
            name
            for name, parameter in self.module.named_parameters()
            if parameter.is_floating_point() or parameter.is_complex()
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the averaged model."""
        return self.module(*args, **kwargs)

    def blending_weight(self, steps: int) -> float:
        """The weight of the current values in the new average, in [0, 1]; 1 forgets the old one.

        Args:
            steps: the number of updates before this one, a multiple of ``interval``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average by the model's current weights.

        This takes one kernel for all parameters, and no host-device synchronisation.

        Raises:
            ValueError: if the parameters or buffers of the model and the average differ.
        """
        averages, weights = self._matched(model)
        _write({n: averages[n] for n in averages.keys() - self._averaged}, weights)
        if self._steps % self.interval == 0:
            old = [averages[name] for name in self._averaged]
            new = [weights[name].to(averages[name].device) for name in self._averaged]
            self._average(old, new)
        self._steps += 1
        self.steps += 1

    def _average(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        weight = self.blending_weight(self._steps)
        torch._foreach_lerp_(averages, weights, weight)

    def reset(self, model: nn.Module) -> None:
        """Restart the average from the model's current weights."""
        averages, weights = self._matched(model)
        _write(averages, weights)
        self._steps = 0
        self.steps.zero_()

    def swap(self, model: nn.Module) -> AbstractContextManager[None]:
        """Give the model the averaged weights and buffers inside a ``with`` block.

        The values are written in place, so other references to the tensors see them too. At the
        end the model's own values are restored bit for bit, even after an error. This takes the
        memory of one more copy of the model. Autocast's cache of weights in lower precision is
        cleared.

        Returns:
            A context manager. If it is never entered, a warning says that nothing was exchanged.

        Raises:
            ValueError: on entry, if the parameters or buffers of the model and the average differ.
        """
        return _Swap(self, model)

    def _matched(self, model: nn.Module) -> tuple[Tensors, Tensors]:
        """The tensors of the average and those of the model, by name."""
        averages = _tensors(self.module)
        weights = _tensors(unwrap_model(model))
        different = averages.keys() ^ weights.keys()
        if different:
            raise ValueError(
                f"the model and its average differ in {sorted(different)[:5]}"
            )
        return averages, weights


@dataclass
class _Swap(AbstractContextManager[None]):
    """A context in which a model has the averaged weights."""

    average: BaseAveragedModel
    model: nn.Module
    own: Tensors | None = None  # the model's weights meanwhile

    def __enter__(self) -> None:
        averages, weights = self.average._matched(self.model)
        self.own = {name: weight.detach().clone() for name, weight in weights.items()}
        _write(weights, averages)
        torch.clear_autocast_cache()

    def __exit__(self, *error: object) -> None:
        # The tensors are looked up again, since an evaluation unshards those of a sharded model.
        _, weights = self.average._matched(self.model)
        _write(weights, self.own or {})
        torch.clear_autocast_cache()

    def __del__(self) -> None:
        if self.own is None:
            logger.warning("swap() exchanges nothing: it needs `with ema.swap():`")


class ExponentialMovingAverage(BaseAveragedModel):
    """The exponential moving average of a model's weights.

    An update is ``average = (1 - momentum) * average + momentum * weight``. The average starts
    from the weights at construction (Polyak averaging; Mean Teacher, arXiv:1703.01780).

    Args:
        model: see :class:`BaseAveragedModel`.
        momentum: the weight of the current values, in (0, 1]; 1 keeps a plain copy. Other libraries
            take the decay, ``1 - momentum``, so a momentum from 0.9 to below 1 causes a warning.
        interval: see :class:`BaseAveragedModel`.
        device: see :class:`BaseAveragedModel`.
        warmup: whether to use ``max(momentum, 9 / (10 + n))`` after ``n`` updates, which forgets
            the first weights sooner.

    Raises:
        ValueError: if momentum is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        interval: int = 1,
        device: Device | None = None,
        *,
        warmup: bool = False,
    ) -> None:
        super().__init__(model, interval, device)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum, or 1 - decay, must be in (0, 1]: {momentum!r}")
        if 0.9 <= momentum < 1:
            logger.warning(
                "momentum=%g is the weight of the current values, 1 - decay, so the average "
                "forgets fast. Did you mean momentum=%g, decay=%g?",
                momentum,
                1 - momentum,
                momentum,
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

    The first update copies the weights, so the weights at construction do not count. The hook
    :class:`hooktrain.engine.hooks.EMA` can begin late in training. Measure the statistics of
    BatchNorm before you use the average; see :class:`BaseAveragedModel`.
    """

    def blending_weight(self, steps: int) -> float:
        """``1 / n`` for the ``n``-th averaged weights."""
        return 1 / (steps // self.interval + 1)


@torch.no_grad()
def _write(targets: Tensors, sources: Tensors) -> None:
    for name, target in targets.items():
        shape = sources[name].shape
        if target.shape != shape and not isinstance(target, nn.Parameter):
            target.resize_(shape)  # a buffer that grows
    # torch copies tensors of one data type together.
    for dtype in {target.dtype for target in targets.values()}:
        pairs = [
            (target, sources[name])
            for name, target in targets.items()
            if target.dtype is dtype
        ]
        torch._foreach_copy_(*zip(*pairs, strict=True))  # type: ignore[arg-type]


def _read_steps(average: Any, _: Any) -> None:
    average._steps = int(average.steps)  # a host-device synchronisation, once per load


def _copy(model: nn.Module) -> nn.Module:
    """A copy of a model. torch cannot copy a sharded model, so only its tensors are copied."""
    if not any(map(is_unit, model.modules())):
        return copy.deepcopy(model)
    _tensors(model)  # this reshards the model, so that each rank copies its shards
    return _copy_tensors(model, {})


def _copy_tensors(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Bare modules with copies of the tensors; ``memo`` is for :func:`copy.deepcopy`."""
    bare = nn.Module()
    bare._parameters = copy.deepcopy(module._parameters, memo)
    bare._buffers = copy.deepcopy(module._buffers, memo)
    bare._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module.named_children():
        bare.add_module(name, _copy_tensors(child, memo))
    return bare


def _tensors(model: nn.Module) -> Tensors:
    """Parameters and saved buffers by name, each once; local shards of sharded ones."""
    names: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        if is_unit(module):  # an evaluation leaves its tensors unsharded
            module.reshard()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(tensor, f"{path}.{name}".lstrip("."))
    return {name: local_tensor(tensor) for tensor, name in names.items()}
