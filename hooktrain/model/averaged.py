"""Averages of the weights that a model has during training."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils.tensors import local_tensor


class BaseAveragedModel(nn.Module):
    """An average of the weights of a model, matched by their names.

    A subclass overrides :meth:`blending_weight`, which says how much of the present weights comes
    in; or :meth:`avg_func`, as in MMEngine, and then the first update copies the weights.

    It is a module: as a child of a model, such as the teacher of a student, it is saved with it.
    Parameters are averaged in their own data type, so keep those of the model in float32: in
    bfloat16 a small weight changes nothing. Buffers are copied at every update: statistics such as
    BatchNorm's are averages already and have to fit the counters beside them. But they are
    statistics of the model's own weights. That is good enough for a moving average, which stays
    close to the model. For other averages measure them before use, with BatchNorm in training
    mode::

        average.module.train()
        update_bn_stats(average.module, data_loader)
        average.module.eval()

    Args:
        model: is copied. Data parallel wrappers and ``torch.compile`` are looked through.
        interval: average the parameters at the first update and at every so many from there, at
            least 1.
        device: where the average is kept. None is where the model is.
        update_buffers: average buffers of floats too, instead of copying them.

    Attributes:
        module: the averaged model, in eval mode, without gradients. That of a sharded model holds
            shards under their names and cannot be called: evaluate it in :meth:`swap`.
        steps: the number of updates so far, all of them; an int64 tensor.
    """

    steps: Tensor

    def __init__(
        self,
        model: nn.Module,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval must be an integer of at least 1: {interval!r}")
        self.interval = interval
        self.update_buffers = update_buffers
        self.module = (
            _copied(unwrap_model(model)).eval().requires_grad_(False).to(device)
        )
        self.register_buffer("steps", torch.tensor(0, device=device))
        # The same number: to read it from a tensor would wait for the device in each update.
        self._steps = 0
        self.register_load_state_dict_post_hook(_read_steps)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the averaged model."""
        return self.module(*args, **kwargs)

    def blending_weight(self, steps: int) -> float:
        """How much of the present weights comes in, in [0, 1]; 1 forgets the average.

        Args:
            steps: the number of updates before this one, a multiple of ``interval``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no blending_weight or avg_func"
        )

    def avg_func(
        self, averaged_param: Tensor, source_param: Tensor, steps: int
    ) -> None:
        """Average one tensor in place; by default all are averaged by :meth:`blending_weight`.

        Args:
            averaged_param: the average, to be changed.
            source_param: the present value.
            steps: as in :meth:`blending_weight`.
        """
        averaged_param.lerp_(source_param, self.blending_weight(steps))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the present weights of the model into the average.

        A few kernels, and no synchronisation with the device.

        Raises:
            ValueError: if the model has other parameters or buffers than the averaged one.
        """
        for (averaged, *_), (averages, weights) in self._groups(model).items():
            if not averaged:
                torch._foreach_copy_(averages, weights)
            elif self._steps % self.interval == 0:
                self._average(averages, weights)
        self._steps += 1
        self.steps += 1

    @torch.no_grad()
    def reset(self, model: nn.Module) -> None:
        """Start again from the present weights of the model."""
        for averages, weights in self._groups(model).values():
            torch._foreach_copy_(averages, weights)
        self._steps = 0
        self.steps.zero_()

    @contextmanager
    def swap(self, model: nn.Module) -> Iterator[None]:
        """Put the averaged weights and buffers into the model, and its own back at the end.

        They are written in place, so everybody who holds the tensors sees the same values. The
        model's own come back bit for bit, even after an error, and the average stays as it is. This
        takes the memory of one more copy of the model.

        Raises:
            ValueError: if the model has other parameters or buffers than the averaged one.
        """
        groups = self._groups(model)
        with torch.no_grad():
            raw = {
                kind: [weight.clone() for weight in groups[kind][1]] for kind in groups
            }
            for averages, weights in groups.values():
                torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            with torch.no_grad():
                # The tensors once more: an evaluation leaves whole ones in a sharded model.
                for kind, (_, weights) in self._groups(model).items():
                    torch._foreach_copy_(weights, raw[kind])

    def _average(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        weights = [w.to(a.device) for a, w in zip(averages, weights, strict=True)]
        if type(self).avg_func is BaseAveragedModel.avg_func:
            torch._foreach_lerp_(averages, weights, self.blending_weight(self._steps))
        elif self._steps == 0:
            torch._foreach_copy_(averages, weights)
        else:
            for average, weight in zip(averages, weights, strict=True):
                self.avg_func(average, weight, self._steps)

    def _groups(self, model: nn.Module) -> dict[Any, tuple[list[Tensor], list[Tensor]]]:
        """The tensors of the average and of the model, one group for each kernel.

        One kernel takes many tensors if they have one data type and are on one device.
        """
        averages, weights = _tensors(self.module), _tensors(unwrap_model(model))
        ours, theirs = (
            {k: t.shape for k, t in each.items()} for each in (averages, weights)
        )
        if ours != theirs:
            names = sorted({name for (_, name), _ in ours.items() ^ theirs.items()})[:5]
            raise ValueError(
                f"the model and its average differ in name or shape: {names}"
            )
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for key, average in averages.items():
            averaged = key[0] == "parameter" or self.update_buffers
            averaged &= average.is_floating_point() or average.is_complex()
            group = groups[averaged, average.dtype, average.device]
            group[0].append(average)
            group[1].append(weights[key])
        return groups


class ExponentialMovingAverage(BaseAveragedModel):
    """The exponential moving average of a model's weights: ``momentum`` is what comes in.

    ``average = (1 - momentum) * average + momentum * weight``, starting from the weights at
    construction (Polyak averaging; Mean Teacher, arXiv:1703.01780).

    Args:
        model: see :class:`BaseAveragedModel`.
        momentum: in (0, 1]; 1 keeps a plain copy. Others call ``1 - momentum`` the decay.
        interval: see :class:`BaseAveragedModel`.
        device: see :class:`BaseAveragedModel`.
        update_buffers: see :class:`BaseAveragedModel`.
        warmup: use ``max(momentum, 9 / (10 + n))`` after ``n`` updates, which forgets the start
            sooner.
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
        *,
        warmup: bool = False,
    ) -> None:
        super().__init__(model, interval, device, update_buffers)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum must be in (0, 1]: {momentum!r}")
        self.momentum = momentum
        self.warmup = warmup

    def blending_weight(self, steps: int) -> float:
        """``momentum``, or more during the warm-up."""
        return max(
            self.momentum, 1 - (1 + steps) / (10 + steps) if self.warmup else 0.0
        )


class MomentumAnnealingEMA(ExponentialMovingAverage):
    """An exponential moving average that forgets fast at first, then more and more slowly.

    ``max(momentum, gamma / (gamma + n))`` of the present weights comes in after ``n`` updates, so
    the first one copies them. From MMEngine.

    Args:
        model: see :class:`BaseAveragedModel`.
        momentum: that of the end, in (0, 1].
        gamma: how long it takes to get there: ``gamma * (1 / momentum - 1)`` updates; positive.
        **kwargs: see :class:`ExponentialMovingAverage`.
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        gamma: float = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, momentum, **kwargs)
        if not gamma > 0:
            raise ValueError(f"gamma must be positive: {gamma!r}")
        self.gamma = gamma

    def blending_weight(self, steps: int) -> float:
        """``max(momentum, gamma / (gamma + steps))``."""
        return max(self.momentum, self.gamma / (self.gamma + steps))


class StochasticWeightAverage(BaseAveragedModel):
    """The equal average of the weights at each interval (SWA, arXiv:1803.05407).

    The first update copies the weights, so those at construction do not count. To begin late in
    training, see the hook :class:`~hooktrain.engine.hooks.EMA`. Measure the statistics of BatchNorm
    before the average is used, see :class:`BaseAveragedModel`.
    """

    def blending_weight(self, steps: int) -> float:
        """One part of all that were averaged, with this one."""
        return 1 / (steps // self.interval + 1)


def _read_steps(average: Any, _: Any) -> None:
    average._steps = int(average.steps)  # waits for the device


def _copied(model: nn.Module) -> nn.Module:
    """A copy without gradients; of a sharded model, which torch cannot copy, the tensors alone."""
    if not any(hasattr(type(module), "reshard") for module in model.modules()):
        return copy.deepcopy(model)  # copying a parameter does not copy its gradient
    _tensors(model)
    copies: dict[nn.Module, nn.Module] = {
        module: nn.Module() for module in model.modules()
    }
    memo: dict[int, Any] = {}  # so that a shared tensor stays one
    for module, shell in copies.items():
        shell._parameters = copy.deepcopy(module._parameters, memo)
        shell._buffers = copy.deepcopy(module._buffers, memo)
        shell._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        shell._modules = {
            name: child and copies[child] for name, child in module._modules.items()
        }
    return copies[model]


def _tensors(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Parameters and buffers by kind and name, each once; of sharded ones this rank's part.

    A sharded model has whole tensors after an evaluation. They are split again first.
    """
    found: dict[Tensor, tuple[str, str]] = {}
    for prefix, module in model.named_modules():
        if hasattr(type(module), "reshard"):
            module.reshard()
        for kind, tensors in (
            ("parameter", module._parameters),
            ("buffer", module._buffers),
        ):
            for name, tensor in tensors.items():
                if tensor is not None:
                    found.setdefault(
                        tensor, (kind, f"{prefix}.{name}" if prefix else name)
                    )
    return {key: local_tensor(tensor) for tensor, key in found.items()}
