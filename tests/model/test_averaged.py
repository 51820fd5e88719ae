"""Averages of weights, against their formulas."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equality import assert_equal
from gloo import run_ranks
from hooktrain.checkpoint.loading import load_model_state
from hooktrain.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    StochasticWeightAverage,
)
from hooktrain.utils.tensors import full_tensors
from sharding_toys import batches, full_state_dict, make_model, make_sharded

State = dict[str, Tensor]


class Net(nn.Module):
    """Batch norm, a shared weight, a frozen one, half precision, several buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.stem.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.coarse = nn.Parameter(torch.randn(2).bfloat16())
        self.index = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x)) + self.tied(x)  # type: ignore[no-any-return]


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Change every parameter and buffer, in place."""
    model(torch.randn(5, 3))
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        tensor += torch.randn_like(tensor) if tensor.is_floating_point() else 1


def values(model: nn.Module) -> State:
    """All tensors that a model saves."""
    return {name: value.clone() for name, value in model.state_dict().items()}


COPIED = {"index", "scale"} | {
    f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
}


@pytest.mark.parametrize("warmup", [False, True])
def test_weights_are_averaged_while_the_rest_is_copied(warmup: bool) -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, 0.5, warmup=warmup)
    expected = values(model)
    for n in range(12):
        train(model)
        ema.update_parameters(model)
        weight = 1 - (min(0.5, (1 + n) / (10 + n)) if warmup else 0.5)
        for name, present in values(model).items():
            if name in COPIED:
                expected[name] = present
            else:
                expected[name] = torch.lerp(expected[name], present, weight)
    assert_equal(values(ema.module), expected)
    assert ema.steps == 12
    ema.reset(model)
    assert_equal(values(ema.module), values(model))
    assert ema.steps == 0


def test_the_averaged_model_is_a_separate_one_for_evaluation() -> None:
    model = Net().train()
    model(torch.randn(5, 3)).sum().backward()
    ema = ExponentialMovingAverage(model)
    assert not ema.module.training
    assert model.training
    assert model.stem.weight.requires_grad
    assert all(not p.requires_grad and p.grad is None for p in ema.module.parameters())
    assert ema.module.tied.weight is ema.module.stem.weight


class Caching(nn.Module):
    """A table that comes later, one that grows and shrinks, and a saved queue that does so too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.ones(len(x))
        self.register_buffer("table", torch.ones(len(x)), persistent=False)
        self.queue = x[:, 0].clone()
        return (self.fc(x)[:, 0] * self.mask * self.table).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [(3, 5, 4), (1, 3), (3, 1)])
def test_buffers_may_come_later_grow_and_shrink(sizes: tuple[int, ...]) -> None:
    model = Caching()
    average = ExponentialMovingAverage(model, 0.5)
    for size in sizes:
        x = torch.randn(size, 3)
        model(x)
        average.update_parameters(model)
        assert torch.equal(average.module.queue, x[:, 0])  # type: ignore[arg-type]
    raw = values(model)
    average.module.queue = torch.zeros(7)
    with average.swap(model):
        assert torch.equal(model.queue, torch.zeros(7))
        assert len(model.table) == sizes[-1]
        model(torch.randn(2, 3))
    assert_equal(values(model), raw)
    average.reset(model)
    assert_equal(values(average.module), raw)


def test_swap_gives_the_same_weights_back_after_an_error() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, 0.5)
    train(model)
    raw, average = values(model), values(ema.module)
    pointers = [tensor.data_ptr() for tensor in model.parameters()]

    def evaluate() -> None:
        with torch.inference_mode(), ema.swap(model):
            assert_equal(values(model), average)
            train(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert_equal(values(model), raw)
    assert_equal(values(ema.module), average)
    assert [tensor.data_ptr() for tensor in model.parameters()] == pointers


def test_weights_are_exchanged_under_autocast_too() -> None:
    model = nn.Linear(2, 1, bias=False)
    average = ExponentialMovingAverage(model)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        average.module.weight.copy_(torch.tensor([[8.0, 16.0]]))  # type: ignore[operator, union-attr]
    x = torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model(x).item() == 3
        with average.swap(model):
            assert model(x).item() == 24
        assert model(x).item() == 3


def test_a_swap_that_is_never_entered_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    average = ExponentialMovingAverage(model)
    with average.swap(model):
        pass
    assert caplog.messages == []
    average.swap(model)
    assert "with ema.swap()" in caplog.text


def test_another_model_is_refused_by_naming_the_difference() -> None:
    ema = ExponentialMovingAverage(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"differ in \['bias'\]"):
        ema.update_parameters(nn.Linear(3, 4, bias=False))
    with pytest.raises(RuntimeError, match="3"):
        ema.reset(nn.Linear(2, 4))


def scalar(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


class Quarter(BaseAveragedModel):
    def blending_weight(self, steps: int) -> float:
        assert steps % 2 == 0
        return 0.25


def warmed(momentum: float, **options: Any) -> ExponentialMovingAverage:
    return ExponentialMovingAverage(scalar(0.0), momentum, warmup=True, **options)


@pytest.mark.parametrize(
    ("average", "weights", "expected"),
    [
        (
            ExponentialMovingAverage(scalar(1.0), 0.25),
            [2, 4, 0],
            [1.25, 1.9375, 1.453125],
        ),
        (StochasticWeightAverage(scalar(100.0)), [4, 0, 8, 4, 24], [4, 2, 4, 4, 8]),
        (Quarter(scalar(0.0), interval=2), [8, 1, 2, 1], [2, 2, 2, 2]),
        # The warm-up counts all updates, those between two intervals too.
        (warmed(0.1, interval=4), [1] * 5, [*[0.9] * 4, 0.9 + 0.1 * (1 - 5 / 14)]),
    ],
)
def test_averages_follow_their_formulas(
    average: BaseAveragedModel, weights: list[float], expected: list[float]
) -> None:
    seen = []
    for value in weights:
        average.update_parameters(scalar(value))
        seen.append(average.module.weight.item())
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("kind", [ExponentialMovingAverage, StochasticWeightAverage])
def test_each_kind_resumes_bit_for_bit(kind: Any) -> None:
    model = Net()
    first = kind(model, interval=2)
    for _ in range(3):
        train(model)
        first.update_parameters(model)
    second = kind(model, interval=2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(3):
        train(model)
        first.update_parameters(model)
        second.update_parameters(model)
    assert_equal(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("momentum", [0.0, 99, math.nan])
def test_a_momentum_outside_of_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(ValueError, match=rf"in \(0, 1\]: {momentum}"):
        ExponentialMovingAverage(nn.Linear(1, 1), momentum)


def test_a_momentum_that_is_a_decay_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for fine in (0.5, 0.6, 1.0):
        ExponentialMovingAverage(nn.Linear(1, 1), fine)
    assert not caplog.messages
    ExponentialMovingAverage(nn.Linear(1, 1), 0.9)
    ExponentialMovingAverage(nn.Linear(1, 1), 0.99)
    _, message = caplog.messages
    assert "momentum=0.99" in message
    assert "momentum=0.01, decay=0.99" in message


def test_an_update_does_not_wait_for_the_device() -> None:
    model = Net()
    average = StochasticWeightAverage(model)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        average.update_parameters(model)
    calls = {event.key for event in profile.key_averages()}
    assert {"aten::_foreach_lerp_", "aten::_foreach_copy_"} <= calls
    assert not {"aten::item", "aten::nonzero"} & calls


def averaged_run(model: nn.Module) -> tuple[Any, ExponentialMovingAverage]:
    """Updates after changes of the weights that are no training."""
    average = ExponentialMovingAverage(model, 0.25)
    for step in range(3):
        weights = {
            k: v + 0.1 * (step + 1) for k, v in make_model().state_dict().items()
        }
        load_model_state(model, weights, strict=True)
        average.update_parameters(model)
    return copy.deepcopy(full_tensors(dict(average.state_dict()))), average


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model({"tokens": batches(1)[0]["tokens"]})  # type: ignore[no-any-return]


def _on_two_ranks() -> dict[str, Any]:
    model = make_sharded()
    state, average = averaged_run(model)
    raw = full_state_dict(model)
    raw_logits = logits(model)  # leaves whole tensors in the outermost unit
    with average.swap(model):
        swapped, swapped_logits = full_state_dict(model), logits(model)
    assert torch.equal(logits(model), raw_logits)
    after = full_state_dict(model)
    average.update_parameters(model)  # right after an evaluation
    other = ExponentialMovingAverage(make_sharded())
    load_model_state(other, averaged_run(make_model())[0], strict=True)
    return {
        "average": state,
        "raw": raw,
        "after": after,
        "swapped": swapped,
        "logits": swapped_logits,
        "loaded": full_tensors(dict(other.state_dict())),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def test_the_average_of_shards_is_that_of_the_whole(two: list[dict[str, Any]]) -> None:
    whole, _ = averaged_run(make_model())
    assert_equal(two[0]["average"], whole)
    assert_equal(two[0]["loaded"], whole)


def test_shards_are_swapped_around_an_evaluation(two: list[dict[str, Any]]) -> None:
    result = two[0]
    average = {f"module.{name}": value for name, value in result["swapped"].items()}
    assert_equal({"steps": torch.tensor(3), **average}, result["average"])
    assert_equal(result["after"], result["raw"])
    alone = make_model()
    alone.load_state_dict(result["swapped"])
    torch.testing.assert_close(result["logits"], logits(alone))
