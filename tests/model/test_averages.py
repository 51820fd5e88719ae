"""The kinds of averages, against their formulas, MMEngine's and torch's."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
    update_bn_stats,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.model.averaged_model as theirs


class Net(nn.Module):
    """With float and integer buffers, a frozen parameter and one that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.stem.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.stem(x)) + self.tied(x)


@torch.no_grad()
def train(model: nn.Module) -> None:
    model(torch.randn(5, 3))
    for parameter in model.parameters():
        parameter += torch.randn_like(parameter)


def run(average: BaseAveragedModel, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        train(model)
        average.update(model)


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, others = a.state_dict(), b.state_dict()
    return ours.keys() == others.keys() and all(torch.equal(ours[k], others[k]) for k in ours)


def scalar(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def averages(average: BaseAveragedModel, values: list[float]) -> list[float]:
    seen = []
    for value in values:
        average.update(scalar(value))
        seen.append(average.module.weight.item())
    return seen


def test_stochastic_weight_averaging_counts_all_weights_alike() -> None:
    swa = StochasticWeightAverage(scalar(100.0))
    assert averages(swa, [4.0, 0.0, 8.0, 4.0, 24.0]) == [4.0, 2.0, 4.0, 4.0, 8.0]


def test_the_annealed_average_follows_the_formula() -> None:
    ema = MomentumAnnealingEMA(scalar(100.0), decay=0.5, gamma=3)
    # The weights are 3/3, 3/4, 3/5, and from there 1/2.
    assert averages(ema, [4.0, 8.0, 2.0, 3.0, 4.0]) == pytest.approx([4.0, 7.0, 4.0, 3.5, 3.75])


def test_parameters_come_in_at_each_interval_and_buffers_always() -> None:
    model = Net()
    swa = StochasticWeightAverage(model, interval=3)
    samples = []
    for n in range(8):
        train(model)
        swa.update(model)
        if n % 3 == 0:
            samples.append(model.stem.bias.detach().clone())
        expected = torch.stack(samples).mean(0)
        torch.testing.assert_close(swa.module.stem.bias, expected)
        for name, buffer in model.named_buffers():
            assert torch.equal(swa.module.get_buffer(name), buffer)
        assert swa.module.norm.num_batches_tracked.item() == n + 1
    assert len(samples) == 3
    assert swa.updates == 8


def test_the_warm_up_counts_all_updates_with_an_interval_too() -> None:
    ema = ExponentialMovingAverage(scalar(0.0), decay=0.9, warmup=True, interval=4)
    seen = averages(ema, [1.0] * 5)
    assert seen == pytest.approx([0.9, 0.9, 0.9, 0.9, 0.9 + 0.1 * (1 - 5 / 14)])


PAIRS: dict[str, tuple[Callable[..., BaseAveragedModel], Callable[..., Any]]] = {
    "EMA": (
        lambda model, interval: ExponentialMovingAverage(model, 1 - 0.1, interval=interval),
        lambda model, interval: theirs.ExponentialMovingAverage(model, 0.1, interval),
    ),
    "EMA, momentum above a half": (
        lambda model, interval: ExponentialMovingAverage(model, 1 - 0.5, interval=interval),
        lambda model, interval: theirs.ExponentialMovingAverage(model, 0.5, interval),
    ),
    "annealing": (
        lambda model, interval: MomentumAnnealingEMA(model, 1 - 0.2, 7, interval=interval),
        lambda model, interval: theirs.MomentumAnnealingEMA(model, 0.2, 7, interval),
    ),
    "annealing with the defaults": (
        lambda model, interval: MomentumAnnealingEMA(model, interval=interval),
        lambda model, interval: theirs.MomentumAnnealingEMA(model, interval=interval),
    ),
    "SWA": (
        lambda model, interval: StochasticWeightAverage(model, interval=interval),
        lambda model, interval: theirs.StochasticWeightAverage(model, interval),
    ),
}


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("kind", PAIRS)
def test_averages_are_those_of_mmengine(kind: str, interval: int) -> None:
    model = Net()
    # MMEngine's first update copies. Ours of an exponential average blends with the weights at
    # construction; which is the same if the first update is made with those.
    ours, other = (make(model, interval) for make in PAIRS[kind])
    for _ in range(3 * interval + 2):
        ours.update(model)
        other.update_parameters(model)
        theirs_now = dict(other.module.state_dict())
        for name, value in ours.module.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(value, theirs_now[name], rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(value, theirs_now[name])
        train(model)


def test_stochastic_weight_averaging_is_that_of_torch() -> None:
    model = Net()
    swa, reference = StochasticWeightAverage(model), torch.optim.swa_utils.AveragedModel(model)
    for _ in range(6):
        train(model)
        swa.update(model)
        reference.update_parameters(model)
        for ours, other in zip(
            swa.module.state_dict().values(), reference.module.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(ours, other)


KINDS: dict[str, Callable[[nn.Module], BaseAveragedModel]] = {
    "EMA": lambda model: ExponentialMovingAverage(model, warmup=True, interval=2),
    "annealing": lambda model: MomentumAnnealingEMA(model, 0.9, 5, interval=2),
    "SWA": lambda model: StochasticWeightAverage(model, interval=2),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_kind_resumes_bit_for_bit(make: Callable[[nn.Module], BaseAveragedModel]) -> None:
    for steps in (3, 4):
        model = Net()
        first = make(model)
        run(first, model, steps)
        file = io.BytesIO()
        torch.save([first.state_dict(), model.state_dict()], file)
        file.seek(0)
        saved, weights = torch.load(file, weights_only=True)
        resumed = Net()
        resumed.load_state_dict(weights)
        second = make(resumed)
        second.load_state_dict(saved)
        state = torch.get_rng_state()
        run(first, model, 5)
        torch.set_rng_state(state)
        run(second, resumed, 5)
        assert same(first.module, second.module)
        assert not same(first.module, model)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_kind_can_be_swapped_in_and_out(
    make: Callable[[nn.Module], BaseAveragedModel],
) -> None:
    model = Net()
    average = make(model)
    run(average, model, 5)
    raw = copy.deepcopy(model)

    def fail() -> None:
        with average.swap(model):
            assert same(model, average.module)
            train(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert same(model, raw)


def test_what_was_not_a_number_before_the_first_copy_is_forgotten() -> None:
    for make in (StochasticWeightAverage, MomentumAnnealingEMA):
        average = make(scalar(float("nan")))
        assert averages(average, [2.0]) == [2.0]


def test_the_statistics_of_batch_norm_are_replaced_as_it_is_documented() -> None:
    model = Net()
    swa = StochasticWeightAverage(model)
    run(swa, model, 4)
    swa.module.train()
    batches = [torch.randn(16, 3) for _ in range(4)]
    update_bn_stats(swa.module, batches, num_iters=4)
    swa.module.eval()
    values = swa.module.stem(torch.cat(batches))
    torch.testing.assert_close(swa.module.norm.running_mean, values.mean(0))
    torch.testing.assert_close(swa.module.norm.running_var, values.var(0, correction=0))
    assert not torch.equal(swa.module.norm.running_mean, model.norm.running_mean)


def test_a_kind_of_ones_own_says_only_how_much_comes_in() -> None:
    class Last(BaseAveragedModel):
        seen: tuple[int, ...] = ()

        def blending_weight(self, updates: int) -> float:
            self.seen += (updates,)
            return 0.25

    last = Last(scalar(0.0), interval=2)
    assert averages(last, [8.0, 1.0, 2.0, 1.0, 4.875]) == [2.0, 2.0, 2.0, 2.0, 2.71875]
    assert last.seen == (0, 2, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: StochasticWeightAverage(m, interval=0), "interval must be .* at least 1: 0"),
        (lambda m: StochasticWeightAverage(m, interval=1.5), "interval must be an integer.*: 1.5"),
        (lambda m: MomentumAnnealingEMA(m, decay=1.0), r"decay must be in \[0, 1\): 1.0"),
        (lambda m: MomentumAnnealingEMA(m, gamma=0), "gamma must be positive and finite: 0"),
        (lambda m: MomentumAnnealingEMA(m, gamma=float("inf")), "gamma must .*: inf"),
    ],
)
def test_arguments_outside_of_their_range_are_refused(
    make: Callable[[nn.Module], BaseAveragedModel], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(nn.Linear(1, 1))


def test_an_update_between_two_intervals_copies_buffers_only() -> None:
    model = Net()
    swa = StochasticWeightAverage(model, interval=2)
    swa.update(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        swa.update(model)
        swa.update(model)
    calls = {e.key: e.count for e in profile.key_averages() if "foreach" in e.key}
    assert calls == {"aten::_foreach_lerp_": 1, "aten::_foreach_copy_": 4}
    assert not [e.key for e in profile.key_averages() if e.key in ("aten::item", "aten::nonzero")]
