import copy
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.demos import DigitsDataset, DigitsGAN, SampleQualityEvaluator
from hooktrain.solver import OptimWrapper, OptimWrapperDict

ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.0, 0.99)}


def gan(**options: int) -> DigitsGAN:
    torch.manual_seed(3)
    return DigitsGAN(**{"latent_size": 8, "hidden_size": 16, **options})


def batches(count: int, size: int = 6) -> list[dict[str, Tensor]]:
    images = DigitsDataset(train=True).images[: count * size]
    return [{"image": part, "label": torch.zeros(size)} for part in images.split(size)]


def wrappers(model: DigitsGAN, **options: dict[str, Any]) -> OptimWrapperDict:
    made = {}
    for name in ("generator", "discriminator"):
        adam = torch.optim.Adam(model.get_submodule(name).parameters(), **ADAM)
        made[name] = OptimWrapper(adam, **options.get(name, {}))
    return OptimWrapperDict(**made)


class HandWritten:
    """The same training in plain torch: nothing of the package but the two networks."""

    def __init__(
        self, model: DigitsGAN, counts: dict[str, int], max_norm: float
    ) -> None:
        self.nets = {"generator": model.generator, "discriminator": model.discriminator}
        self.counts, self.passes = counts, dict.fromkeys(counts, 0)
        self.max_norm = max_norm
        self.adams = {
            name: torch.optim.Adam(net.parameters(), **ADAM)
            for name, net in self.nets.items()
        }

    def latents(self, count: int) -> Tensor:
        return torch.randn(count, 8)

    def step(self, images: Tensor) -> None:
        generator, discriminator = self.nets["generator"], self.nets["discriminator"]
        count = len(images)
        for _ in range(2):
            fake = generator(self.latents(count)).detach()
            real, fake = discriminator(torch.cat([images, fake])).chunk(2)
            loss = F.softplus(-real).mean() + F.softplus(fake).mean()
            self.update("discriminator", loss)
        loss = F.softplus(-discriminator(generator(self.latents(count)))).mean()
        # Its gradients in the discriminator are thrown away, not added to what waits there.
        waiting = [copy.deepcopy(p.grad) for p in discriminator.parameters()]
        self.update("generator", loss)
        for parameter, grad in zip(discriminator.parameters(), waiting, strict=True):
            parameter.grad = grad

    def update(self, name: str, loss: Tensor) -> None:
        count = self.counts[name]
        (loss / count).backward()
        self.passes[name] += 1
        if self.passes[name] % count == 0:
            nn.utils.clip_grad_norm_(self.nets[name].parameters(), self.max_norm)
            self.adams[name].step()
            self.adams[name].zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("counts", [(1, 1), (2, 3), (4, 1)])
def test_three_steps_are_those_of_a_hand_written_loop_bit_for_bit(
    counts: tuple[int, int],
) -> None:
    model, other, start = gan(), gan(), gan()
    by_name = dict(zip(("discriminator", "generator"), counts, strict=True))
    options = {
        name: {"accumulative_counts": count, "clip_grad": {"max_norm": 0.05}}
        for name, count in by_name.items()
    }
    torch.manual_seed(5)
    optim_wrapper = wrappers(model, **options)
    for batch in batches(3):
        model.train_step(batch, optim_wrapper)
    torch.manual_seed(5)
    reference = HandWritten(other, by_name, 0.05)
    for batch in batches(3):
        reference.step(batch["image"])
    assert same(model, other)
    assert not same(model.generator, start.generator)
    assert not same(model.discriminator, start.discriminator)
    # Also those that are being accumulated.
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=0)


def test_the_generators_step_leaves_the_discriminator_as_it_is() -> None:
    model = gan()
    model.discriminator[1].bias.requires_grad_(False)  # frozen by its user
    wrapper = wrappers(model)["generator"]
    before = copy.deepcopy(model.discriminator)
    model.train_generator(6, wrapper)
    assert same(before, model.discriminator)
    assert all(p.grad is None for p in model.discriminator.parameters())
    model.discriminator[3].weight.data = torch.zeros(16, 1)
    with pytest.raises(RuntimeError):
        model.train_generator(6, wrapper)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"discriminator.1.bias"}


def train_on_two_ranks(accumulative_counts: int, find_unused: bool) -> list[Tensor]:
    """Each child in DistributedDataParallel; each rank with images and latents of its own."""
    model = gan()
    options = {"discriminator": {"accumulative_counts": accumulative_counts}}
    optim_wrapper = wrappers(model, **options)
    for name, child in list(model.named_children()):
        ddp = DistributedDataParallel(child, find_unused_parameters=find_unused)
        setattr(model, name, ddp)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    for batch in batches(6)[rank::2]:
        model.train_step(batch, optim_wrapper)
    return [p.detach() for p in model.parameters()]


def train_both_halves(accumulative_counts: int) -> list[Tensor]:
    """What two ranks should do, in one process: the loss is the mean of those of the halves."""
    model = gan()
    counts = {"discriminator": accumulative_counts, "generator": 1}
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]

    class Halves(HandWritten):
        def latents(self, count: int) -> Tensor:
            halves = [torch.randn(count // 2, 8, generator=g) for g in generators]
            return torch.cat(halves)

    reference = Halves(model, counts, 1e9)
    rows = batches(6)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        reference.step(torch.cat([first["image"], second["image"]]))
    return [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize(
    ("accumulative_counts", "find_unused"), [(1, True), (3, False)]
)
def test_two_ranks_train_as_one_process_with_the_batches_of_both(
    accumulative_counts: int, find_unused: bool
) -> None:
    first, second = run_ranks(train_on_two_ranks, 2, accumulative_counts, find_unused)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first, train_both_halves(accumulative_counts))


NAMES = ("cat", "dog", "007")


class Shown(nn.Module):
    """Takes an "image" of shape (1, 1, 3) for logits; drops most of it in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.9)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        return self.dropout(batch["image"].flatten(1))


def samples(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities).log().view(-1, 1, 1, 3)


def evaluate(*batches: Tensor, **options: Any) -> dict[str, float]:
    evaluator = SampleQualityEvaluator(Shown(), NAMES, **options)
    for batch in batches:
        evaluator.process(None, batch)
    return evaluator.evaluate()["samples"]


@pytest.mark.parametrize(
    ("probabilities", "classes", "confidence", "entropy"),
    [
        (
            [[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]],
            2,
            (0.8 + 0.6 + 0.7 + 0.5) / 4,
            0.75 * math.log(4 / 3) + 0.25 * math.log(4),
        ),
        ([[0.0, 1.0, 0.0]] * 5, 1, 1.0, 0.0),
        ([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], 3, 0.8, math.log(3)),
    ],
)
def test_classes_confidence_and_entropy(
    probabilities: list[list[float]], classes: int, confidence: float, entropy: float
) -> None:
    quality = evaluate(samples(*probabilities[:2]), samples(*probabilities[2:]))
    assert list(quality) == ["classes", "confidence", "entropy", "count"]
    assert (quality["classes"], quality["count"]) == (classes, len(probabilities))
    assert quality["confidence"] == pytest.approx(confidence)
    assert quality["entropy"] == pytest.approx(entropy)
    assert math.copysign(1, quality["entropy"]) == 1


def test_the_classifier_judges_in_evaluation_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    classifier = Shown().train()
    real = {
        "image": samples([0.8, 0.1, 0.1], [0.6, 0.3, 0.1]),
        "label": torch.tensor([0, 2]),
    }
    evaluator = SampleQualityEvaluator(classifier, NAMES, real=[real])
    evaluator.process(None, samples([0.8, 0.1, 0.1]))
    evaluator.reset()
    evaluator.process(None, samples([0.25, 0.5, 0.25]))
    quality = evaluator.evaluate()["samples"]
    assert (quality["confidence"], quality["count"]) == (pytest.approx(0.5), 1)
    assert quality["classifier_accuracy"] == 0.5
    assert classifier.training
    assert "| dog     |         1 |" in caplog.text


def evaluate_as_rank() -> dict[str, float]:
    parts = [samples([0.8, 0.1, 0.1], [0.6, 0.3, 0.1]), samples([0.2, 0.3, 0.5])]
    return evaluate(parts[dist.get_rank()])


def test_the_samples_of_all_ranks_count() -> None:
    first, second = run_ranks(evaluate_as_rank, 2)
    assert first == second
    assert first["classes"] == 2
    assert first["confidence"] == pytest.approx((0.8 + 0.6 + 0.5) / 3)
    assert first["count"] == 3
