"""Small trainers for the tests of hooks."""

from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.engine import HookBase, SimpleTrainer, TrainerBase


class Idle(TrainerBase):
    """Steps that do nothing, or raise in the iteration `fail_at`."""

    def __init__(self, *hooks: HookBase, fail_at: int = -1) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.register_hooks(hooks)

    def run_step(self) -> None:
        if self.iter == self.fail_at:
            raise ValueError(f"broken at {self.iter}")
        self.after_backward()


class LinearLoss(nn.Module):
    """The mean square of a linear layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


def linear_trainer(*hooks: HookBase, lr: float = 0.1, **kwargs: Any) -> SimpleTrainer:
    """A trainer of `LinearLoss` by SGD with momentum on four fixed batches."""
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(8, 4, generator=generator) for _ in range(4)]
    model = LinearLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    trainer = SimpleTrainer(model, data, optimizer, **kwargs)
    trainer.register_hooks(hooks)
    return trainer
