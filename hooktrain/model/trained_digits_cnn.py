"""A classifier of digits that is trained on the spot, to judge what other models draw."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hooktrain.model.digits_cnn import DigitsCNN

__all__ = ["trained_digits_cnn"]


def trained_digits_cnn(
    dataset: Dataset[Mapping[str, Any]], *, epochs: int = 12, channels: int = 16, seed: int = 0
) -> DigitsCNN:
    """Train a small :class:`DigitsCNN` on the CPU, in a second or two.

    The same arguments give the same classifier, and torch's global generator is afterwards as it
    was before: the run around it goes on as if nothing had happened.

    Args:
        dataset: digits with ``"image"`` and ``"label"``.
        epochs: passes through the data set, at least 1.
        channels: of the network.
        seed: of the first weights, the order of the samples, and what the data set draws.

    Returns:
        The network, in evaluation mode, without gradients.

    Raises:
        ValueError: for less than one epoch.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, but got {epochs!r}")
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone, since only that one is brought back.
        torch.default_generator.manual_seed(seed)
        model = DigitsCNN(channels=channels)
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(dataset, batch_size=64, shuffle=True, generator=order)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs)
        with torch.enable_grad():  # evaluations run without gradients
            for _ in range(epochs):
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch)["loss_cls"].backward()
                    optimizer.step()
                schedule.step()
    return model.eval().requires_grad_(False)
