"""A small generative adversarial network for the digits, and an evaluator of its samples."""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from hooktrain.evaluation import DatasetEvaluator, inference_context
from hooktrain.utils import comm

logger = logging.getLogger(__name__)


class DigitsGAN(nn.Module):
    """A generator of digits, and a discriminator that distinguishes them from real digits.

    Both are perceptrons with two hidden layers and without normalisation, so there are no buffers.
    They are trained with the non-saturating loss (Goodfellow et al., arXiv:1406.2661). Each has its
    own optimizer, and may be wrapped in DistributedDataParallel separately.

    Args:
        latent_size: the number of random inputs of an image, at least 1.
        hidden_size: the width of the hidden layers, at least 1.
        discriminator_steps: the number of updates of the discriminator before each update of the
            generator, all with the same real images, at least 1.

    Attributes:
        generator: maps latents of shape (N, latent_size) to images of shape (N, 1, 8, 8) in [0, 1].
        discriminator: maps such images to logits of shape (N, 1), which are positive for images
            that it considers real.
    """

    def __init__(
        self,
        latent_size: int = 32,
        hidden_size: int = 256,
        discriminator_steps: int = 2,
    ) -> None:
        super().__init__()
        self.latent_size = latent_size
        self.discriminator_steps = discriminator_steps
        self.generator: nn.Module = nn.Sequential(
            *_hidden_layers(latent_size, hidden_size),
            nn.Linear(hidden_size, 64),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, 8, 8)),
        )
        self.discriminator: nn.Module = nn.Sequential(
            nn.Flatten(), *_hidden_layers(64, hidden_size), nn.Linear(hidden_size, 1)
        )

    def forward(self, latents: Tensor) -> Tensor:
        """Draw one image for each latent.

        Args:
            latents: latents of shape (N, latent_size), on any device, from a standard normal
                distribution.

        Returns:
            Images on the model's device, float32, of shape (N, 1, 8, 8), in [0, 1].
        """
        latents = latents.to(self._device(), non_blocking=True)
        images: Tensor = self.generator(latents)
        return images.float()

    def train_step(
        self, data: Mapping[str, Any], optim_wrapper: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Update the discriminator ``discriminator_steps`` times, then the generator once.

        Args:
            data: a batch with the real ``"image"``, shape (N, 1, 8, 8) in [0, 1].
            optim_wrapper: the optimizer wrappers named ``"discriminator"`` and ``"generator"``,
                such as an ``OptimWrapperDict``.

        Returns:
            ``loss_discriminator`` (of its last update), ``loss_generator``, and the mean logits
            ``logit_real`` and ``logit_fake`` of the discriminator's last update, on the device.
        """
        images = data["image"].to(self._device(), non_blocking=True)
        of_discriminator = optim_wrapper["discriminator"]
        of_generator = optim_wrapper["generator"]
        values: dict[str, Tensor] = {}
        for _ in range(self.discriminator_steps):
            values = self.train_discriminator(images, of_discriminator)
        values |= self.train_generator(len(images), of_generator)
        return values

    def train_discriminator(
        self, images: Tensor, optimizer_wrapper: Any
    ) -> dict[str, Tensor]:
        """Make one update towards high logits for real images and low logits for generated ones.

        Args:
            images: real images, on the model's device.
            optimizer_wrapper: the optimizer wrapper of the discriminator.
        """
        with optimizer_wrapper.optim_context(self.discriminator):
            latents = self._random_latents(len(images))
            with torch.no_grad():
                drawn = self.generator(latents)
                drawn = drawn.to(images.dtype)
            # A single forward pass: DistributedDataParallel needs one per backward pass.
            both = torch.cat([images, drawn])
            logits = self.discriminator(both)
            real, fake = logits.float().chunk(2)
            real_loss = F.softplus(-real).mean()
            fake_loss = F.softplus(fake).mean()
            loss = real_loss + fake_loss
        optimizer_wrapper.update_params(loss)
        return {
            "loss_discriminator": loss.detach(),
            "logit_real": real.detach().mean(),
            "logit_fake": fake.detach().mean(),
        }

    def train_generator(self, count: int, optimizer_wrapper: Any) -> dict[str, Tensor]:
        """Make one update towards high logits for generated images.

        Args:
            count: the number of images to generate.
            optimizer_wrapper: the optimizer wrapper of the generator.
        """
        with (
            optimizer_wrapper.optim_context(self.generator),
            _frozen(self.discriminator),
        ):
            latents = self._random_latents(count)
            drawn = self.generator(latents)
            logits = self.discriminator(drawn)
            losses = F.softplus(-logits.float())
            loss = losses.mean()
        optimizer_wrapper.update_params(loss)
        return {"loss_generator": loss.detach()}

    def _random_latents(self, count: int) -> Tensor:
        return torch.randn(count, self.latent_size, device=self._device())

    def _device(self) -> torch.device:
        weights = self.generator.parameters()
        return next(weights).device


def adam_for_each(
    model: nn.Module, **options: Mapping[str, Any]
) -> dict[str, torch.optim.Adam]:
    """Build an Adam optimizer for each of some submodules.

    Args:
        model: the model.
        options: the arguments of each optimizer, by the name of its submodule.
    """
    return {
        name: torch.optim.Adam(model.get_submodule(name).parameters(), **each)
        for name, each in options.items()
    }


def fixed_latents(count: int, latent_size: int, seed: int = 0) -> Tensor:
    """Latents that are always the same, from a separate random generator.

    Args:
        count: the number of latents.
        latent_size: the ``latent_size`` of the model.
        seed: the seed of the random generator.

    Returns:
        Latents of shape (count, latent_size), on the CPU, from a standard normal distribution.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, latent_size, generator=generator)


def _hidden_layers(in_features: int, width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for features in (in_features, width):
        layers.append(nn.Linear(features, width))
        layers.append(nn.LeakyReLU(0.2))
    return layers


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """A context in which gradients pass through a module, but its parameters get none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class SampleQualityEvaluator(DatasetEvaluator):
    """Evaluates samples of a generative model by a classifier that was trained on real data.

    Good samples are recognised with confidence, and include all classes: a model that draws
    one perfect image again and again has one class and no entropy. (The inception score,
    arXiv:1606.03498, combines both into one number.)

    Args:
        classifier: a module that returns logits of shape (N, C) for a batch
            ``{"image": samples}``. It is used in evaluation mode, on the samples' device.
        class_names: the names of the C classes.
        real: batches with ``"image"`` and ``"label"``, each rank's own share, for which the
            accuracy of the classifier is reported too; None skips it.
    """

    def __init__(
        self,
        classifier: nn.Module,
        class_names: Sequence[str],
        real: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        self._classifier = classifier
        self._class_names = tuple(class_names)
        self._real = real
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        classes = len(self._class_names)
        self._counts = torch.zeros(classes, dtype=torch.int64)
        self._confidence: Any = 0.0

    def process(self, inputs: Any, outputs: Tensor) -> None:
        """Take in one batch.

        Args:
            inputs: not used.
            outputs: samples for the classifier, with first dimension N.
        """
        confidences, classes = self._classify(outputs)
        device = classes.device
        new_counts = torch.bincount(classes, minlength=len(self._counts))
        self._counts = self._counts.to(device) + new_counts
        self._confidence = self._confidence + confidences.sum()

    def evaluate(self) -> dict[str, OrderedDict[str, float]]:
        """Sum up the batches of all ranks, and log a table of the classes. Collective.

        Returns:
            ``{"samples": ...}`` with these metrics, equal on all ranks: ``classes``, the number of
            classes that occur; ``confidence``, the mean of the largest probability, from 0 to 1;
            ``entropy``, of the distribution of classes in nats, from 0 to log(C) for equal shares;
            ``count``, the number of samples; and, if there is ``real``, ``classifier_accuracy``,
            the classifier's accuracy on it, from 0 to 1.

        Raises:
            ValueError: on all ranks, if there was no sample.
            ZeroDivisionError: on all ranks, if ``real`` yields no image.
        """
        # The transfers wait for the device: a host-device synchronisation, once per evaluation.
        mine = (self._counts.tolist(), float(self._confidence), *self._judge())
        ranks = comm.all_gather(mine)
        counts_of_ranks, confidences, recognised, real = zip(*ranks, strict=True)
        columns = zip(*counts_of_ranks, strict=True)
        counts = [sum(column) for column in columns]
        total = sum(counts)
        if total == 0:
            raise ValueError("no rank has a sample to evaluate")
        if comm.is_main_process():
            rows = list(zip(self._class_names, counts, strict=True))
            table = tabulate(rows, ["class", "samples"], "pipe")
            logger.debug("Samples by class:\n%s", table)
        shares = [count / total for count in counts if count]
        surprises = []
        for share in shares:
            surprises.append(-share * math.log(share))
        quality: OrderedDict[str, float] = OrderedDict(
            classes=len(shares),
            confidence=math.fsum(confidences) / total,
            entropy=math.fsum(surprises) + 0.0,
            count=total,
        )
        if self._real is not None:
            quality["classifier_accuracy"] = sum(recognised) / sum(real)
        return {"samples": quality}

    def _judge(self) -> tuple[int, int]:
        """The number of real images that the classifier recognises, and the number of all."""
        correct = 0
        images = 0
        for batch in self._real or ():
            shown = batch["image"].to(self._counts.device)
            _, classes = self._classify(shown)
            # Host-device synchronisation, once per batch.
            is_right = classes.cpu() == batch["label"].cpu()
            correct += int(is_right.sum())
            images += len(classes)
        return correct, images

    @torch.no_grad()
    def _classify(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The largest probability of each image, and its class."""
        classifier = self._classifier.to(images.device)
        with inference_context(classifier):
            logits: Tensor = classifier({"image": images})
        probabilities = logits.float().softmax(1)
        confidences, classes = probabilities.max(1)
        return confidences, classes
