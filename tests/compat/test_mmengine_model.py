"""MMEngine's preprocessor of images, batch norms, and search for unused parameters."""

import logging
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from equality import assert_equal
from gloo import run_ranks
from hooktrain.compat import mmengine
from hooktrain.compat.mmengine import (
    BatchNormXd,
    ImgDataPreprocessor,
    MMDistributedDataParallel,
    convert_sync_batchnorm,
    detect_anomalous_params,
    revert_sync_batchnorm,
)
from hooktrain.model import BaseModel
from hooktrain.solver import OptimWrapper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.model.averaged_model as theirs
    from mmengine.model import ImgDataPreprocessor as TheirImages

SAME_EACH_TIME = settings(
    deadline=None, derandomize=True, database=None, max_examples=60
)

CHANNELS = st.lists(st.floats(0.5, 200, width=32), min_size=3, max_size=3)


@st.composite
def image_cases(draw: st.DrawFn) -> tuple[dict[str, Any], list[Tensor] | Tensor]:
    options: dict[str, Any] = {
        "pad_size_divisor": draw(st.integers(1, 9)),
        "pad_value": draw(st.sampled_from([0, -1, 0.5])),
    }
    if draw(st.booleans()):
        length = draw(st.sampled_from([1, 3]))
        options |= {"mean": draw(CHANNELS)[:length], "std": draw(CHANNELS)[:length]}
    swap = draw(st.sampled_from(["bgr_to_rgb", "rgb_to_bgr", None]))
    options |= {swap: True} if swap else {}
    channels = (
        3 if swap or len(options.get("mean", [])) == 3 else draw(st.integers(1, 4))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from([torch.uint8, torch.float32, torch.float64]))

    def image(*size: int) -> Tensor:
        return (torch.rand(*size, generator=generator) * 255).to(dtype)

    sizes = draw(
        st.lists(
            st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4
        )
    )
    if draw(st.booleans()):
        return options, image(len(sizes), channels, *sizes[0])
    return options, [image(channels, *size) for size in sizes]


@SAME_EACH_TIME
@given(image_cases())
def test_batches_of_images_are_those_of_mmengine(
    case: tuple[dict[str, Any], Any],
) -> None:
    options, images = case
    data = {"inputs": images, "labels": [1]}
    ours = ImgDataPreprocessor(**options)(data)
    theirs = TheirImages(**options)({"inputs": images, "labels": [1]})
    assert list(ours) == list(theirs) == ["inputs", "labels", "data_samples"]
    assert ours["inputs"].dtype == theirs["inputs"].dtype == torch.float32
    assert torch.equal(ours["inputs"], theirs["inputs"])
    assert ours["data_samples"] is None
    assert ours["labels"] == [1]
    assert data["inputs"] is images
    assert len(data) == 2


def test_the_mean_keeps_its_digits_in_a_model_of_half_precision() -> None:
    preprocessor = ImgDataPreprocessor(mean=[123.675], std=[58.395]).half()
    assert preprocessor.mean is not None
    assert preprocessor.mean.dtype == torch.float32
    images = torch.full((1, 1, 1, 1), 200.0)
    expected = (torch.tensor(200.0) - torch.tensor(123.675)) / torch.tensor(58.395)
    assert torch.equal(preprocessor({"inputs": images})["inputs"].squeeze(), expected)
    ImgDataPreprocessor()({"inputs": images})["inputs"] += (
        1  # writes to no batch of others
    )
    assert images.item() == 200.0


@pytest.fixture
def model() -> nn.Module:
    """Batch norms at several depths, one with other statistics and weights."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1),
        nn.BatchNorm2d(3, eps=1e-3, momentum=0.3),
        nn.Sequential(
            nn.BatchNorm1d(4, affine=False), nn.BatchNorm3d(2, momentum=None)
        ),
        nn.BatchNorm2d(3, track_running_stats=False),
    )
    norm = model[1]
    nn.init.normal_(norm.weight)
    norm(torch.randn(4, 3, 2, 2))
    norm.eval()
    norm.weight.requires_grad_(False)
    return model


def facts(module: nn.Module) -> list[Any]:
    return [
        (n.num_features, n.eps, n.momentum, n.affine, n.track_running_stats, n.training)
        for n in module.modules()
        if isinstance(n, nn.modules.batchnorm._BatchNorm)
    ]


def test_there_and_back_everything_but_the_type_stays(model: nn.Module) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before, keys = facts(model), list(model.state_dict())
    for change, kind in [
        (convert_sync_batchnorm, nn.SyncBatchNorm),
        (revert_sync_batchnorm, BatchNormXd),
    ]:
        assert change(model) is model
        assert [
            type(model[1]),
            type(model[2][0]),
            type(model[2][1]),
            type(model[3]),
        ] == [kind] * 4
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert after.keys() == tensors.keys()
        assert all(after[name] is tensor for name, tensor in tensors.items())
        assert facts(model) == before
        assert list(model.state_dict()) == keys
    assert not model[1].weight.requires_grad


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_a_reverted_norm_takes_any_number_of_dimensions(
    shape: tuple[int, ...], training: bool
) -> None:
    reverted = revert_sync_batchnorm(nn.SyncBatchNorm(3)).train(training)
    reference = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[
        len(shape) - 2
    ](3)
    x = torch.randn(shape)
    assert torch.equal(reverted(x), reference.train(training)(x))
    assert torch.equal(reverted.running_var, reference.running_var)


@pytest.mark.parametrize("change", [convert_sync_batchnorm, revert_sync_batchnorm])
def test_no_other_layer_is_changed(change: Any) -> None:
    others = [nn.InstanceNorm1d(2), nn.Linear(1, 1)]
    change(nn.Sequential(*others))
    assert [type(layer) for layer in others] == [nn.InstanceNorm1d, nn.Linear]


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
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "ERROR",
            f"{name} with shape torch.Size({shape}) is not in the computational graph",
        )
        for name, shape in shapes
    ]


class Own(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, mode: str = "loss") -> Any:  # type: ignore[override]
        return {"loss": self.net(x)[0].sum()}


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
    both = [hidden.sum(), dropped.sum()]
    assert detect_anomalous_params(nest(*both), model) == ["never"]
    found = detect_anomalous_params(nest(torch.ones(1), hidden), model)
    assert found == ["never", "dropped.weight", "dropped.bias"]
    assert "never" not in detect_anomalous_params(
        model.never, model
    )  # is the loss itself
    both[1].backward()
    assert detect_anomalous_params(both[1], model) == ["never"]


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
    [
        ("ExponentialMovingAverage", (0.1,)),
        ("MomentumAnnealingEMA", (0.2, 7)),
        ("StochasticWeightAverage", ()),
    ],
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
            momentum = (1 - self.momentum) * math.exp(-float(1 + steps) / self.gamma)
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
