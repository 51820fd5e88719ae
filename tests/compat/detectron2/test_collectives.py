"""The collectives that only detectron2's scripts call."""

import pytest
import torch
import torch.distributed as dist

from gloo import run_ranks
from hooktrain.compat.detectron2 import comm

WORLD_SIZE = 4


def gather_everywhere() -> None:
    rank = comm.get_rank()
    for dst in (0, 2):
        expected = [0, 10, 20, 30] if rank == dst else []
        assert comm.gather(rank * 10, dst=dst) == expected
    with pytest.raises((ValueError, RuntimeError), match="invalid root rank: 4"):
        comm.gather(rank, dst=4)
    # The ranks of groups have the numbers of the whole run.
    groups = {members: dist.new_group(members) for members in ((0, 3), (1, 2))}
    for members, group in groups.items():
        if rank in members:
            gathered = comm.gather(rank, dst=members[1], group=group)
            assert gathered == ([*members] if rank == members[1] else [])


def test_gather_reaches_one_rank_of_the_run_or_of_a_group() -> None:
    run_ranks(gather_everywhere, WORLD_SIZE)


def reduce_dicts() -> None:
    """The same keys on every rank, in another order on odd ones."""
    rank = comm.get_rank()
    losses = {
        "b": torch.tensor(float(rank)),
        "a": torch.tensor(rank * 10.0, requires_grad=True),
    }
    losses = losses if rank % 2 == 0 else dict(reversed(losses.items()))
    mean = comm.reduce_dict(losses)
    assert mean == {"a": torch.tensor(15.0), "b": torch.tensor(1.5)}
    assert not mean["a"].requires_grad
    whole = comm.reduce_dict(losses, average=False)
    assert whole == {"a": torch.tensor(60.0), "b": torch.tensor(6.0)}
    assert comm.reduce_dict({"n": torch.tensor(rank)}) == {"n": torch.tensor(1.5)}
    assert losses["a"].item() == rank * 10
    assert losses["a"].requires_grad


def test_reduce_dict_averages_or_sums_whatever_the_order_of_keys() -> None:
    run_ranks(reduce_dicts, WORLD_SIZE)


def test_a_single_process_gets_back_what_it_gave() -> None:
    obj = object()
    assert comm.gather(obj) == [obj]
    assert comm.reduce_dict({}) == {}
    reduced = comm.reduce_dict({"loss": torch.tensor(2.0, requires_grad=True)})
    assert reduced == {"loss": torch.tensor(2.0)}
    assert not reduced["loss"].requires_grad
