"""The text model divided in two dimensions, in real processes and on very many pretended ones."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from equality import assert_equal
from gloo import run_ranks
from hooktrain.checkpoint.loading import load_model_state
from hooktrain.config import LazyCall
from hooktrain.data import build_test_loader
from hooktrain.demos.text import TextGPT
from hooktrain.demos.text_parallel import parallelize
from hooktrain.evaluation import DatasetEvaluator, inference_on_dataset
from hooktrain.model import ExponentialMovingAverage
from hooktrain.strategy import FSDPStrategy, SingleDeviceStrategy
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensors, local_tensor
from sharding_toys import DATA, Run, resumed_run, saved_run

CONFIG = LazyCall(TextGPT)(vocab_size=18, block_size=8, size=(1, 16, 2), fused=False)
DIVIDED = {"config": CONFIG, "parallelize": parallelize, "mesh": {"tensor": 2}}
SHARDED = {"config": CONFIG, "mesh": {"tensor": 1}}
SHARDS = {"sharded": True}


def averaged(run: Run, saved: Any = None) -> dict[str, Any]:
    """An average after two steps, or one that was loaded."""
    average = ExponentialMovingAverage(run.model, 0.5)
    if saved is None:
        run.train(slice(2))
        average.update_parameters(run.model)
    else:
        load_model_state(average, saved, strict=True)
    whole: dict[str, Any] = full_tensors(dict(average.state_dict()))
    return whole


def text_of(run: Run) -> Tensor:
    model: Any = run.model
    model.eval()
    text: Tensor = model.generate(torch.tensor([3]), 3, temperature=0)
    return text


def deferred(folder: str, **options: Any) -> Any:
    """The weights of a model that is divided before it has any."""
    return Run(FSDPStrategy, folder, deferred_init=True, **options).states()["model"]


def _placed(run: Run) -> dict[str, Any]:
    sizes = {}
    for name, parameter in run.model.named_parameters():
        sizes[name] = tuple(local_tensor(parameter).shape)
    return {
        "part": (comm.data_parallel_rank(), comm.data_parallel_size()),
        "query": sizes["blocks.0.attention_in.query.weight"],
        "out": sizes["blocks.0.attention_out.weight"],
        "norm": sizes["norm.weight"],
    }


class Seen(DatasetEvaluator):
    """What came from all ranks."""

    def reset(self) -> None:
        self.numbers: list[int] = []

    def process(self, inputs: Any, outputs: Tensor) -> None:
        assert outputs.shape == (len(inputs["number"]), 8, 18)
        self.numbers += inputs["number"].tolist()

    def evaluate(self) -> dict[str, list[list[int]]]:
        return {"numbers": comm.all_gather(self.numbers)}


def evaluated(run: Run) -> Any:
    texts = DATA[0]["tokens"][:5]
    samples: Any = [{"tokens": text, "number": i} for i, text in enumerate(texts)]
    loader = build_test_loader(samples, batch_size=2)
    return inference_on_dataset(run.model, loader, Seen())


def _on_four_ranks(folder: str, average: dict[str, Any]) -> dict[str, Any]:
    four = {
        "full": saved_run(FSDPStrategy, f"{folder}/full", **DIVIDED),
        "shards": saved_run(FSDPStrategy, f"{folder}/shards", **DIVIDED, **SHARDS),
        "from full": resumed_run(FSDPStrategy, f"{folder}/full", **DIVIDED),
        "from shards": resumed_run(
            FSDPStrategy, f"{folder}/shards", **DIVIDED, **SHARDS
        ),
        "from one": resumed_run(FSDPStrategy, f"{folder}/one", **DIVIDED),
    }
    run = Run(FSDPStrategy, folder, **DIVIDED)
    four["placed"] = _placed(run)
    four["evaluated"] = evaluated(run)
    four["deferred"] = deferred(folder, **DIVIDED)
    four["text"] = text_of(run)
    four["average"] = averaged(run)
    four["loaded average"] = averaged(run, average)
    return four


def _on_two_ranks(folder: str) -> tuple[list[dict[str, Any]], Any]:
    resumed = []
    for name in ("full", "shards"):
        for options in (SHARDED, DIVIDED):
            path = f"{folder}/{name}"
            resumed.append(resumed_run(FSDPStrategy, path, **options))
    return resumed, deferred(folder, **SHARDED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    run = Run(SingleDeviceStrategy, str(folder), CONFIG)
    return {
        **saved_run(SingleDeviceStrategy, f"{folder}/one", config=CONFIG),
        "text": text_of(run),
        "average": averaged(run),
    }


@pytest.fixture(scope="module")
def four(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(_on_four_ranks, 4, str(folder), one["average"])


def test_each_rank_has_a_part_of_the_data_and_of_both_dimensions(
    four: list[dict[str, Any]],
) -> None:
    assert [rank["placed"]["part"] for rank in four] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert four[3]["placed"] == {
        "part": (1, 2),
        "query": (4, 16),
        "out": (8, 8),
        "norm": (8,),
    }


def test_it_learns_and_writes_as_one_process(
    one: dict[str, Any], four: list[dict[str, Any]]
) -> None:
    assert one["losses"][-1] < one["losses"][0] - 0.05
    assert four[0]["full"]["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert four[0]["shards"]["losses"] == four[0]["full"]["losses"]
    for rank in four:
        assert torch.equal(rank["text"], one["text"])


def test_evaluators_see_each_sample_once(four: list[dict[str, Any]]) -> None:
    assert four[0]["evaluated"] == {"numbers": [[0, 1, 2], [], [3, 4], []]}


def test_a_resumed_run_is_the_same_bit_for_bit(
    one: dict[str, Any], four: list[dict[str, Any]]
) -> None:
    for kind in ("full", "shards"):
        saved, resumed = four[0][kind], four[0][f"from {kind}"]
        assert_equal(resumed["states"], saved["states"])
        assert resumed["losses"] == saved["losses"][3:]
    assert_equal(four[0]["from one"]["states"], one["states"])


@pytest.fixture(scope="module")
def two(folder: Path, four: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any]:
    main, _ = run_ranks(_on_two_ranks, 2, str(folder))
    return main


def test_a_deferred_model_starts_from_the_same_weights_in_any_dimensions(
    four: list[dict[str, Any]], two: tuple[list[dict[str, Any]], Any]
) -> None:
    weights = four[0]["deferred"]
    assert_equal(weights, two[1])
    assert weights["head.weight"].std().item() == pytest.approx(0.02, rel=0.2)


def test_it_goes_on_in_other_dimensions(
    folder: Path, four: list[dict[str, Any]], two: tuple[list[dict[str, Any]], Any]
) -> None:
    resumed, _ = two
    for name in ("full", "shards"):
        kind = SingleDeviceStrategy
        resumed.append(resumed_run(kind, f"{folder}/{name}", config=CONFIG))
    saved = four[0]["full"]
    for run_on in resumed:
        assert_equal(run_on["states"], saved["states"])
        assert run_on["losses"] == pytest.approx(saved["losses"][3:], abs=1e-5)


def test_weights_are_averaged(one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    assert_equal(four[0]["loaded average"], one["average"])
    for name, value in four[0]["average"].items():
        torch.testing.assert_close(value, one["average"][name], msg=name)


class Collectives(TorchDispatchMode):
    """Counts the collectives by their names, those of DTensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.namespace:
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(ranks: int, folder: Path) -> tuple[Any, int, Counter[str]]:
    """The mesh, the parts of the data, and the collectives of one of so many ranks."""
    config = {**CONFIG, "vocab_size": 64, "size": (1, 128, 16)}
    mesh = {"replicate": 8, "tensor": 8}
    # Collectives return at once, with nothing from the others.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        run = Run(FSDPStrategy, str(folder), config, parallelize=parallelize, mesh=mesh)
        run.train(slice(1))
        with Collectives() as counted:
            run.train(slice(1, 2))
        strategy: Any = run.strategy
        return strategy.mesh.shape, comm.data_parallel_size(), counted.counts
    finally:
        dist.destroy_process_group()


def test_a_step_takes_as_many_collectives_on_4096_ranks_as_on_128(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "object_group", lambda: dist.group.WORLD)
    few = collectives_of_a_step(128, tmp_path)
    many = collectives_of_a_step(4096, tmp_path)
    assert few[:2] == ((8, 2, 8), 16)
    assert many == ((8, 64, 8), 512, few[2])
