import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.model import ExponentialMovingAverage


class Net(nn.Module):
    """Batch norm, a shared weight, a frozen one, half precision, buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.stem.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.coarse = nn.Parameter(torch.randn(2).bfloat16())
        self.index = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.stem(x)) + self.tied(x)


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Change every parameter and buffer, in place."""
    model(torch.randn(5, 3))
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        tensor += torch.randn_like(tensor) if tensor.is_floating_point() else 1


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, of those that are not saved too."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


COPIED = {"index", "scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize("warmup", [False, True])
def test_weights_are_averaged_and_the_rest_is_copied(warmup: bool) -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, decay=0.5, warmup=warmup)
    expected = values(model)
    for n in range(12):
        train(model)
        ema.update(model)
        decay = min(0.5, (1 + n) / (10 + n)) if warmup else 0.5
        for name, weight in values(model).items():
            lerp = torch.lerp(expected[name], weight, 1 - decay) if name not in COPIED else weight
            expected[name] = lerp
    assert same(values(ema.module), expected)
    assert ema.updates == 12
    assert type(ema.updates) is int


def test_the_average_follows_the_formula() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    ema = ExponentialMovingAverage(model, decay=0.75)
    seen = []
    for weight in (2.0, 4.0, 0.0):
        nn.init.constant_(model.weight, weight)
        ema.update(model)
        seen.append(ema.module.weight.item())
    assert seen == [1.25, 1.9375, 1.453125]


def test_the_warm_up_starts_with_a_short_memory() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    ema = ExponentialMovingAverage(model, decay=0.9999, warmup=True)
    nn.init.constant_(model.weight, 1.0)
    ema.update(model)
    assert ema.module.weight.item() == pytest.approx(0.9)
    ema.update(model)
    assert ema.module.weight.item() == pytest.approx(1 - 0.1 * 2 / 11)


def test_integer_buffers_and_batch_norm_statistics_are_copied_at_every_update() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, decay=0.999)
    for _ in range(3):
        train(model)
        ema.update(model)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(getattr(ema.module.norm, name), getattr(model.norm, name))


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


def test_reset_starts_over_from_the_present_weights() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model)
    train(model)
    ema.update(model)
    train(model)
    ema.reset(model)
    assert same(values(ema.module), values(model))
    assert ema.updates == 0


def test_swap_puts_the_average_in_and_the_same_weights_back() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, decay=0.5)
    train(model)
    ema.update(model)
    train(model)
    raw, average = values(model), values(ema.module)
    tensors = [*model.parameters(), *model.buffers()]
    pointers = [tensor.data_ptr() for tensor in tensors]
    with ema.swap(model):
        assert same(values(model), average)
        assert not same(values(model), raw)
        train(model)
    assert same(values(model), raw)
    assert same(values(ema.module), average)
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    assert [tensor.data_ptr() for tensor in after] == pointers


def test_swap_puts_the_weights_back_when_the_evaluation_fails() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model)
    train(model)
    raw, average = values(model), values(ema.module)

    def evaluate() -> None:
        with ema.swap(model):
            train(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert same(values(model), raw)
    assert same(values(ema.module), average)


def test_swaps_can_be_nested_and_work_in_inference_mode() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model)
    train(model)
    raw, average = values(model), values(ema.module)
    with torch.inference_mode(), ema.swap(model):
        with ema.swap(model):
            assert same(values(model), average)
        assert same(values(model), average)
    assert same(values(model), raw)
    model(torch.randn(5, 3)).sum().backward()


def test_training_goes_on_after_a_swap_as_if_there_had_been_none() -> None:
    def run(evaluate: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = Net()
        ema = ExponentialMovingAverage(model)
        optimizer = torch.optim.SGD(model.stem.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            x = torch.randn(5, 3)
            if evaluate:
                with ema.swap(model):
                    model(x)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            ema.update(model)
        return values(model)

    assert same(run(evaluate=True), run(evaluate=False))


def test_a_saved_average_goes_on_where_it_was() -> None:
    model = Net()
    first = ExponentialMovingAverage(model, warmup=True)
    for _ in range(3):
        train(model)
        first.update(model)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = ExponentialMovingAverage(model, warmup=True)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.updates == 3
    train(model)
    first.update(model)
    second.update(model)
    assert same(values(first.module), values(second.module))


@pytest.mark.parametrize("key", ["module", "updates"])
def test_an_incomplete_state_is_refused(key: str) -> None:
    ema = ExponentialMovingAverage(Net())
    state = ema.state_dict()
    del state[key]
    with pytest.raises(KeyError, match=f"no '{key}'"):
        ema.load_state_dict(state)


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, lambda model: torch.compile(model, backend="eager")],
    ids=["DataParallel", "compile"],
)
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], Any]) -> None:
    model = Net()
    wrapped = wrap(model)
    ema = ExponentialMovingAverage(wrapped, decay=0.0)
    assert type(ema.module) is Net
    train(model)
    ema.update(wrapped)
    assert same(values(ema.module), values(model))
    ema.update(model)
    assert ema.state_dict()["module"].keys() == model.state_dict().keys()


def test_parameters_and_buffers_that_were_replaced_are_followed() -> None:
    model = Net()
    ema = ExponentialMovingAverage(model, decay=0.0)
    ema.update(model)
    model.stem.bias = nn.Parameter(torch.full((4,), 5.0))
    model.scale = torch.full((2,), 6.0)
    model.norm = nn.BatchNorm1d(4)
    nn.init.constant_(model.norm.weight, 7.0)
    ema.update(model)
    assert same(values(ema.module), values(model))


@pytest.mark.parametrize("use", ["update", "reset", "swap"])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Linear(3, 4, bias=False), "parameters .*: stem.bias"),
        (nn.Linear(2, 4), "parameters .*: stem.weight"),
        (nn.Linear(3, 4).double(), "parameters .*: stem.bias, stem.weight"),
    ],
)
def test_another_model_is_refused_by_naming_the_difference(
    layer: nn.Module, message: str, use: str
) -> None:
    model = Net()
    model.tied = nn.Identity()
    ema = ExponentialMovingAverage(model)
    other = copy.deepcopy(model)
    other.stem = layer
    before = values(ema.module)
    act = ema.swap(other).__enter__ if use == "swap" else partial(getattr(ema, use), other)
    with pytest.raises(ValueError, match=message):
        act()
    assert same(values(ema.module), before)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 99, float("nan")])
def test_a_decay_outside_of_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=rf"decay must be in \[0, 1\): {decay!r}"):
        ExponentialMovingAverage(nn.Linear(1, 1), decay)


def test_an_update_calls_few_kernels() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(20)])
    ema = ExponentialMovingAverage(model)
    ema.update(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ema.update(model)
    calls = {e.key: e.count for e in profile.key_averages() if "foreach" in e.key}
    assert calls == {"aten::_foreach_lerp_": 1, "aten::_foreach_copy_": 2}
    assert not [e.key for e in profile.key_averages() if e.key in ("aten::item", "aten::nonzero")]
