"""Which parts of a saved state each rank reads its shards of."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from gloo import run_ranks
from hooktrain.checkpoint.targets import shard_targets


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SAVED: dict[str, Any] = {
    "model": {"rows": meta(6, 2), "whole": meta(3), "plain": meta(5), "other": meta(4)},
    "trainer": {
        "hooks": {"EMA": {"module": {"rows": meta(6, 2), "whole": meta(6, 2)}}},
        "optimizer": {
            "gen": {
                "state": {
                    0: {"exp_avg": meta(6, 2, dtype=torch.float64), "step": meta()},
                    1: {"exp_avg": meta(3), "row": meta(6, 1)},
                },
                "param_groups": [{"params": [0, 1]}],
                "gradients": [None, meta(6, 2)],
            }
        },
        "rng": {0: meta(6, 2)},
    },
}


class Model(nn.Module):
    def __init__(self, **parameters: tuple[Tensor, Placement]) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (1,))
        for name, (value, placement) in parameters.items():
            setattr(self, name, nn.Parameter(distribute_tensor(value, mesh, [placement])))
        self.plain = nn.Parameter(torch.zeros(5))


def targets_of_models() -> list[dict[str, tuple[torch.dtype, Any]]]:
    found = []
    for other in (Shard(0), Replicate()):
        model = Model(
            rows=(torch.ones(6, 2), Shard(0)),
            whole=(torch.ones(3), Replicate()),
            same_shape=(torch.ones(6, 2), other),
        )
        targets = shard_targets(model, SAVED)
        assert all(type(value) is DTensor and not value.requires_grad for value in targets.values())
        assert torch.equal(model.rows.to_local(), torch.ones(6, 2))
        found.append({name: (t.dtype, t.placements[0]) for name, t in targets.items()})
    return found


def test_they_are_sharded_as_the_models_tensor_of_their_name_or_in_optimizers_their_shape() -> None:
    ((one, ambiguous),) = run_ranks(targets_of_models, 1)
    by_name = {
        "model.rows": (torch.float32, Shard(0)),
        "model.whole": (torch.float32, Replicate()),
        "trainer.hooks.EMA.module.rows": (torch.float32, Shard(0)),
    }
    optimizer = "trainer.optimizer.gen"
    whole = {f"{optimizer}.state.1.exp_avg": (torch.float32, Replicate())}
    rows = {
        f"{optimizer}.state.0.exp_avg": (torch.float64, Shard(0)),
        f"{optimizer}.gradients.1": (torch.float32, Shard(0)),
    }
    assert one == {**by_name, **whole, **rows}
    # Two tensors of one shape are sharded differently: which of them is meant cannot be told.
    assert ambiguous == {**by_name, **whole}


def test_a_model_without_shards_has_none() -> None:
    assert shard_targets(nn.Linear(2, 6), {"model": {"weight": meta(6, 2)}}) == {}
