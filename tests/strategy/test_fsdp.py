"""FSDPStrategy in real processes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from gloo import run_ranks
from hooktrain.demos.text import Block
from hooktrain.engine import SimpleTrainer
from hooktrain.strategy import DDPStrategy, FSDPStrategy
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensor, local_tensor
from sharding_toys import CONFIG, DATA, make_model, make_strategy, make_wrapper, train


def _losses(model: nn.Module | None = None, **options: Any) -> list[float]:
    strategy = make_strategy(FSDPStrategy, activation_checkpointing={Block})
    model = strategy.prepare(model or make_model(), **options)
    return train(model, make_wrapper(model), DATA[:4])


def _compiled_blocks() -> tuple[list[float], int]:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = make_model()
    for block in model.blocks:
        block.compile(backend=backend)
    return _losses(model), len(graphs)


def _deferred() -> Any:
    model = make_strategy(FSDPStrategy, deferred_init=True).prepare(CONFIG)
    assert isinstance(model, FSDPModule)
    return full_tensor(model.head.weight), torch.rand(3)


class Mean(nn.Module):
    """The mean of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.fc(x)
        return product.square().mean()


class OwnWeights(Mean):
    """Initialises its weights by a method."""

    is_init = False

    def init_weights(self) -> None:
        nn.init.normal_(self.fc.weight)


def _initialised_once() -> bool:
    strategy = make_strategy(FSDPStrategy, deferred_init=True, wrap=())
    model = strategy.prepare(OwnWeights)
    before = full_tensor(model.get_parameter("fc.weight")).clone()
    SimpleTrainer(model, [], torch.optim.SGD(model.parameters(), lr=0.1))
    return torch.equal(full_tensor(model.get_parameter("fc.weight")), before)


def _parts() -> list[tuple[int, int]]:
    parts = []
    for strategy in (FSDPStrategy(device="cpu", mesh={"tensor": 2}), DDPStrategy()):
        strategy.setup()
        parts.append((comm.data_parallel_rank(), comm.data_parallel_size()))
    return parts


def _replicated() -> Any:
    strategy = make_strategy(FSDPStrategy, mesh={"replicate": 2})
    model: Any = strategy.prepare(make_model())
    part = (comm.data_parallel_rank(), comm.data_parallel_size())
    rows = len(local_tensor(model.head.weight))
    return part, rows, train(model, make_wrapper(model), DATA[:4])


def divide_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tensor"], {"fc": ColwiseParallel()})


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the whole model, where the strategy would shard each block."""
    sharded: nn.Module = fully_shard(model, mesh=mesh["shard"])
    return sharded


def _own() -> Any:
    strategy = FSDPStrategy(device="cpu", seed=3, deferred_init=True, parallelize=shard)
    model: Any = strategy.prepare(CONFIG)
    units = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    return units, full_tensor(model.head.weight)


def _refused() -> None:
    cases: list[Any] = [
        ("{'replicate': 3}", {"replicate": 3}),
        ("{'pipeline': 2}", {"pipeline": 2}),
    ]
    for message, mesh in cases:
        strategy = FSDPStrategy(device="cpu", mesh=mesh)
        with pytest.raises(ValueError, match=message):
            strategy.prepare(Mean())


def _uneven() -> tuple[int, Tensor]:
    options: Any = {"mesh": {"tensor": 2}, "parallelize": divide_rows}
    strategy = FSDPStrategy(device="cpu", seed=3, deferred_init=True, **options)
    weight = strategy.prepare(Mean).get_parameter("fc.weight")
    return len(local_tensor(weight)), full_tensor(weight)


def _on_two_ranks() -> dict[str, Any]:
    return {
        "plain": _losses(),
        "compiled": _losses(compile={"backend": "eager"}),
        "blocks": _compiled_blocks(),
        **dict(zip(("deferred", "drawn"), _deferred(), strict=True)),
        "initialised once": _initialised_once(),
        "parts": _parts(),
        "replicated": _replicated(),
        "own": _own(),
        "refused": _refused(),
        "uneven": _uneven(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def test_losses_are_those_of_one_process(two: list[dict[str, Any]]) -> None:
    model = make_model()
    alone = train(model, make_wrapper(model), DATA[:4])
    assert alone[-1] < alone[1] - 0.05
    assert two[0]["plain"] == pytest.approx(alone, abs=1e-5)


def test_a_compiled_model_learns_the_same(two: list[dict[str, Any]]) -> None:
    assert two[0]["compiled"] == pytest.approx(two[0]["plain"], abs=1e-5)
    losses, graphs = two[0]["blocks"]
    assert losses == pytest.approx(two[0]["plain"], abs=1e-5)
    assert graphs > 0


def test_a_deferred_model_has_the_weights_of_one_process(
    two: list[dict[str, Any]],
) -> None:
    assert torch.equal(two[0]["deferred"], make_model().head.weight)
    # Building it leaves all ranks with the same random numbers.
    assert torch.equal(two[0]["drawn"], two[1]["drawn"])


def test_a_deferred_model_is_initialised_on_the_first_rank_only(
    two: list[dict[str, Any]],
) -> None:
    assert [rank["initialised once"] for rank in two] == [True, True]


def test_ranks_that_divide_a_model_read_one_part_of_the_data(
    two: list[dict[str, Any]],
) -> None:
    # The next strategy sets its own parts.
    assert [rank["parts"] for rank in two] == [[(0, 1), (0, 2)], [(0, 1), (1, 2)]]


def test_a_second_number_replicates_what_is_sharded(two: list[dict[str, Any]]) -> None:
    assert [rank["replicated"][:2] for rank in two] == [((0, 2), 17), ((1, 2), 17)]
    assert two[0]["replicated"][2] == pytest.approx(two[0]["plain"], abs=1e-5)


def test_a_function_may_shard_the_model_itself_before_it_has_weights(
    two: list[dict[str, Any]],
) -> None:
    units, weight = two[0]["own"]
    assert units == [""]
    assert torch.equal(weight, two[0]["deferred"])


def test_rows_need_not_be_a_multiple_of_the_ranks(two: list[dict[str, Any]]) -> None:
    torch.manual_seed(3)
    expected = Mean().fc.weight
    assert [rank["uneven"][0] for rank in two] == [2, 1]
    for rank in two:
        assert torch.equal(rank["uneven"][1], expected)


def test_what_does_not_fit_is_refused_before_it_is_sharded(
    two: list[dict[str, Any]],
) -> None:
    assert [rank["refused"] for rank in two] == [None, None]


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        FSDPStrategy(device="cpu", seed=0).prepare(make_model())
