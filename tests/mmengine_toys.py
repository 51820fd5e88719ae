"""A model with MMEngine's classes."""

from typing import Any

import torch
from torch import Tensor, nn

import mmengine_itself  # noqa: F401
from hooktrain.compat.mmengine import (
    BaseModel,
    BaseModule,
    ModuleList,
    OptimWrapper,
    Sequential,
)


class Part(BaseModule):
    def __init__(self, value: float, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        self.linear = nn.Linear(2, 1)
        self.value = value

    def init_weights(self) -> None:
        super().init_weights()
        if self.init_cfg is None:
            nn.init.constant_(self.linear.weight, self.value)


class Net(BaseModel):
    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(data_preprocessor=None, init_cfg=init_cfg)
        self.parts = ModuleList([Part(0.5), Sequential(Part(0.25))])

    def forward(self, inputs: Tensor, mode: str = "tensor") -> Any:  # type: ignore[override]
        outputs = self.parts[0].linear(inputs) + self.parts[1][0].linear(inputs)
        return {"loss": outputs.square().mean()} if mode == "loss" else outputs

    def weights(self) -> list[float]:
        layers = (self.parts[0].linear, self.parts[1][0].linear)
        return [layer.weight[0, 0].item() for layer in layers]


def sgd(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
