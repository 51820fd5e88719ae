"""Small models, data and trainers for the tests of all folders."""

from pathlib import Path
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


def batches(count: int, size: int = 8) -> list[Tensor]:
    """Fixed batches of shape (size, 4)."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, 4, generator=generator) for _ in range(count)]


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    options = {"lr": 0.1, "momentum": 0.9, **options}
    return torch.optim.SGD(model.parameters(), **options)


def linear_trainer(*hooks: HookBase, lr: float = 0.1, **kwargs: Any) -> SimpleTrainer:
    """A trainer of `LinearLoss` by SGD with momentum on four fixed batches."""
    model = LinearLoss()
    trainer = SimpleTrainer(model, batches(4), sgd(model, lr=lr), **kwargs)
    trainer.register_hooks(hooks)
    return trainer


def write_configs(folder: Path, **files: str) -> Path:
    """Write config files; two underscores in a name are a folder. Gives the folder."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
