"""Models of MMEngine's kind, batch norms, averages, and search for unused parameters."""

import mmengine_itself  # noqa: F401  # before mmengine

# isort: split
import copy
import logging
from typing import Any

import mmengine.model.averaged_model as theirs
import pytest
import torch
from mmengine.model import ImgDataPreprocessor as TheirImages
from torch import Tensor, nn

from equality import assert_equal
from gloo import run_ranks
from hooktrain.compat import mmengine
from hooktrain.compat.mmengine import (
    BaseDataPreprocessor,
    BaseModel,
    MMDistributedDataParallel,
    detect_anomalous_params,
)
from hooktrain.solver import OptimWrapper


class Brightness(BaseModel):
    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "") -> Any:
        return {"loss": inputs.mean()} if mode == "loss" else inputs


def test_the_preprocessor_of_images_is_mmengines_own() -> None:
    assert mmengine.ImgDataPreprocessor is TheirImages
    options = {"mean": [127.5], "std": [58.4], "pad_size_divisor": 4, "pad_value": -1}
    model = Brightness({"type": "ImgDataPreprocessor", **options})
    images = [torch.rand(1, 5, 7) * 255, torch.rand(1, 6, 2) * 255]
    prepared = model.data_preprocessor({"inputs": images})
    expected = TheirImages(**options)({"inputs": images})
    assert_equal(prepared["inputs"], expected["inputs"])
    assert prepared["inputs"].shape == (2, 1, 8, 8)
    assert torch.equal(model.test_step({"inputs": images}), expected["inputs"])


def test_batch_norms_become_those_of_all_ranks() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, eps=1e-3))
    state = copy.deepcopy(model.state_dict())
    converted = mmengine.convert_sync_batchnorm(model)
    assert [type(layer) for layer in converted] == [nn.Conv2d, nn.SyncBatchNorm]
    assert_equal(converted.state_dict(), state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.dropped = nn.Linear(2, 1)
        self.never = nn.Parameter(torch.ones(3, 2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.used(self.frozen(x))
        return hidden, self.dropped(hidden)


def test_parameters_that_were_not_used_are_logged_as_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    names = detect_anomalous_params(model(torch.ones(1, 2))[0].sum(), model)
    assert names == ["never", "dropped.weight", "dropped.bias"]
    shapes = zip(names, ([3, 2], [1, 2], [1]), strict=True)
    expected = []
    for name, shape in shapes:
        size = torch.Size(shape)
        text = f"{name} with shape {size} is not in the computational graph"
        expected.append(("ERROR", text))
    assert [(each.levelname, each.message) for each in caplog.records] == expected


class Own(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, mode: str = "loss") -> Any:  # type: ignore[override]
        return {"loss": self.net(x)[0].sum()}


T = torch.tensor


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        # Means, and sums of means; "loss" anywhere in the name.
        (
            {"loss_a": T([1.0, 3.0]), "aux_loss": [T([[2.0], [4.0]]), T(5.0)]},
            {"loss": 10.0, "loss_a": 2.0, "aux_loss": 8.0},
        ),
        (
            {"losses": (T(0.5),), "accuracy": T([0.0, 1.0])},
            {"loss": 0.5, "losses": 0.5, "accuracy": 0.5},
        ),
        ({"accuracy": T(0.5), "loss": T(2.0)}, {"loss": 2.0, "accuracy": 0.5}),
    ],
)
def test_means_of_losses_are_added_up(
    losses: dict[str, Any], expected: dict[str, float]
) -> None:
    total, values = Own().parse_losses(losses)
    assert {name: value.item() for name, value in values.items()} == expected
    first = next(iter(values))
    assert first == next(iter(expected))
    assert total.item() == expected[first]


@pytest.mark.parametrize("wrong", [3.0, None, [], [T(1.0), 2.0], {"a": T(1.0)}])
def test_a_loss_that_is_no_tensor_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(TypeError, match="'loss_a' must be a tensor or a list"):
        Own().parse_losses({"loss_b": T(1.0), "loss_a": wrong})


def test_values_without_a_loss_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'loss' in its name.*\['ce', 'acc'\]"):
        Own().parse_losses({"ce": T(1.0), "acc": T(1.0)})


def test_a_step_logs_what_parse_losses_of_the_model_gives() -> None:
    class Halved(Own):
        def parse_losses(self, losses: Any) -> Any:
            return super().parse_losses({"loss": losses["loss"] / 2})

    values = []
    for kind in (Own, Halved):
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values.append(model.train_step([torch.ones(1, 2)], OptimWrapper(optimizer)))
    assert [list(each) for each in values] == [["loss"], ["loss"]]
    assert torch.equal(values[1]["loss"], values[0]["loss"] / 2)


def test_a_preprocessor_may_be_built_from_a_dict() -> None:
    class Given(BaseModel):
        def forward(self, inputs: Any, data_samples: Any = None, mode: str = "") -> Any:
            return inputs

    cfg = {"type": "BaseDataPreprocessor", "non_blocking": True}
    for given in (cfg, None):
        assert type(Given(given).data_preprocessor) is BaseDataPreprocessor
    with pytest.raises(TypeError, match=r"data_preprocessor.*\[1\]"):
        Given([1])


def logged_by_a_step() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    model = MMDistributedDataParallel(Own(), detect_anomalous_params=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wrapper = OptimWrapper(torch.optim.SGD(parameters, lr=0.1))
    model.train_step([torch.ones(1, 2)], wrapper)
    return [message.split()[0] for message in messages]


def test_a_step_logs_them_if_that_is_asked_for() -> None:
    names = ["net.never", "net.dropped.weight", "net.dropped.bias"]
    assert run_ranks(logged_by_a_step, 2) == [names, names]


@pytest.mark.parametrize(
    "nest", [lambda a, b: {"a": a, "b": [b]}, lambda a, b: [(a,), {"b": b}]]
)
def test_losses_in_dicts_and_lists_count_together(nest: Any) -> None:
    model = Net()
    hidden, dropped = model(torch.ones(1, 2))
    assert detect_anomalous_params(nest(hidden, dropped), model) == ["never"]
    found = detect_anomalous_params(nest(torch.ones(1), hidden), model)
    assert found == ["never", "dropped.weight", "dropped.bias"]
    assert "never" not in detect_anomalous_params(model.never, model)


def test_the_search_works_after_the_backward_pass() -> None:
    model = Net()
    loss = model(torch.ones(1, 2))[1].sum()
    loss.backward()
    assert detect_anomalous_params(loss, model) == ["never"]


@pytest.mark.parametrize(
    ("times", "more"),
    [(5000, lambda x: x + 1), (60, lambda x: 2 * x + 3 * x)],
    ids=["deeper than the stack", "2 ** 60 paths"],
)
def test_any_graph_is_walked_once(times: int, more: Any) -> None:
    model = nn.Linear(1, 1)
    value = model.weight.sum()
    for _ in range(times):
        value = more(value)
    assert detect_anomalous_params(value, model) == ["bias"]


class Plain(nn.Module):
    """Without what MMEngine averages twice or not as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x))  # type: ignore[no-any-return]


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Change every parameter and buffer, in place."""
    model(torch.randn(5, 3))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor += torch.randn_like(tensor) if tensor.is_floating_point() else 1


@pytest.mark.parametrize(("interval", "update_buffers"), [(1, False), (2, True)])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("ExponentialMovingAverage", (0.1,)), ("StochasticWeightAverage", ())],
)
def test_averages_are_those_of_mmengine(
    kind: str, arguments: tuple[Any, ...], interval: int, update_buffers: bool
) -> None:
    model = Plain()
    options = {"interval": interval, "update_buffers": update_buffers}
    ours = getattr(mmengine, kind)(model, *arguments, **options)
    other = getattr(theirs, kind)(model, *arguments, **options)
    for _ in range(3 * interval + 2):
        train(model)
        ours.update_parameters(model)
        other.update_parameters(model)
        expected = other.state_dict()
        if update_buffers:  # there the counter stays behind
            expected["module.norm.num_batches_tracked"] = model.norm.num_batches_tracked
        assert ours.state_dict().keys() == expected.keys()
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


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
            # As mmdet has it: the steps are a tensor.
            rest = torch.exp(-(1 + steps) / self.gamma)  # type: ignore[arg-type]
            momentum = (1 - self.momentum) * rest.item()
            averaged_param.lerp_(source_param, momentum + self.momentum)

    return ExpMomentumEMA


def test_an_average_written_for_mmengine_works() -> None:
    model = Plain()
    ours, other = (
        exponential_momentum(base)(model, 0.1, 3, interval=2, device=None)
        for base in (mmengine.ExponentialMovingAverage, theirs.ExponentialMovingAverage)
    )
    for _ in range(5):
        train(model)
        ours.update_parameters(model)
        other.update_parameters(model)
        assert_equal(dict(ours.state_dict()), dict(other.state_dict()))
