"""A small generative adversarial network for the built-in digits; it owns its training step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DigitsGAN", "fixed_latents"]


class DigitsGAN(nn.Module):
    """Learns to draw digits: a generator against a discriminator that tells drawn from real ones.

    Both are perceptrons with two hidden layers and without normalisation, so there are no buffers.
    Trained with the non-saturating loss (Goodfellow et al., arXiv:1406.2661). Each is a child with
    an optimizer of its own, and may be wrapped in DistributedDataParallel on its own.

    Args:
        latent_size: random numbers to make an image of, at least 1.
        hidden_size: the width of the hidden layers, at least 1.
        discriminator_steps: updates of the discriminator before each one of the generator, all
            with the same real images, at least 1.

    Attributes:
        generator: latents of shape (N, latent_size) to images of shape (N, 1, 8, 8) in [0, 1].
        discriminator: such images to logits of shape (N, 1), above 0 for those it takes for real.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(
        self, latent_size: int = 32, hidden_size: int = 256, discriminator_steps: int = 2
    ) -> None:
        super().__init__()
        if latent_size < 1:
            raise ValueError(f"latent_size must be at least 1, but got {latent_size!r}")
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be at least 1, but got {hidden_size!r}")
        if discriminator_steps < 1:
            raise ValueError(
                f"discriminator_steps must be at least 1, but got {discriminator_steps!r}"
            )
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
            latents: shape (N, latent_size), on any device, from a standard normal distribution.

        Returns:
            Images on the model's device, float32, shape (N, 1, 8, 8), ink from 0 to 1.

        Raises:
            ValueError: for another shape.
        """
        if latents.dim() != 2 or latents.shape[1] != self.latent_size:
            raise ValueError(
                f"latents must have shape (N, {self.latent_size}), but got {tuple(latents.shape)}"
            )
        images: Tensor = self.generator(latents.to(self._device(), non_blocking=True))
        return images.float()

    def train_step(
        self, data: Mapping[str, Any], optim_wrapper: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Update the discriminator ``discriminator_steps`` times, then the generator once.

        Args:
            data: a batch with the real ``"image"``, shape (N, 1, 8, 8) in [0, 1]; what else is in
                it is not looked at.
            optim_wrapper: the optimizer wrappers named ``"discriminator"`` and ``"generator"``,
                such as an ``OptimWrapperDict``.

        Returns:
            ``loss_discriminator`` (of its last update), ``loss_generator``, and the mean logits
            ``logit_real`` and ``logit_fake`` at that last update. They stay on the device.
        """
        images = data["image"].to(self._device(), non_blocking=True)
        values: dict[str, Tensor] = {}
        for _ in range(self.discriminator_steps):
            values = self.train_discriminator(images, optim_wrapper["discriminator"])
        return {**values, **self.train_generator(len(images), optim_wrapper["generator"])}

    def train_discriminator(self, images: Tensor, optimizer_wrapper: Any) -> dict[str, Tensor]:
        """One backward pass: real images should get high logits, and drawn ones low logits.

        Args:
            images: real ones, on the model's device.
            optimizer_wrapper: the discriminator's.
        """
        with optimizer_wrapper.sync_context(self.discriminator):
            with optimizer_wrapper.precision_context():
                with torch.no_grad():
                    drawn = self.generator(self._random_latents(len(images)))
                # One forward pass for both: DistributedDataParallel wants one to each backward.
                logits = self.discriminator(torch.cat([images, drawn.to(images.dtype)])).float()
                real, fake = logits.chunk(2)
                loss = F.softplus(-real).mean() + F.softplus(fake).mean()
            optimizer_wrapper.update_params(loss)
        return {
            "loss_discriminator": loss.detach(),
            "logit_real": real.detach().mean(),
            "logit_fake": fake.detach().mean(),
        }

    def train_generator(self, count: int, optimizer_wrapper: Any) -> dict[str, Tensor]:
        """One backward pass: drawn images should get high logits.

        Args:
            count: how many to draw.
            optimizer_wrapper: the generator's.
        """
        with optimizer_wrapper.sync_context(self.generator):
            with optimizer_wrapper.precision_context(), _frozen(self.discriminator):
                drawn = self.generator(self._random_latents(count))
                loss = F.softplus(-self.discriminator(drawn).float()).mean()
            optimizer_wrapper.update_params(loss)
        return {"loss_generator": loss.detach()}

    def _random_latents(self, count: int) -> Tensor:
        return torch.randn(count, self.latent_size, device=self._device())

    def _device(self) -> torch.device:
        return next(self.generator.parameters()).device


def fixed_latents(count: int, latent_size: int, seed: int = 0) -> Tensor:
    """Latents to look at again and again, of a random generator of their own.

    Args:
        count: how many.
        latent_size: that of the model.
        seed: of the generator.

    Returns:
        Shape (count, latent_size), on the CPU, from a standard normal distribution.
    """
    return torch.randn(count, latent_size, generator=torch.Generator().manual_seed(seed))


def _hidden_layers(in_features: int, width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for features in (in_features, width):
        layers += [nn.Linear(features, width), nn.LeakyReLU(0.2)]
    return layers


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Inside, gradients pass through a module, and its parameters get none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
