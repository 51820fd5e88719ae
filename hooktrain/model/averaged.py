"""What all averages of a model's weights have in common; the kinds stand in ``averages.py``."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hooktrain.utils.dtensor import is_sharded, load_full_state_dict, local_tensor
from hooktrain.utils.registry import unwrap_model

__all__ = ["BaseAveragedModel"]

# Where a module keeps a tensor: its `_parameters` or `_buffers`, and the key there. Walking through
# a model takes much longer than looking into known places, which also hold what was replaced.
_Place: TypeAlias = tuple[dict[str, Any], str]


class BaseAveragedModel(ABC):
    """An average of the weights that a model has had.

    ``average = (1 - w) * average + w * weight`` at an :meth:`update`, starting from the weights at
    construction. A subclass says what ``w`` is, by :meth:`blending_weight`.

    Parameters are averaged in their own data type, so keep those of the model in float32: in
    bfloat16 a ``w`` near 0 changes nothing. Buffers are copied at every update, those of floats
    too: statistics such as BatchNorm's are averages already, and have to fit the counters beside
    them.

    They are statistics of the model's own weights, though. That is good enough for a moving
    average, which stays close to the model. For others, replace them right before the average is
    used, with the average's BatchNorm layers in training mode::

        average.module.train()
        update_bn_stats(average.module, data_loader)
        average.module.eval()

    Args:
        model: is copied; data parallel wrappers and ``torch.compile`` are looked through.
        interval: take in the parameters at the first update and every so many from there, at
            least 1.

    Attributes:
        module: the averaged model, in eval mode, without gradients. That of a sharded model has its
            shards by their names, and cannot be called: evaluate it by :meth:`swap`.
        interval: see above.
        updates: how many updates it has seen, all of them.
    """

    def __init__(self, model: nn.Module, *, interval: int = 1) -> None:
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval must be an integer of at least 1: {interval!r}")
        self.interval = interval
        self.updates = 0
        self.module = _copied(unwrap_model(model)).eval().requires_grad_(False)
        self._linked: list[nn.Module] = []
        self._sharded: list[Any] = []
        self._blended: list[tuple[list[_Place], list[_Place]]] = []
        self._copied: list[tuple[list[_Place], list[_Place]]] = []

    @abstractmethod
    def blending_weight(self, updates: int) -> float:
        """How much of the present weights comes in, in [0, 1]; 1 forgets the average.

        Args:
            updates: how many were made before, a multiple of ``interval``.
        """

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the present weights of the model into the average.

        A few kernels, and no synchronisation with the device.

        Raises:
            ValueError: the model has other parameters or buffers than the averaged one.
        """
        self._link(model)
        if self.updates % self.interval == 0:
            weight = self.blending_weight(self.updates)
            for averages, weights in self._blended:
                if weight == 1:  # whatever the average is, be it not a number
                    torch._foreach_copy_(_tensors(averages), _tensors(weights))
                else:
                    torch._foreach_lerp_(_tensors(averages), _tensors(weights), weight)
        for averages, weights in self._copied:
            torch._foreach_copy_(_tensors(averages), _tensors(weights))
        self.updates += 1

    @torch.no_grad()
    def reset(self, model: nn.Module) -> None:
        """Start over from the present weights of the model."""
        self._link(model)
        for averages, weights in self._blended + self._copied:
            torch._foreach_copy_(_tensors(averages), _tensors(weights))
        self.updates = 0

    @contextmanager
    def swap(self, model: nn.Module) -> Iterator[None]:
        """Put the averaged weights and buffers into the model, and its own ones back at the end.

        Written in place, so whoever else holds the tensors sees the same values. The model's own
        values come back bit for bit, whatever happens inside, and the average stays as it is.
        Meanwhile this takes the memory of one more copy of the model.

        Raises:
            ValueError: the model has other parameters or buffers than the averaged one.
        """
        self._link(model)
        pairs = self._blended + self._copied
        with torch.no_grad():
            raw = [[tensor.clone() for tensor in _tensors(weights)] for _, weights in pairs]
        try:
            with torch.no_grad():
                for averages, weights in pairs:
                    torch._foreach_copy_(_tensors(weights), _tensors(averages))
            yield
        finally:
            _reshard(self._sharded)
            with torch.no_grad():
                for (_, weights), own in zip(pairs, raw, strict=True):
                    torch._foreach_copy_(_tensors(weights), own)

    def state_dict(self) -> dict[str, Any]:
        """``module``, the state of the averaged model (not copied), and the number of updates."""
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            KeyError: an entry is missing.
            RuntimeError: the state is of another model.
        """
        for key in ("module", "updates"):
            if key not in state_dict:
                raise KeyError(f"the state of an average has no {key!r}: {sorted(state_dict)}")
        load_full_state_dict(self.module, state_dict["module"])
        self.updates = int(state_dict["updates"])

    def _link(self, model: nn.Module) -> None:
        """Find the tensors of the model and of the average that belong together.

        They are kept until the model consists of other modules than last time.
        """
        model = unwrap_model(model)
        modules = list(model.modules())
        if modules == self._linked:
            _reshard(self._sharded)
            return
        self._sharded = [module for module in modules if hasattr(module, "reshard")]
        _reshard(self._sharded)
        groups: dict[Any, tuple[list[_Place], list[_Place]]] = {}
        for kind in ("_parameters", "_buffers"):
            averages, weights = _places(self.module, kind), _places(model, kind)
            _check_alike(kind[1:], averages, weights)
            for name, (tensors, key) in averages.items():
                tensor = tensors[key]
                average = kind == "_parameters" and (
                    tensor.is_floating_point() or tensor.is_complex()
                )
                # One kernel takes many tensors, if they are of one data type on one device.
                kind_of = (average, tensor.dtype, tensor.device, is_sharded(tensor))
                group = groups.setdefault(kind_of, ([], []))
                group[0].append(averages[name])
                group[1].append(weights[name])
        self._blended = [group for (average, *_), group in groups.items() if average]
        self._copied = [group for (average, *_), group in groups.items() if not average]
        self._linked = modules


def _reshard(modules: Iterable[Any]) -> None:
    """Put back the shards into a sharded model, which has whole tensors after an evaluation."""
    for module in modules:
        module.reshard()


def _copied(model: nn.Module) -> nn.Module:
    """A copy without gradients; of a sharded model, which torch cannot copy, the tensors alone."""
    sharded = [module for module in model.modules() if hasattr(module, "reshard")]
    if not sharded:
        return copy.deepcopy(model)  # copying a parameter does not copy its gradient
    _reshard(sharded)
    copies: dict[nn.Module, nn.Module] = {module: nn.Module() for module in model.modules()}
    memo: dict[int, Any] = {}  # so that a shared tensor stays one
    for module, shell in copies.items():
        shell._parameters = copy.deepcopy(module._parameters, memo)
        shell._buffers = copy.deepcopy(module._buffers, memo)
        shell._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        shell._modules = {name: child and copies[child] for name, child in module._modules.items()}
    return copies[model]


def _places(model: nn.Module, kind: str) -> dict[str, _Place]:
    """Where the tensors of a model are, by full name; a shared one once."""
    places: dict[str, _Place] = {}
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        tensors = getattr(module, kind)
        for key, tensor in tensors.items():
            if tensor is not None and tensor not in seen:
                seen.add(tensor)
                places[f"{prefix}.{key}" if prefix else key] = (tensors, key)
    return places


def _check_alike(kind: str, averages: dict[str, _Place], weights: dict[str, _Place]) -> None:
    ours, theirs = (
        {(name, tensors[key].shape, tensors[key].dtype) for name, (tensors, key) in places.items()}
        for places in (averages, weights)
    )
    if ours != theirs:
        names = sorted({name for name, *_ in ours ^ theirs})
        raise ValueError(
            f"the {kind} of the model are not those of its average, in name, shape or data type: "
            + ", ".join(names[:5])
        )


def _tensors(places: Iterable[_Place]) -> list[Tensor]:
    found = [tensors[key] for tensors, key in places]
    return [local_tensor(t) for t in found] if found and is_sharded(found[0]) else found
