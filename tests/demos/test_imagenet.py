import pytest
import torch
from torch import Tensor, nn

from hooktrain.demos import ImageClassifier


def classifier(label_smoothing: float = 0.1) -> ImageClassifier:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    return ImageClassifier(net, label_smoothing)


def batch() -> list[Tensor]:
    return [torch.randn(6, 3, 3, 3), torch.tensor([0, 1, 2, 3, 0, 1])]


def test_training_gives_the_smoothed_cross_entropy() -> None:
    model, (images, labels) = classifier(), batch()
    logits = model.eval()([images, labels])
    torch.testing.assert_close(logits, model.net(images))
    values = model.train()([images, labels])
    log_probs = logits.log_softmax(1)
    expected = -0.9 * log_probs[range(6), labels].mean() - 0.1 * log_probs.mean()
    assert values["loss_cls"].item() == pytest.approx(expected.item(), rel=1e-6)
    correct = sum(
        int(row.argmax()) == label for row, label in zip(logits, labels, strict=True)
    )
    assert values["accuracy"].item() == pytest.approx(100 * correct / 6)
    assert not values["accuracy"].requires_grad


def test_convolutions_compute_with_the_channels_last() -> None:
    model, seen = classifier(), []
    model.net[0].register_forward_pre_hook(lambda module, images: seen.extend(images))
    model(batch())
    for tensor in (*seen, model.net[0].weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert len(seen) == 1
