"""For models whose ranks can only compute together: as many batches for each rank."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hooktrain.utils import comm
from hooktrain.utils.dtensor import is_sharded

__all__ = ["computes_together", "in_step"]

_END = object()


def computes_together(model: Any) -> bool:
    """Whether a call of the model is a collective, since its parameters are sharded over ranks."""
    return (
        comm.get_world_size() > 1
        and isinstance(model, nn.Module)
        # Right after a forward pass the outermost parameters may still be whole.
        and any(hasattr(module, "reshard") or _has_shards(module) for module in model.modules())
    )


def _has_shards(module: nn.Module) -> bool:
    return any(is_sharded(parameter) for parameter in module.parameters(recurse=False))


def in_step(data_loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """The batches of this rank, and then stand-ins for as long as another rank has batches.

    One sum of one number a batch, so that loaders need no length and may end at different times. A
    stand-in is the rank's own last batch; a rank that has none gets the first of another rank,
    which is pickled, so loaders should give tensors on the CPU.

    Yields:
        A batch, and whether it is one of this rank's: of stand-ins nothing is to be counted.
    """
    batches = iter(data_loader)
    stand_in = batch = next(batches, _END)
    owners = comm.all_gather(batch is not _END)
    if True in owners and False in owners:
        first = comm.broadcast(batch, src=owners.index(True))
        stand_in = first if batch is _END else batch
    while comm.any_rank(batch is not _END):
        stand_in = stand_in if batch is _END else batch
        yield stand_in, batch is not _END
        batch = next(batches, _END)
