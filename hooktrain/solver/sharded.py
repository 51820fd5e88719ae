"""What differs for an optimizer of sharded parameters, those of ``fully_shard`` (FSDP2)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hooktrain.utils.dtensor import shard_like

__all__ = ["gradients_kept_back", "shard_optimizer_state"]


@contextmanager
def gradients_kept_back(model: Any) -> Iterator[None]:
    """For forward and backward: ranks add up their gradients, and do not exchange them yet.

    What ``no_sync()`` is to DistributedDataParallel. Meanwhile each rank holds whole gradients.
    """
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def shard_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Split the full tensors of a saved state as the parameters are. Collective, if they are.

    Args:
        optimizer: with its parameters in the order of the state.
        state_dict: with torch's ``state`` by the parameters' positions; it is not changed.
    """
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [k for group in state_dict["param_groups"] for k in group["params"]]
    state = dict(state_dict["state"])
    for parameter, k in zip(parameters, ids, strict=True):
        if k in state:
            state[k] = {
                name: shard_like(value, parameter) if isinstance(value, Tensor) else value
                for name, value in state[k].items()
            }
    return {**state_dict, "state": state}
