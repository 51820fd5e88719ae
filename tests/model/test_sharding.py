"""Models sharded by torch's fully_shard."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equality import equal
from gloo import run_ranks
from hooktrain.demos.text import Block
from hooktrain.model.sharding import (
    checkpoint_activations,
    named_tensors,
    select_modules,
    shard_model,
)
from hooktrain.utils.tensors import full_tensor, local_tensor
from sharding_toys import (
    batches,
    full_state_dict,
    make_model,
    make_sharded,
    make_wrapper,
    own_part,
    train,
)

DATA = batches(2) * 2


def losses_of(model: nn.Module) -> list[float]:
    return train(model, make_wrapper(model, clip_grad={"max_norm": 0.5}), DATA)


@pytest.fixture(scope="module")
def one() -> list[float]:
    return losses_of(make_model())


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def _on_two_ranks() -> dict[str, Any]:
    makers: dict[str, Callable[[], nn.Module]] = {
        "ddp": lambda: DistributedDataParallel(make_model()),
        "sharded": make_sharded,
        "one unit": lambda: make_sharded(wrap=(), reshard_after_forward=False),
        "offloaded": lambda: make_sharded(offload=True),
    }
    return {
        "losses": {name: losses_of(make()) for name, make in makers.items()},
        "structure": _structure(),
        "checkpointed": [_checkpointed(rule) for rule in ((), {Block}, last_block)],
        "precisions": _precisions(),
        "tied": _tied(),
        "deferred": [_deferred(*case) for case in DEFERRED],
        "after training": _deferred_and_trained(),
        "memory": _memory_of_deferred(),
    }


def test_losses_are_those_of_one_process(
    one: list[float], two: list[dict[str, Any]]
) -> None:
    assert one[-1] < one[1] - 0.1
    for losses in two[0]["losses"].values():
        assert losses == pytest.approx(one, abs=1e-5)


def _structure() -> dict[str, Any]:
    model = make_sharded()
    units = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    rows = len(local_tensor(model.get_parameter("head.weight")))
    return {"names": list(model.state_dict()), "units": units, "rows": rows}


def test_each_rank_holds_its_rows_under_the_names_of_the_bare_model(
    two: list[dict[str, Any]],
) -> None:
    first, second = (result["structure"] for result in two)
    assert first["names"] == list(make_model().state_dict())
    assert first["units"] == ["", "blocks.0", "blocks.1"]
    assert (first["rows"], second["rows"]) == (9, 8)


def last_block(name: str, module: nn.Module) -> bool:
    return name == "blocks.1"


def _checkpointed(rule: Any) -> Any:
    model = make_model(0.2)
    checkpoint_activations(model, rule)
    shard_model(model, wrap={Block})
    calls: list[int] = []
    for block in select_modules(model, {Block}):
        inner = block.get_submodule("attention_in")
        inner.register_forward_hook(lambda *_: calls.append(0))
    torch.manual_seed(1)  # of dropout
    model(own_part(batches(1)[0]))["loss_lm"].backward()
    named = model.named_parameters()
    return len(calls), {n: full_tensor(p.grad) for n, p in named if p.grad is not None}


def test_checkpointed_activations_are_computed_twice(two: list[dict[str, Any]]) -> None:
    plain, blocks, chosen = two[0]["checkpointed"]
    assert [plain[0], blocks[0], chosen[0]] == [2, 4, 3]
    assert list(plain[1]) == list(make_model().state_dict())
    assert equal(blocks[1], plain[1])
    assert equal(chosen[1], plain[1])


def _precisions() -> list[torch.dtype]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = make_sharded(mp_policy=policy)
    seen: list[torch.dtype] = []
    inner = model.get_submodule("blocks.0.mlp_in")
    inner.register_forward_hook(lambda *arguments: seen.append(arguments[-1].dtype))
    model(own_part(batches(1)[0]))["loss_lm"].backward()
    parameter = next(model.parameters())
    assert parameter.grad is not None
    return [*seen, parameter.dtype, parameter.grad.dtype]


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(
    two: list[dict[str, Any]],
) -> None:
    assert two[0]["precisions"] == [torch.bfloat16, torch.float32, torch.float32]


def _tied() -> bool:
    torn = make_model()
    torn.head.weight = torn.embedding.weight
    with pytest.raises(ValueError, match="share a parameter"):
        shard_model(torn, wrap={nn.Embedding})
    tied = make_model()
    tied.head.weight = tied.embedding.weight
    shard_model(tied, wrap={Block})
    return tied.head.weight is tied.embedding.weight


def test_a_shared_parameter_stays_one_or_is_refused(two: list[dict[str, Any]]) -> None:
    assert [result["tied"] for result in two] == [True, True]


def _replicated() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_sharded(mesh=mesh)
    rows = len(local_tensor(next(model.parameters())))
    torch.manual_seed(dist.get_rank())
    apart = nn.BatchNorm1d(3)
    nn.init.normal_(apart.weight)
    apart.running_mean.fill_(dist.get_rank())  # type: ignore[union-attr]
    shard_model(apart, mesh=mesh)
    accumulated = make_sharded(mesh=mesh)
    train(accumulated, make_wrapper(accumulated, accumulative_counts=2), DATA)
    return [
        rows,
        _deferred(make_model, {Block}, {"mesh": mesh}),
        [local_tensor(apart.weight).tolist(), apart.running_mean],
        full_state_dict(accumulated),
        *losses_of(model),
    ]


def test_a_mesh_of_two_dimensions_replicates_what_it_shards(one: list[float]) -> None:
    ranks = run_ranks(_replicated, 4)
    rows, initialised, _, accumulated, *losses = ranks[0]
    shards = [rank[2][0] for rank in ranks]
    assert shards[0] == shards[2]
    assert shards[1] == shards[3] != shards[0][:1]
    assert [rank[2][1].tolist() for rank in ranks] == [[0] * 3, [1] * 3] * 2
    assert rows == 9
    assert equal(initialised, dict(make_model().state_dict()))
    assert losses == pytest.approx(one, abs=1e-5)
    alone = make_model()
    train(alone, make_wrapper(alone, accumulative_counts=2), DATA)
    expected = dict(alone.state_dict())
    torch.testing.assert_close(accumulated, expected, atol=1e-5, rtol=0)


def test_a_rule_is_of_classes_or_a_function_of_name_and_module() -> None:
    model = make_model()
    assert select_modules(model, {Block}) == list(model.blocks)
    last = select_modules(model, lambda name, _: name.endswith(".1"))
    assert last == [model.blocks[1]]
    assert select_modules(model, ()) == []
    with pytest.raises(ValueError, match="'Dropout'"):
        select_modules(model, {nn.Conv2d})
    with pytest.raises(TypeError, match="'Block'"):
        select_modules(model, "Block")  # type: ignore[arg-type]


class Parts(nn.Module):
    """Layers with buffers, a shared weight, and values that only the constructor gives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.token = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("angles", torch.rand(3), persistent=False)


DEFERRED: list[tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = [
    (make_model, {Block}, {}),
    (Parts, {nn.Conv2d}, {}),
    (Parts, (), {"offload": True}),
    (Parts, (), {"mesh": "whole on each rank"}),
]


def deferred(
    build: Callable[[], nn.Module], wrap: Any, options: dict[str, Any]
) -> nn.Module:
    if options.get("mesh") == "whole on each rank":
        names = ("replicate", "shard")
        options = {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=names)}
    torch.manual_seed(3)
    values = dict(named_tensors(build())) if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = build()
    return shard_model(model, wrap=wrap, values=values, **options)


def _deferred(*case: Any) -> Any:
    model: Any = deferred(*case)
    if hasattr(model, "angles"):
        assert model.head.weight is model.embedding.weight
        return {**full_state_dict(model), "angles": model.angles}
    return full_state_dict(model)


def _deferred_and_trained() -> bool:
    return losses_of(deferred(*DEFERRED[0])) == losses_of(make_sharded())


@pytest.mark.parametrize("case", range(4))
def test_a_model_on_the_meta_device_gets_the_values_of_the_first_rank(
    two: list[dict[str, Any]], case: int
) -> None:
    torch.manual_seed(3)
    whole: Any = DEFERRED[case][0]()
    expected = dict(whole.state_dict())
    if case > 0:
        expected["angles"] = whole.angles
        assert torch.equal(two[1]["deferred"][case]["angles"], whole.angles)
    assert equal(two[0]["deferred"][case], expected)
    assert two[0]["after training"]


MATRICES = 16


class Memory(TorchDispatchMode):
    """The most bytes that tensors had at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = local_tensor(tensor).untyped_storage()
                self.live[StorageWeakRef(storage)] = storage.nbytes()
        alive = [nbytes for ref, nbytes in self.live.items() if not ref.expired()]
        self.most = max(self.most, sum(alive))
        return out


def _memory_of_deferred() -> float:
    """The most that was allocated at a time, in matrices of the model."""

    def build() -> nn.Module:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(MATRICES)]
        return nn.Sequential(*layers)

    values = dict(named_tensors(build()))
    with torch.device("meta"):
        model = build()
    with Memory() as memory:
        shard_model(model, values=values)
    return memory.most / (4 * 64 * 64)


def test_a_deferred_model_is_whole_on_no_device(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert MATRICES / 2 <= result["memory"] < MATRICES - 1
