"""Models that own their step, and batches for them."""

from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.model import BaseModel
from hooktrain.solver import OptimWrapper

__all__ = ["PairPreprocessor", "Pairs", "ToyModel", "batch", "sgd", "toy_gan"]


class ToyModel(BaseModel):
    """One linear layer, two losses of single values, as in MMEngine's guide."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.linear = nn.Linear(3, 1)

    def forward(self, img: Tensor, label: Tensor, mode: str) -> Any:  # type: ignore[override]
        feat = self.linear(img)
        if mode == "loss":
            return {"loss1": (feat - label).pow(2), "loss2": (feat - label).abs()}
        assert mode == "predict"
        return list(feat)


class PairPreprocessor(nn.Module):
    """Gives a pair, in another form and other numbers than it came."""

    def forward(
        self, data: dict[str, Tensor], training: bool = False
    ) -> tuple[Tensor, Tensor]:
        return data["x"] * (2 if training else 3), data["y"]


def batch(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, 3, generator=generator),
        torch.randn(count, 1, generator=generator),
    ]


def sgd(model: nn.Module, **options: Any) -> OptimWrapper:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return OptimWrapper(torch.optim.SGD(parameters, lr=0.1), **options)


class Pairs(BaseModel):
    """Two parts with an optimizer each, one frozen part, one without parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        )
        self.discriminator = nn.Linear(3, 1)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.activation = nn.Tanh()
        self.nothing: nn.Module | None = None
        self.register_buffer("offset", torch.randn(3))

    def forward(
        self, inputs: Tensor, data_samples: Any = None, mode: str = "tensor"
    ) -> Any:
        return self.generator(inputs + self.offset)

    def train_step(self, data: Tensor, optim_wrapper: Any) -> dict[str, Tensor]:
        real = self.activation(self.teacher(self.data_preprocessor(data, True)))
        values = {}
        wrapper = optim_wrapper["discriminator"]
        with wrapper.optim_context(self.discriminator):
            with torch.no_grad():
                drawn = self(data)
            real_score, drawn_score = self.discriminator(
                torch.cat([real, drawn])
            ).chunk(2)
            values["loss_d"] = (drawn_score - real_score).mean()
            wrapper.update_params(values["loss_d"])
        wrapper = optim_wrapper["generator"]
        with wrapper.optim_context(self.generator):
            values["loss_g"] = (self(data) - real).pow(2).mean()
            wrapper.update_params(values["loss_g"])
        return {name: value.detach() for name, value in values.items()}


def toy_gan(seed: int) -> Pairs:
    torch.manual_seed(seed)
    return Pairs()
