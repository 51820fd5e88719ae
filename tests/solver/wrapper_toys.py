"""Small models and data for the tests of optimizer wrappers."""

from typing import Any

import torch
from torch import Tensor, nn


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def batches(count: int, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, 4, generator=generator) for _ in range(count)]


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(
        model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options}
    )


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )
