"""Models sharded by torch's fully_shard."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

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

DATA = batches(2) * 3


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
        "layers": _deferred(Layers, {nn.Conv2d}),
        "transformer": _deferred(make_model, {Block}),
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
    with pytest.raises(ValueError, match="share a parameter, which would come ap"):
        shard_model(torn, wrap={nn.Embedding})
    tied = make_model()
    tied.head.weight = tied.embedding.weight
    shard_model(tied, wrap={Block})
    return tied.head.weight is tied.embedding.weight


def test_a_shared_parameter_stays_one_or_is_refused(two: list[dict[str, Any]]) -> None:
    assert [result["tied"] for result in two] == [True, True]


def _replicated() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_sharded(mesh=mesh)
    return [len(local_tensor(next(model.parameters()))), *losses_of(model)]


def test_a_mesh_of_two_dimensions_replicates_what_it_shards(one: list[float]) -> None:
    rows, *losses = run_ranks(_replicated, 4)[0]
    assert rows == 9
    assert losses == pytest.approx(one, abs=1e-5)


def test_a_policy_of_mixed_precision_is_built_of_names() -> None:
    policy = build_mp_policy({"param_dtype": "bfloat16", "cast_forward_inputs": False})
    assert policy == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, cast_forward_inputs=False
    )
    assert build_mp_policy(policy) is policy
    assert build_mp_policy(None) == MixedPrecisionPolicy()
    with pytest.raises(AttributeError, match="'torch' has no attribute 'bf16'"):
        build_mp_policy({"param_dtype": "bf16"})


def test_a_rule_is_of_classes_or_a_function_of_name_and_module() -> None:
    model = make_model()
    assert select_modules(model, {Block}) == list(model.blocks)
    last = select_modules(model, lambda name, _: name.endswith(".1"))
    assert last == [model.blocks[1]]
    assert select_modules(model, ()) == []
    with pytest.raises(ValueError, match=r"selects none .*: \['Block', 'Dropout"):
        select_modules(model, {nn.Conv2d})
    with pytest.raises(TypeError, match=r"must be a collection .* not 'Block'"):
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


def _deferred(build: Any, wrap: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        model: nn.Module = build()
    torch.manual_seed(3 if dist.get_rank() == 0 else 1000)
    shard_model(model, wrap=wrap)
    state = full_state_dict(model)
    if build is make_model:
        train(model, make_wrapper(model), batches(1))
    return state


def test_a_model_on_the_meta_device_gets_the_weights_of_one_process(
    two: list[dict[str, Any]],
) -> None:
    torch.manual_seed(3)
    assert equal(two[0]["layers"], dict(Layers().state_dict()))


def test_init_weights_initialises_what_is_sharded(two: list[dict[str, Any]]) -> None:
    state = two[0]["transformer"]
    assert state.keys() == make_model().state_dict().keys()
    assert state["head.weight"].std().item() == pytest.approx(0.02, rel=0.3)
    assert torch.equal(state["norm.weight"], torch.ones(16))


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Module()
        self.second.register_buffer("table", torch.arange(3.0))


def _forgotten() -> str:
    with torch.device("meta"):
        model = Forgotten()
    with pytest.raises(ValueError, match="no reset_parameters") as caught:
        shard_model(model)
    return str(caught.value)


def test_modules_without_a_method_to_initialise_them_are_named(
    two: list[dict[str, Any]],
) -> None:
    assert all(result["forgotten"].endswith("device: ['second']") for result in two)
