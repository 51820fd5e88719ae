import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from equality import assert_equal
from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.model import SeparateDistributedDataParallel, StepDistributedDataParallel
from hooktrain.model.wrappers import call_model, unwrap_model
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from toys import PairPreprocessor, Pairs, ToyModel, batch, sgd_wrapper, toy_gan

State = dict[str, Tensor]


def toy(seed: int) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel(PairPreprocessor())


def named(*pair: Tensor) -> State:
    return dict(zip("xy", pair, strict=True))


def halves(seed: int) -> list[Tensor]:
    """This rank's half of a batch of 8."""
    return [t.chunk(2)[dist.get_rank()] for t in batch(8, seed)]


def counted(calls: list[None], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    calls.append(None)
    return allreduce_hook(dist.group.WORLD, bucket)


def assert_close(ours: State, theirs: State) -> None:
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=1e-6)


def accumulate_whole() -> tuple[list[int], State]:
    # Other weights on each rank: the first one's are to be everywhere.
    model = StepDistributedDataParallel(toy(dist.get_rank()))
    calls: list[None] = []
    model.register_comm_hook(calls, counted)
    wrapper = sgd_wrapper(model, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    made = []
    for seed in range(5):
        model.train_step(named(*halves(seed)), wrapper)
        made.append(len(calls))
    return made, dict(model.module.state_dict())


def test_ranks_communicate_in_the_last_pass_of_an_accumulation_only(ranks: Any) -> None:
    model = toy(0)
    wrapper = sgd_wrapper(model, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    for seed in range(5):
        model.train_step(named(*batch(8, seed)), wrapper)
    (made, first), (_, second) = (rank["accumulate_whole"] for rank in ranks)
    assert made == [0, 0, 1, 1, 2]
    assert_close(first, model.state_dict())
    assert_equal(first, second)


class Partly(ToyModel):
    """Its forward leaves out some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.left_out = nn.Linear(1, 1)


def unused() -> str:
    model = StepDistributedDataParallel(Partly())
    wrapper = sgd_wrapper(model)
    model.train_step(batch(2), wrapper)
    with pytest.raises(RuntimeError) as error:
        model.train_step(batch(2), wrapper)
    found = StepDistributedDataParallel(Partly(), find_unused_parameters=True)
    wrapper = sgd_wrapper(found)
    for _ in range(2):
        found.train_step(batch(2), wrapper)
    return str(error.value)


def test_unused_parameters_are_named_when_ddp_fails(ranks: Any) -> None:
    message = ranks[1]["unused"]
    assert "grad for rank 1: left_out.bias, left_out.weight" in message
    assert "find_unused_parameters=True" in message


class OwnStep(ToyModel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return super().train_step(data, optim_wrapper)


class Aware(StepDistributedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {"loss": torch.zeros(())}


def own_step() -> list[str]:
    model = StepDistributedDataParallel(OwnStep())
    with pytest.raises(TypeError, match="train_step"):
        model.train_step(batch(2), sgd_wrapper(model))
    return list(Aware(OwnStep()).train_step(batch(2), None))


def test_a_models_own_train_step_is_not_passed_over(ranks: Any) -> None:
    assert ranks[0]["own_step"] == ["loss"]


def buffers_of_the_ranks() -> list[list[float]]:
    seen = []
    for broadcast in (False, True):
        model = ToyModel()
        model.register_buffer("mean", torch.full((1,), float(dist.get_rank())))
        wrapped = StepDistributedDataParallel(model, broadcast_buffers=broadcast)
        values = [model.mean.item()]
        model.mean.fill_(dist.get_rank() + 1)
        wrapped(*batch(2), mode="loss")
        seen.append([*values, model.mean.item()])
    return seen


def test_buffers_are_the_first_ranks_at_the_start(ranks: Any) -> None:
    assert ranks[0]["buffers_of_the_ranks"] == [[0, 1], [0, 1]]
    assert ranks[1]["buffers_of_the_ranks"] == [[0, 2], [0, 1]]


def wrappers(model: Any, **options: Any) -> OptimWrapperDict:
    each = {}
    for name in ("generator", "discriminator"):
        optimizer = torch.optim.SGD(getattr(model, name).parameters(), lr=0.1)
        each[name] = OptimWrapper(optimizer, **options)
    return OptimWrapperDict(**each)


def train_parts(accumulative_counts: int = 1) -> tuple[State, list[int], list[str]]:
    gan = toy_gan(dist.get_rank())
    model = SeparateDistributedDataParallel(gan).eval()
    parts = {
        n: c for n, c in gan.named_children() if isinstance(c, DistributedDataParallel)
    }
    calls: list[None] = []
    for part in parts.values():
        part.register_comm_hook(calls, counted)
    optimizers = wrappers(gan, accumulative_counts=accumulative_counts)
    made = []
    for seed in range(4):
        values = model.train_step(halves(seed)[0], optimizers)
        made.append(len(calls))
    assert list(values) == ["loss_d", "loss_g"]
    return dict(gan.state_dict()), made, [*parts]


def accumulate_parts() -> tuple[State, list[int], list[str]]:
    return train_parts(accumulative_counts=2)


@pytest.mark.parametrize(
    # One exchange a part in each iteration, or in each second one.
    ("name", "counts", "exchanges"),
    [("train_parts", 1, [2, 4, 6, 8]), ("accumulate_parts", 2, [0, 2, 2, 4])],
)
def test_two_parts_on_two_ranks_learn_what_one_process_learns(
    name: str, counts: int, exchanges: list[int], ranks: Any
) -> None:
    model = toy_gan(0).eval()
    optimizers = wrappers(model, accumulative_counts=counts)
    for seed in range(4):
        model.train_step(batch(8, seed)[0], optimizers)
    (first, made, kinds), (second, _, _) = (rank[name] for rank in ranks)
    assert_close(first, model.state_dict())
    assert_equal(first, second)
    assert made == exchanges
    assert kinds == ["generator", "discriminator"]


def save_and_load(folder: Path) -> tuple[list[str], list[str], list[Any], State]:
    model = SeparateDistributedDataParallel(toy_gan(5))
    Checkpointer(model, folder).save("wrapped")
    names = list(model.state_dict())
    state = model.module.state_dict()
    del state["generator.0.bias"]
    state["discriminator.bogus"] = torch.ones(1)
    found = list(model.module.load_state_dict(state, strict=False))
    inner = list(model.module.discriminator.state_dict())
    Checkpointer(model).load(folder / "bare.pth")
    return names, inner, found, dict(model.module.state_dict())


def test_the_state_is_that_of_the_bare_model(ranks: Any, folder: Path) -> None:
    bare = dict(toy_gan(3).state_dict())
    names, inner, found, loaded = ranks[0]["save_and_load"]
    assert names == [f"module.{name}" for name in bare]
    assert inner == ["weight", "bias"]
    assert found == [["generator.module.0.bias"], ["discriminator.module.bogus"]]
    assert_equal(loaded, bare)
    again = toy_gan(4)
    Checkpointer(again).load(folder / "wrapped.pth")
    assert_equal(again.state_dict(), toy_gan(5).state_dict())


class Aliased(nn.Module):
    """One child under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.again = self.net


def aliased() -> bool:
    model = Aliased()
    SeparateDistributedDataParallel(model, find_unused_parameters=True)
    assert isinstance(model.net, StepDistributedDataParallel)
    assert model.net.find_unused_parameters
    return model.net is model.again


def test_a_child_with_two_names_stays_one(ranks: Any) -> None:
    assert ranks[0]["aliased"]


def test_parameters_outside_of_the_children_are_refused_by_name() -> None:
    model = Pairs()
    model.scale = nn.Parameter(torch.ones(1))
    model.constant = nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ValueError, match="'scale'"):
        SeparateDistributedDataParallel(model)
    assert type(model.generator) is nn.Sequential


def everything(folder: Path) -> dict[str, Any]:
    warnings.simplefilter("error")
    functions = (
        accumulate_whole,
        unused,
        own_step,
        buffers_of_the_ranks,
        train_parts,
        accumulate_parts,
        aliased,
    )
    results = {function.__name__: function() for function in functions}
    return {**results, "save_and_load": save_and_load(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What two ranks returned: it takes seconds to start them, so it is done once."""
    Checkpointer(toy_gan(3), folder).save("bare")
    return run_ranks(everything, 2, folder)


def test_the_model_inside_of_any_wrappers_is_found() -> None:
    model = nn.Sequential()
    model.module = nn.Linear(1, 1)  # a part of it, and no wrapper
    assert unwrap_model(model) is model
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    assert unwrap_model(nn.DataParallel(compiled)) is model


@pytest.mark.parametrize(
    ("forward", "keys", "given"),
    [
        (lambda self, x, y=None: [x, y], "xy", [0, 1]),
        (lambda self, x, *, y=None, **more: [x, y], "x", [0, None]),
        (lambda self, x, y=None, **more: x, "xz", {"x": 0, "z": 1}),
        (lambda self, x, y=None: x, "", {}),
        # As detectron2's models, which take the dict itself.
        (lambda self, x: x, "x", {"x": 0}),
        (lambda self, x, **more: x, "yz", {"y": 0, "z": 1}),
        (lambda self, *x, **y: x[0], "ab", {"a": 0, "b": 1}),
    ],
)
def test_a_dict_is_given_by_keywords_where_its_keys_are_the_parameters(
    forward: Callable[..., Any], keys: str, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hooktrain.model")
    batch = {key: number for number, key in enumerate(keys)}
    model = type("Model", (nn.Module,), {"forward": forward})()
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    for each in (compiled, model, model):
        assert call_model(each, batch) == given
    assert caplog.text.count("forward()") <= 1
    assert call_model(lambda x, y=None: x, batch) == batch
    assert call_model(model, "ab") in ("ab", ["ab", None])
    assert ("no parameter 'z'" in caplog.text) == (keys == "xz")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_called_as_it_was_before() -> None:
    layer = torch.jit.script(nn.Bilinear(1, 1, 1))
    one = torch.ones(1, 1)
    assert call_model(layer, {"input1": one, "input2": one}).shape == (1, 1)
