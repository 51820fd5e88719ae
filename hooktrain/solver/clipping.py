"""Gradient clipping from a configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hooktrain.utils.dtensor import full_tensor

__all__ = ["build_clipping"]


def build_clipping(config: Mapping[str, Any]) -> Callable[[list[Tensor]], Tensor | None]:
    """A function that clips the gradients of parameters in place, and gives their norm.

    The norm is that before clipping, over all of them; clipping by value gives None.

    Args:
        config: see :class:`~hooktrain.solver.OptimWrapper`; it is not changed.

    Raises:
        TypeError: if it is not a dict.
        ValueError: for another type, an unknown key, or a missing or impossible threshold.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"clip_grad must be a dict or None, but got {config!r}")
    options = dict(config)
    kind = options.pop("type", "norm")
    if kind not in ("norm", "value"):
        raise ValueError(f"clip_grad['type'] must be 'norm' or 'value', but got {kind!r}")
    allowed = {"norm": ("max_norm", "norm_type"), "value": ("clip_value",)}[kind]
    limit = options.get(allowed[0])
    if unknown := [key for key in options if key not in allowed]:
        raise ValueError(f"clip_grad has unknown keys {unknown}; {kind!r} clipping has {allowed}")
    if not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"clip_grad[{allowed[0]!r}] must be a positive number, but got {limit!r}")
    if kind == "value":
        return lambda parameters: nn.utils.clip_grad_value_(parameters, float(limit))
    norm_type = float(options.get("norm_type", 2.0))
    return lambda parameters: _clip_norm(parameters, float(limit), norm_type)


def _clip_norm(parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """As :func:`torch.nn.utils.clip_grad_norm_`; ranks that hold shards exchange one number."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm(grads, norm_type))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
