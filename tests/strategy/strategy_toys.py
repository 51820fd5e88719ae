"""Models, batches and short runs for the tests of strategies."""

from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.model import BaseModel
from hooktrain.utils.registry import MODELS

__all__ = ["SGD", "Regression", "batch", "train"]

SGD = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}


@MODELS.register_module(name="StrategyToy")
class Regression(BaseModel):
    """Two layers with dropout between them; `init_weights` says how often it was called."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 1)
        self.initialized = 0

    def init_weights(self) -> None:
        self.initialized += 1
        nn.init.normal_(self.first.weight)

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> Any:  # type: ignore[override]
        outputs = self.last(self.dropout(self.first(inputs).tanh()))
        if mode == "loss":
            return {"loss": (outputs - labels).square()}
        return outputs


def batch(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, 3, generator=generator),
        torch.randn(count, 1, generator=generator),
    ]


def train(
    model: Any, optim_wrapper: Any, steps: range, share: slice = slice(None)
) -> list[float]:
    """The loss of each step, of this rank's share of a batch of 8."""
    losses = []
    for step in steps:
        data = [part[share] for part in batch(8, step)]
        losses.append(model.train_step(data, optim_wrapper)["loss"].item())
    return losses
