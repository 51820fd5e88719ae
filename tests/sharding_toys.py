"""A small transformer and its training, sharded or not, for the tests of sharded models."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hooktrain.demos.text import Block, TextGPT
from hooktrain.model.sharding import shard_model
from hooktrain.solver import OptimWrapper
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensors

VOCABULARY = 17  # divisible by no number of ranks


def make_model(dropout: float = 0.0) -> TextGPT:
    torch.manual_seed(3)
    return TextGPT(VOCABULARY, 8, (2, 16, 2), dropout)


def make_sharded(dropout: float = 0.0, **options: Any) -> nn.Module:
    return shard_model(make_model(dropout), **{"wrap": {Block}, **options})


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole state on the main process, nothing on the others. A collective."""
    state: dict[str, Any] = full_tensors(dict(model.state_dict()))
    return state if comm.is_main_process() else {}


def make_wrapper(model: nn.Module, **options: Any) -> OptimWrapper:
    return OptimWrapper(torch.optim.AdamW(model.named_parameters(), lr=0.01), **options)


def batches(count: int, size: int = 8) -> list[dict[str, Tensor]]:
    """Global batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(VOCABULARY, (count, size, 9), generator=generator)
    return [{"tokens": text[:, :-1], "targets": text[:, 1:]} for text in texts]


def own_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rank, size = comm.get_rank(), comm.get_world_size()
    return {name: value[rank::size] for name, value in batch.items()}


def train(
    model: nn.Module, wrapper: OptimWrapper, data: Sequence[dict[str, Tensor]]
) -> list[float]:
    """One pass for each batch; the losses as means over the ranks."""
    model.train()
    losses = []
    for batch in data:
        with wrapper.optim_context(model):
            loss = model(own_part(batch))["loss_lm"]
            wrapper.update_params(loss)
        mean = loss.detach().clone()
        if comm.get_world_size() > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / comm.get_world_size())
    return losses
