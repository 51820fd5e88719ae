"""Shared by the tests of the trainers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.engine import HookBase, SimpleTrainer


class Net(nn.Module):
    """Two losses in training mode, with dropout so that random numbers matter."""

    def __init__(self, two_losses: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)
        self.two_losses = two_losses

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        loss = self.dropout(self.fc(x)).square().mean()
        return {"loss_a": loss, "loss_b": 2 * loss} if self.two_losses else loss


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make(data: Any = None, two_losses: bool = False, **kwargs: Any) -> SimpleTrainer:
    model = Net(two_losses)
    return SimpleTrainer(
        model, batches(4) if data is None else data, sgd(model), **kwargs
    )


class Stream:
    """Endless batches whose position can be saved."""

    position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield batches(4)[(self.position - 1) % 4]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StopOnce(HookBase):
    """What Ctrl-C in a notebook is."""

    def __init__(self, at: int) -> None:
        self.at: int | None = at

    def after_backward(self) -> None:
        if self.trainer.iter == self.at:
            self.at = None
            raise KeyboardInterrupt
