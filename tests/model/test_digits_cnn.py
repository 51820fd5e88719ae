from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooktrain.model import DigitsCNN


def batch(count: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.rand(count, 1, 8, 8, generator=generator),
        "label": torch.randint(10, (count,), generator=generator),
    }


def test_training_gives_the_cross_entropy_of_the_logits() -> None:
    model, data = DigitsCNN(channels=4, dropout=0.0), batch()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    loss = model(data)
    logits = model.eval()(data)
    assert list(loss) == ["loss_cls"]
    assert logits.shape == (4, 10)
    assert torch.equal(loss["loss_cls"], F.cross_entropy(logits, data["label"]))


def test_every_parameter_gets_a_gradient() -> None:
    model = DigitsCNN(channels=4)
    model(batch())["loss_cls"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_evaluation_needs_no_labels_and_depends_on_one_image_at_a_time() -> None:
    model, images = DigitsCNN(channels=4, num_classes=7).eval(), batch()["image"]
    whole = model({"image": images})
    assert whole.shape == (4, 7)
    one_by_one = torch.cat([model({"image": image[None]}) for image in images])
    torch.testing.assert_close(whole, one_by_one)


def test_dropout_is_random_in_training_and_off_in_evaluation() -> None:
    model, data = DigitsCNN(channels=4, dropout=0.5), batch()
    assert not torch.equal(model(data)["loss_cls"], model(data)["loss_cls"])
    model.eval()
    assert torch.equal(model(data), model(data))


def test_the_batch_is_moved_to_the_device_of_the_model() -> None:
    # The meta device computes shapes only, and does not mix with the CPU.
    model = DigitsCNN(channels=4).to("meta")
    assert model(batch())["loss_cls"].device.type == "meta"
    assert model.eval()(batch()).device.type == "meta"


def test_the_batch_of_the_caller_is_left_as_it_was() -> None:
    data, expected = batch(), batch()
    DigitsCNN(channels=4)(data)
    assert list(data) == list(expected)
    assert all(torch.equal(data[key], expected[key]) for key in data)


def test_a_few_steps_reduce_the_loss() -> None:
    model, data = DigitsCNN(channels=8, dropout=0.0), batch(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(20):
        loss = model(data)["loss_cls"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.0
    assert losses[-1] < 0.1


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 3, 8, 8), (4, 1, 28, 28)])
def test_images_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(N, 1, 8, 8\), but got \(4, "):
        DigitsCNN(channels=4)({"image": torch.zeros(shape), "label": torch.zeros(4).long()})


@pytest.mark.parametrize("shape", [(3,), (4, 1), ()])
def test_labels_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    data = {"image": torch.zeros(4, 1, 8, 8), "label": torch.zeros(shape).long()}
    with pytest.raises(ValueError, match=r"'label' must have shape \(4,\)"):
        DigitsCNN(channels=4)(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [("channels", 0), ("dropout", 1.0), ("dropout", -0.1), ("num_classes", 0)],
)
def test_arguments_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must .* got {value}"):
        DigitsCNN(**{name: value})
