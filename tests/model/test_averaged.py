"""Averages of weights, against their formulas, MMEngine's and torch's."""

import copy
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
    update_bn_stats,
)
from hooktrain.utils.tensors import full_tensors, load_full_state_dict
from sharding_toys import batches, full_state_dict, make_model, make_sharded, own_part

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.model.averaged_model as theirs


class Plain(nn.Module):
    """Without what MMEngine averages twice or not as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x))  # type: ignore[no-any-return]


class Net(Plain):
    """Batch norm, a shared weight, a frozen one, half precision, buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.stem.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.coarse = nn.Parameter(torch.randn(2).bfloat16())
        self.index = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.tied(x)


def run(average: BaseAveragedModel, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        train(model)
        average.update_parameters(model)


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Change every parameter and buffer, in place."""
    model(torch.randn(5, 3))
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        tensor += torch.randn_like(tensor) if tensor.is_floating_point() else 1


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, of those that are not saved too."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


COPIED = {
    "index",
    "scale",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
}


@pytest.mark.parametrize("warmup", [False, True])
def test_weights_are_averaged_while_the_rest_is_copied(
    warmup: bool,
) -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, 0.5, warmup=warmup)
    expected = values(model)
    for n in range(12):
        train(model)
        ema.update_parameters(model)
        decay = min(0.5, (1 + n) / (10 + n)) if warmup else 0.5
        for name, weight in values(model).items():
            lerp = (
                torch.lerp(expected[name], weight, 1 - decay)
                if name not in COPIED
                else weight
            )
            expected[name] = lerp
    assert same(values(ema.module), expected)
    assert ema.steps == 12
    train(model)
    ema.reset(model)
    assert same(values(ema.module), values(model))
    assert ema.steps == 0


def test_the_averaged_model_is_a_separate_one_for_evaluation() -> None:
    model = Net().train()
    model(torch.randn(5, 3)).sum().backward()
    before = values(model)
    ema = ExponentialMovingAverage(model)
    assert not ema.module.training
    assert model.training
    assert model.stem.weight.requires_grad
    assert model.stem.weight.grad is not None
    assert all(not p.requires_grad and p.grad is None for p in ema.module.parameters())
    assert ema.module.tied.weight is ema.module.stem.weight
    train(model)
    assert same(values(ema.module), before)


def test_swap_gives_the_same_weights_back_after_an_error() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, 0.5)
    run(ema, model, 1)
    train(model)
    raw, average = values(model), values(ema.module)
    tensors = [*model.parameters(), *model.buffers()]
    pointers = [tensor.data_ptr() for tensor in tensors]

    def evaluate() -> None:
        with ema.swap(model):
            assert same(values(model), average)
            assert not same(values(model), raw)
            train(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert same(values(model), raw)
    assert same(values(ema.module), average)
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    assert [tensor.data_ptr() for tensor in after] == pointers


def test_wrappers_are_looked_through() -> None:
    model = Net()
    wrapped: Any = torch.compile(nn.DataParallel(model), backend="eager")
    ema = ExponentialMovingAverage(wrapped, 1.0)
    assert type(ema.module) is Net
    train(model)
    ema.update_parameters(wrapped)
    assert same(values(ema.module), values(model))
    ema.update_parameters(model)
    assert ema.module.state_dict().keys() == model.state_dict().keys()


def test_parameters_and_buffers_that_were_replaced_are_followed() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, 1.0)
    ema.update_parameters(model)
    model.stem.bias = nn.Parameter(torch.full((4,), 5.0))
    model.scale = torch.full((2,), 6.0)
    model.norm = nn.BatchNorm1d(4)
    nn.init.constant_(model.norm.weight, 7.0)
    ema.update_parameters(model)
    assert same(values(ema.module), values(model))


def test_another_model_is_refused_by_naming_the_difference() -> None:
    ema = ExponentialMovingAverage(Plain())
    other = Plain()
    other.stem = nn.Linear(3, 4, bias=False)
    for use in (ema.update_parameters, ema.reset, lambda m: ema.swap(m).__enter__()):
        with pytest.raises(ValueError, match=r"differ in \['stem.bias'\]"):
            use(other)


def scalar(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def averages(average: BaseAveragedModel, values: list[float]) -> list[float]:
    seen = []
    for value in values:
        average.update_parameters(scalar(value))
        seen.append(average.module.weight.item())
    return seen


@pytest.mark.parametrize(
    ("average", "weights", "expected"),
    [
        (
            ExponentialMovingAverage(scalar(1.0), 0.25),
            [2, 4, 0],
            [1.25, 1.9375, 1.453125],
        ),
        (StochasticWeightAverage(scalar(100.0)), [4, 0, 8, 4, 24], [4, 2, 4, 4, 8]),
        # The weights are 3/3, 3/4, 3/5, and from there 1/2.
        (
            MomentumAnnealingEMA(scalar(100.0), 0.5, gamma=3),
            [4, 8, 2, 3, 4],
            [4, 7, 4, 3.5, 3.75],
        ),
        # The warm-up counts all updates, those between two intervals too.
        (
            ExponentialMovingAverage(scalar(0.0), 0.1, warmup=True, interval=4),
            [1] * 5,
            [0.9, 0.9, 0.9, 0.9, 0.9 + 0.1 * (1 - 5 / 14)],
        ),
    ],
)
def test_averages_follow_their_formulas(
    average: BaseAveragedModel, weights: list[float], expected: list[float]
) -> None:
    assert averages(average, weights) == pytest.approx(expected)


KINDS: list[tuple[str, tuple[Any, ...]]] = [
    ("ExponentialMovingAverage", (0.1,)),
    ("MomentumAnnealingEMA", (0.2, 7)),
    ("StochasticWeightAverage", ()),
]


@pytest.mark.parametrize(("interval", "update_buffers"), [(1, False), (2, True)])
@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_averages_are_those_of_mmengine(
    kind: str, arguments: tuple[Any, ...], interval: int, update_buffers: bool
) -> None:
    model = Plain()
    options = {"interval": interval, "update_buffers": update_buffers}
    ours: BaseAveragedModel = globals()[kind](model, *arguments, **options)
    other = getattr(theirs, kind)(model, *arguments, **options)
    # MMEngine's first update copies. Ours of an exponential average blends with the weights at
    # construction; which is the same if the first update is made with those.
    for _ in range(3 * interval + 2):
        ours.update_parameters(model)
        other.update_parameters(model)
        expected = other.state_dict()
        if update_buffers:  # there the counter stays behind
            expected["module.norm.num_batches_tracked"] = model.norm.num_batches_tracked
        assert ours.state_dict().keys() == expected.keys()
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        train(model)


def exponential_momentum(base: Any) -> Any:
    """The average of YOLOX in MMDetection, as it is written there."""

    class ExpMomentumEMA(base):  # type: ignore[misc]
        def __init__(
            self, model: Any, momentum: float, gamma: int, **kwargs: Any
        ) -> None:
            super().__init__(model=model, momentum=momentum, **kwargs)
            self.gamma = gamma

        def avg_func(
            self, averaged_param: Tensor, source_param: Tensor, steps: int
        ) -> None:
            momentum = (1 - self.momentum) * math.exp(-float(1 + steps) / self.gamma)
            averaged_param.lerp_(source_param, momentum + self.momentum)

    return ExpMomentumEMA


def test_a_kind_written_for_mmengine_works() -> None:
    model = Plain()
    ours, other = (
        exponential_momentum(base)(model, 0.1, 3, interval=2, device=None)
        for base in (ExponentialMovingAverage, theirs.ExponentialMovingAverage)
    )
    for _ in range(5):
        train(model)
        ours.update_parameters(model)
        other.update_parameters(model)
        assert same(values(ours), values(other))


def test_the_average_of_a_child_is_saved_with_the_model() -> None:
    class Distillation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(2, 2)
            self.teacher = ExponentialMovingAverage(self.student, 0.5)

    model, other = Distillation(), Distillation()
    nn.init.constant_(model.student.weight, 1.0)
    model.teacher.update_parameters(model.student)
    x = torch.randn(3, 2)
    assert torch.equal(model.teacher(x), model.teacher.module(x))
    assert list(model.teacher.state_dict()) == ["steps", "module.weight", "module.bias"]
    assert not any(p.requires_grad for p in model.teacher.parameters())
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        each.teacher.update_parameters(model.student)
    assert same(values(model), values(other))
    assert other.teacher.steps == 2


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_each_kind_resumes_bit_for_bit(kind: str, arguments: tuple[Any, ...]) -> None:
    for steps in (3, 4):
        model = Plain()
        make = partial(globals()[kind], interval=2)
        first = make(model, *arguments)
        run(first, model, steps)
        resumed = copy.deepcopy(model)
        second = make(resumed, *arguments)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        state = torch.get_rng_state()
        run(first, model, 5)
        torch.set_rng_state(state)
        run(second, resumed, 5)
        assert same(values(first), values(second))
        assert not same(values(first.module), values(model))


def test_the_statistics_of_batch_norm_are_replaced_as_it_is_documented() -> None:
    model = Plain()
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

        def blending_weight(self, steps: int) -> float:
            self.seen += (steps,)
            return 0.25

    last = Last(scalar(0.0), interval=2)
    assert averages(last, [8.0, 1.0, 2.0, 1.0, 4.875]) == [2.0, 2.0, 2.0, 2.0, 2.71875]
    assert last.seen == (0, 2, 4)
    with pytest.raises(NotImplementedError, match="no blending_weight or avg_func"):
        BaseAveragedModel(scalar(0.0)).update_parameters(scalar(1.0))


@pytest.mark.parametrize("momentum", [0.0, 99, math.nan])
def test_a_momentum_outside_of_its_range_is_refused(momentum: float) -> None:
    for kind in (ExponentialMovingAverage, MomentumAnnealingEMA):
        with pytest.raises(ValueError, match=rf"in \(0, 1\]: {momentum}"):
            kind(nn.Linear(1, 1), momentum)


def test_an_update_does_not_wait_for_the_device() -> None:
    model = Plain()
    swa = StochasticWeightAverage(model, interval=2)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile:
        swa.update_parameters(model)
        swa.update_parameters(model)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_foreach_lerp_"] == 1
    assert not {"aten::item", "aten::nonzero"} & calls.keys()


def averaged_run(model: nn.Module) -> tuple[Any, ExponentialMovingAverage]:
    """Some steps, with a change of the weights that is no training before each update."""
    average = ExponentialMovingAverage(model, 0.25)
    for step in range(3):
        state = {
            name: value
            + (step + 1) * torch.linspace(0, 1, value.numel()).view_as(value)
            for name, value in make_model().state_dict().items()
        }
        load_full_state_dict(model, state)
        average.update_parameters(model)
    return copy.deepcopy(full_tensors(average.state_dict())), average


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
    logits(model)
    average.update_parameters(model)  # right after an evaluation
    model.train()
    loss = model(own_part(batches(1)[0]))["loss_lm"]
    loss.backward()
    other = ExponentialMovingAverage(make_sharded())
    whole = ExponentialMovingAverage(make_model())
    whole.update_parameters(make_model())
    load_full_state_dict(other, whole.state_dict())
    return {
        "average": state,
        "raw": raw,
        "after": after,
        "swapped": swapped,
        "logits": swapped_logits,
        "steps": average.steps,
        "loaded": full_tensors(other.state_dict()),
        "expected": whole.state_dict(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def test_the_average_of_shards_is_that_of_the_whole(two: list[dict[str, Any]]) -> None:
    state, _ = averaged_run(make_model())
    assert same(two[0]["average"], state)
    assert two[0]["average"]["steps"] == 3
    assert two[0]["steps"] == 4


def test_shards_are_swapped_around_an_evaluation(
    two: list[dict[str, Any]],
) -> None:
    result = two[0]
    average = {f"module.{name}": value for name, value in result["swapped"].items()}
    assert same({"steps": torch.tensor(3), **average}, result["average"])
    assert same(result["after"], result["raw"])
    assert not torch.equal(
        result["raw"]["head.weight"], result["swapped"]["head.weight"]
    )
    alone = make_model()
    alone.load_state_dict(result["swapped"])
    torch.testing.assert_close(result["logits"], logits(alone))


def test_a_whole_average_loads_into_shards(two: list[dict[str, Any]]) -> None:
    assert same(two[0]["loaded"], two[0]["expected"])
    assert two[0]["loaded"]["steps"] == 1
