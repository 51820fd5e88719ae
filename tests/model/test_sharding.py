"""Models sharded by torch's fully_shard, and their state as a whole."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.demos.text import Block
from hooktrain.model.sharding import (
    build_mp_policy,
    full_state_dict,
    init_deferred,
    select_modules,
    shard_model,
)
from hooktrain.solver import OptimWrapper
from hooktrain.utils.tensors import (
    full_tensor,
    full_tensors,
    load_full_state_dict,
    local_tensor,
)
from sharding_toys import (
    batches,
    make_model,
    make_sharded,
    make_wrapper,
    own_part,
    train,
)

CLIP = {"max_norm": 0.5}
DATA = batches(2) * 3


def same_states(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same_states(one[k], other[k]) for k in one
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_states, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    model = make_model()
    return {
        "losses": train(model, make_wrapper(model, clip_grad=CLIP), DATA),
        "saved": save_and_go_on(f"{folder}/one", make_model()),
    }


@pytest.fixture(scope="module")
def two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2, str(folder))


@pytest.fixture(scope="module")
def four(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks(_on_four_ranks, 4, str(folder))


def _on_two_ranks(folder: str) -> dict[str, Any]:
    return {
        "losses": _losses("ddp", "sharded", "one unit", "offloaded"),
        "structure": _structure(),
        "options": _options(),
        "offload options": _options(offload=True, reshard_after_forward=False),
        "saved": save_and_go_on(f"{folder}/two", make_sharded()),
        "loaded": load_and_go_on(f"{folder}/one", make_sharded()),
        "states": _full_states(),
        "checkpointed": [_checkpointed(rule) for rule in (False, True, {Block})],
        "precisions": _precisions(),
        "tied": _tied(),
        "layers": _init_sharded(Layers, ()),
        "transformer": _init_sharded(make_model, {Block}),
        "filled": _init_sharded(Filled, ()),
        "forgotten": _forgotten(),
    }


def _on_four_ranks(folder: str) -> dict[str, Any]:
    return {
        "losses": _losses("ddp", "sharded"),
        "loaded": load_and_go_on(f"{folder}/two", make_sharded()),
        "replicated": _replicated_and_sharded(),
    }


def _losses(*names: str) -> dict[str, list[float]]:
    makers: dict[str, Callable[[], nn.Module]] = {
        "ddp": lambda: DistributedDataParallel(make_model()),
        "sharded": make_sharded,
        "one unit": lambda: make_sharded(wrap=(), reshard_after_forward=False),
        "offloaded": lambda: make_sharded(offload=True),
    }
    models = {name: makers[name]() for name in names}
    return {
        k: train(m, make_wrapper(m, clip_grad=CLIP), DATA) for k, m in models.items()
    }


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_losses_are_those_of_ddp_and_of_one_process(
    ranks: str, one: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    losses = request.getfixturevalue(ranks)[0]["losses"]
    assert one["losses"][-1] < one["losses"][1] - 0.1
    assert losses["ddp"] == pytest.approx(one["losses"], abs=1e-5)
    assert losses["sharded"] == pytest.approx(losses["ddp"], abs=1e-5)
    if ranks == "two":
        assert losses["one unit"] == pytest.approx(losses["ddp"], abs=1e-5)
        assert losses["offloaded"] == pytest.approx(losses["sharded"], abs=1e-6)


def _structure() -> dict[str, Any]:
    model = make_sharded()
    parameters = dict(model.named_parameters())
    return {
        "names": list(model.state_dict()),
        "units": [
            name for name, m in model.named_modules() if isinstance(m, FSDPModule)
        ],
        "sharded": all(isinstance(p, DTensor) for p in parameters.values()),
        "rows": parameters["head.weight"].to_local().shape[0],  # type: ignore[attr-defined]
    }


def _options(**given: Any) -> list[tuple[Any, Any]]:
    with patch("torch.distributed.fsdp.fully_shard") as fully_shard:
        make_sharded(**given)
    calls = [call.kwargs for call in fully_shard.call_args_list]
    return [(call["offload_policy"], call["reshard_after_forward"]) for call in calls]


def test_options_reach_every_unit(two: list[dict[str, Any]]) -> None:
    assert two[0]["options"] == [(OffloadPolicy(), None)] * 3
    # There is nothing to pin memory for without an accelerator.
    assert (
        two[0]["offload options"] == [(CPUOffloadPolicy(pin_memory=False), False)] * 3
    )


def test_each_rank_holds_its_rows_under_the_names_of_the_bare_model(
    two: list[dict[str, Any]],
) -> None:
    first, second = (result["structure"] for result in two)
    assert first["names"] == list(make_model().state_dict())
    assert first["units"] == ["", "blocks.0", "blocks.1"]
    assert first["sharded"]
    assert (first["rows"], second["rows"]) == (9, 8)


def save_and_go_on(folder: str, model: nn.Module) -> dict[str, Any]:
    wrapper = make_wrapper(model)
    data = batches(5)
    train(model, wrapper, data[:3])
    Checkpointer(model, folder, optimizer=wrapper).save("model")
    return state_and_losses(model, wrapper)


def load_and_go_on(folder: str, model: nn.Module) -> dict[str, Any]:
    wrapper = make_wrapper(model)
    load_full_state_dict(
        model, {k: v * 0 for k, v in make_model().state_dict().items()}
    )
    Checkpointer(model, folder, optimizer=wrapper).load(f"{folder}/model.pth")
    return state_and_losses(model, wrapper)


def state_and_losses(model: nn.Module, wrapper: OptimWrapper) -> dict[str, Any]:
    states = {
        "model": full_state_dict(model),
        "optimizer": full_tensors(wrapper.state_dict()),
    }
    states = copy.deepcopy(states)
    return {**states, "losses": train(model, wrapper, batches(5)[3:])}


@pytest.mark.parametrize("way", ["from 2 to 1", "from 1 to 2", "from 2 to 4"])
def test_a_file_saved_on_any_number_of_ranks_goes_on_on_any_other(
    way: str,
    folder: Path,
    one: dict[str, Any],
    two: list[dict[str, Any]],
    request: pytest.FixtureRequest,
) -> None:
    if way == "from 2 to 1":
        saved, loaded = two[0]["saved"], load_and_go_on(f"{folder}/two", make_model())
    elif way == "from 1 to 2":
        saved, loaded = one["saved"], two[0]["loaded"]
    else:
        saved, loaded = two[0]["saved"], request.getfixturevalue("four")[0]["loaded"]
    assert list(saved["model"]) == list(make_model().state_dict())
    assert all(value.any() for value in saved["model"].values())
    assert same_states(loaded["model"], saved["model"])
    assert len(saved["optimizer"]["state"]) == len(saved["model"])
    assert set(saved["optimizer"]["state"]["head.weight"]) == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert same_states(loaded["optimizer"], saved["optimizer"])
    assert loaded["losses"] == pytest.approx(saved["losses"], abs=1e-5)


def _full_states() -> list[dict[str, Any]]:
    model = make_sharded()
    state = full_state_dict(model)
    twos = {
        name: torch.full_like(v, 2.0) for name, v in make_model().state_dict().items()
    }
    load_full_state_dict(model, twos)
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        load_full_state_dict(
            model, {k: v for k, v in twos.items() if k != "head.weight"}
        )
    with pytest.raises(RuntimeError, match=r"Unexpected key.*what"):
        load_full_state_dict(model, {**twos, "what": torch.zeros(1)})
    return [state, full_state_dict(model)]


def test_the_full_state_is_in_the_memory_of_the_main_process_only(
    two: list[dict[str, Any]],
) -> None:
    (state, loaded), others = (result["states"] for result in two)
    assert others == [{}, {}]
    assert same_states(state, dict(make_model().state_dict()))
    assert state["head.weight"].shape == (17, 16)
    assert all(
        torch.equal(value, torch.full_like(value, 2.0)) for value in loaded.values()
    )


def _checkpointed(rule: Any) -> Any:
    model = make_sharded(0.2, activation_checkpointing=rule)
    calls: list[int] = []
    for block in select_modules(model, {Block}):
        inner = block.get_submodule("attention_in")
        inner.register_forward_hook(lambda *_: calls.append(0))
    torch.manual_seed(1)  # of dropout
    model(own_part(batches(1)[0]))["loss_lm"].backward()
    grads = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    return len(calls), list(model.state_dict()), grads


def test_checkpointed_activations_are_computed_twice_and_nothing_else_changes(
    two: list[dict[str, Any]],
) -> None:
    plain, as_wrapped, chosen = two[0]["checkpointed"]
    assert [plain[0], as_wrapped[0], chosen[0]] == [2, 4, 4]
    assert plain[1] == as_wrapped[1] == list(make_model().state_dict())
    assert len(plain[2]) == len(plain[1])
    assert same_states(as_wrapped[2], plain[2])
    assert same_states(chosen[2], plain[2])


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
    with pytest.raises(ValueError, match=r"\['embedding.weight', 'head.weight'\]"):
        shard_model(torn, wrap={nn.Embedding})
    tied = make_model()
    tied.head.weight = tied.embedding.weight
    shard_model(tied, wrap={Block})
    return tied.head.weight is tied.embedding.weight


def test_a_shared_parameter_stays_one_or_is_refused(two: list[dict[str, Any]]) -> None:
    assert [result["tied"] for result in two] == [True, True]


def _replicated_and_sharded() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_sharded(mesh=mesh)
    state = full_state_dict(model)
    load_full_state_dict(model, make_model().state_dict())
    assert same_states(full_state_dict(model), state)
    rows = len(local_tensor(next(model.parameters())))
    return [rows, *train(model, make_wrapper(model, clip_grad=CLIP), DATA)]


def test_a_mesh_of_two_dimensions_replicates_what_it_shards(
    one: dict[str, Any], four: list[dict[str, Any]]
) -> None:
    rows, *losses = four[0]["replicated"]
    assert rows == 9
    assert losses == pytest.approx(one["losses"], abs=1e-5)


def test_a_policy_of_mixed_precision_is_built_of_names() -> None:
    policy = build_mp_policy({"param_dtype": "bfloat16", "cast_forward_inputs": False})
    assert policy == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, cast_forward_inputs=False
    )
    assert build_mp_policy(policy) is policy
    assert build_mp_policy(None) == MixedPrecisionPolicy()
    with pytest.raises(TypeError, match="unexpected keyword argument 'param_type'"):
        build_mp_policy({"param_type": "bfloat16"})
    with pytest.raises(AttributeError, match="'torch' has no attribute 'bf16'"):
        build_mp_policy({"param_dtype": "bf16"})


def test_a_rule_is_of_classes_or_a_function_of_name_and_module() -> None:
    model = make_model()
    assert select_modules(model, {Block}) == list(model.blocks)
    assert select_modules(model, lambda name, _: name.endswith(".1")) == [
        model.blocks[1]
    ]
    assert select_modules(model, ()) == []
    with pytest.raises(
        ValueError, match=r"selects none of the model's modules: \['Block', 'Dropout"
    ):
        select_modules(model, {nn.Conv2d})
    with pytest.raises(TypeError, match=r"wrap must be a collection .* not <class"):
        select_modules(model, Block, "wrap")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not 'Block'"):
        select_modules(model, "Block")  # type: ignore[arg-type]


class Layers(nn.Module):
    """torch's own layers, with buffers, and a parameter that the model initialises itself."""

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


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build()
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    return model


@pytest.mark.parametrize("build", [Layers, make_model])
def test_one_process_gets_the_weights_that_constructing_gives(build: Any) -> None:
    model = on_meta(build)
    torch.manual_seed(3)
    init_deferred(model, "cpu")
    torch.manual_seed(3)
    assert same_states(model.state_dict(), build().state_dict())


def _init_sharded(build: Any, wrap: Any) -> dict[str, Tensor]:
    model = on_meta(build)
    shard_model(model, wrap=wrap)
    torch.manual_seed(3 if dist.get_rank() == 0 else 1000)
    init_deferred(model, "cpu")
    state = full_state_dict(model)
    if build is make_model:
        train(model, make_wrapper(model), batches(1))
    return state


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("table", torch.arange(3.0))


def _forgotten() -> str:
    model = on_meta(Forgotten)
    shard_model(model)
    with pytest.raises(ValueError, match="initialises") as caught:
        init_deferred(model, "cpu")
    return str(caught.value)


class Filled(nn.Module):
    """Draws in ways that no layer of torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 2))
        self.bias = nn.Parameter(torch.empty(5))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.copy_(torch.rand_like(self.weight) + 1)
        self.bias.fill_(0.5).bernoulli_(0.5)


@pytest.mark.parametrize(
    ("name", "build"),
    [("layers", Layers), ("transformer", make_model), ("filled", Filled)],
)
def test_sharded_models_get_the_weights_of_one_process_whatever_the_other_ranks_draw(
    two: list[dict[str, Any]], name: str, build: Any
) -> None:
    torch.manual_seed(3)
    assert same_states(two[0][name], build().state_dict())


def test_what_no_method_initialises_is_named_on_every_rank(
    two: list[dict[str, Any]],
) -> None:
    message = "no reset_parameters() or init_weights() initialises ['table', 'weight']"
    assert [result["forgotten"] for result in two] == [message, message]


def test_a_model_that_has_weights_keeps_them() -> None:
    model = on_meta(Layers)
    model.norm = nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match=r"are not: \['norm.bias', .*'norm.weight'\]"):
        init_deferred(model, "cpu")
    assert torch.equal(model.get_parameter("norm.weight"), torch.ones(3))


def test_shared_parameters_of_a_model_that_is_not_sharded_are_refused() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1].weight = model[0].weight  # type: ignore[index, union-attr]
    with pytest.raises(
        ValueError, match=r"\['0.weight', '1.weight'\].* would come apart"
    ):
        init_deferred(model, "cpu")
