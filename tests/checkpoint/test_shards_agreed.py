"""The ranks agree on who writes what once, as long as the tensors stay alike on all of them."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from collectives import Collectives
from gloo import run_ranks
from hooktrain.checkpoint.sharded import ShardedSaver
from hooktrain.checkpoint.sharded_loading import read_sharded

ROWS = [4, 4, 6, 6]


def save_four_times(folder: Path) -> list[list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    saver, seen = ShardedSaver(), []
    for number, rows in enumerate(ROWS):
        weight = distribute_tensor(torch.full((rows, 3), float(number)), mesh, [Shard(0)])
        state = {"weight": weight, "bias": torch.full((2,), float(number)), "number": number}
        with Collectives() as collectives:
            saver.save(state, folder / str(number))
            saver.finish()
        seen.append(collectives.seen)
    assert dist.get_world_size() == 2
    return seen


def test_plans_are_exchanged_again_only_if_a_tensor_has_changed_its_shape(tmp_path: Path) -> None:
    first, second = run_ranks(save_four_times, 2, tmp_path)
    exchanged = ["scatter_" in of_save for of_save in first]
    assert exchanged == ["scatter_" in of_save for of_save in second] == [True, False, True, False]
    for number, rows in enumerate(ROWS):
        loaded = read_sharded(tmp_path / str(number))
        assert torch.equal(loaded["weight"], torch.full((rows, 3), float(number)))
        assert torch.equal(loaded["bias"], torch.full((2,), float(number)))
        assert loaded["number"] == number
