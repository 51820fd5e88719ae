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
    build_mp_policy,
    checkpoint_activations,
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
        "forgotten": _forgotten(),
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
    model = make_sharded(
        mp_policy={"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    )
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
    accumulated = make_sharded(mesh=mesh)
    train(accumulated, make_wrapper(accumulated, accumulative_counts=2), DATA)
    return [
        rows,
        _deferred(make_model, {Block}, mesh=mesh),
        full_state_dict(accumulated),
        *losses_of(model),
    ]


def test_a_mesh_of_two_dimensions_replicates_what_it_shards(one: list[float]) -> None:
    rows, initialised, accumulated, *losses = run_ranks(_replicated, 4)[0]
    assert rows == 9
    assert equal(initialised, dict(make_model().state_dict()))
    assert losses == pytest.approx(one, abs=1e-5)
    alone = make_model()
    train(alone, make_wrapper(alone, accumulative_counts=2), DATA)
    expected = dict(alone.state_dict())
    torch.testing.assert_close(accumulated, expected, atol=1e-5, rtol=0)


def test_a_policy_of_mixed_precision_is_built_of_names() -> None:
    policy = build_mp_policy({"param_dtype": "bfloat16", "cast_forward_inputs": False})
    assert policy == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, cast_forward_inputs=False
    )
    assert build_mp_policy(policy) is policy
    assert build_mp_policy(None) == MixedPrecisionPolicy()
    with pytest.raises(AttributeError, match="'bf16'"):
        build_mp_policy({"param_dtype": "bf16"})


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


class Layers(nn.Module):
    """torch's own layers, with buffers, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(5, 4, padding_idx=2)
        self.token = nn.Parameter(torch.empty(3, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.token, std=0.3)


class Parts(nn.Module):
    """Initialised by itself, in ways that DTensors do not have or do otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.square = nn.Linear(5, 5)
        self.sparse = nn.Linear(4, 7, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.token = nn.Parameter(torch.empty(3, 4))
        self.register_buffer("angles", torch.empty(3), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        nn.init.orthogonal_(self.square.weight)
        nn.init.sparse_(self.sparse.weight, 0.5)
        self.embedding.weight.data.normal_(std=0.5)
        self.embedding.weight.data[2].zero_()
        self.token[1] = 3.0
        self.token[2:].uniform_()
        self.token[0].copy_(torch.randn(4))
        self.square.bias.data.copy_(self.square.weight.data.sum(0))
        self.sparse.weight += self.head.weight
        for chunk in self.square.weight.chunk(2):
            chunk.mul_(torch.rand(()))
        self.angles = torch.arange(3.0)


DEFERRED: list[tuple[Callable[[], nn.Module], Any, str | None]] = [
    (Layers, {nn.Conv2d}, None),
    (make_model, {Block}, None),
    (Parts, (), None),
    (Parts, (), "whole on each rank"),
]


def _deferred(build: Callable[[], nn.Module], wrap: Any, mesh: Any = None) -> Any:
    if isinstance(mesh, str):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = build()
    torch.manual_seed(3 if dist.get_rank() == 0 else 1000)
    shard_model(model, wrap=wrap, mesh=mesh)
    return full_state_dict(model)


def _deferred_and_trained() -> bool:
    with torch.device("meta"):
        model = make_model()
    torch.manual_seed(3)
    return losses_of(shard_model(model, wrap={Block})) == losses_of(make_sharded())


@pytest.mark.parametrize("case", range(4))
def test_a_model_on_the_meta_device_gets_the_weights_of_one_process(
    two: list[dict[str, Any]], case: int
) -> None:
    torch.manual_seed(3)
    assert equal(two[0]["deferred"][case], dict(DEFERRED[case][0]().state_dict()))
    assert two[0]["after training"]


MATRICES = 16


class Stack(nn.Sequential):
    def init_weights(self) -> None:
        for layer in self:
            nn.init.trunc_normal_(layer.weight)


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
    with torch.device("meta"):
        model = Stack(*(nn.Linear(64, 64, bias=False) for _ in range(MATRICES)))
    with Memory() as memory:
        shard_model(model)
    return memory.most / (4 * 64 * 64)


def test_a_deferred_model_is_whole_on_no_rank(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert MATRICES / 2 <= result["memory"] < MATRICES - 1


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Module()
        self.second.register_buffer("table", torch.arange(3), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))


class HalfForgotten(Forgotten):
    def init_weights(self) -> None:
        self.scale.data.fill_(1.0)


def _forgotten() -> list[str]:
    messages = []
    for build in (Forgotten, HalfForgotten):
        with torch.device("meta"):
            model = build()
        with pytest.raises(ValueError, match="init_weights") as caught:
            shard_model(model)
        messages.append(str(caught.value))
    return messages


def test_what_no_method_has_initialised_is_named(two: list[dict[str, Any]]) -> None:
    for result in two:
        both, table = result["forgotten"]
        assert both.endswith("['scale', 'second.table']")
        assert table.endswith("['second.table']")
