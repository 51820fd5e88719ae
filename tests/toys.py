"""Small models, data and trainers for the tests of all folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.compat.mmengine.registry import MODELS
from hooktrain.data import StreamSampler
from hooktrain.engine import HookBase, SimpleTrainer, TrainerBase
from hooktrain.model import BaseModel
from hooktrain.solver import OptimWrapper, OptimWrapperDict


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


class Repeated(StreamSampler):
    """Gives each sample never or up to `most` times in an epoch, which may be empty."""

    def __init__(self, size: int, most: int, seed: int | None = None) -> None:
        super().__init__(seed)
        self.size = size
        self.most = most

    def epoch_indices(self, epoch: int) -> Tensor:
        generator = self.generator(epoch)
        repeats = torch.randint(self.most + 1, (self.size,), generator=generator)
        return torch.repeat_interleave(repeats)


class LinearLoss(nn.Module):
    """The mean square of a linear layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


class Together(torch.optim.Optimizer):
    """Several optimizers as one, as in docs/guide/optimizers.md."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__(groups, {})
        self.share()

    def share(self) -> None:
        groups = iter(self.param_groups)
        for each in self.optimizers:
            each.state = self.state
            each.param_groups = [next(groups) for _ in each.param_groups]

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


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


class Net(nn.Module):
    """A loss with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc(x)).square().mean()


def net_trainer(data: Any = None, **kwargs: Any) -> SimpleTrainer:
    model = Net()
    return SimpleTrainer(model, data or batches(4), sgd(model), **kwargs)


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


class Counter:
    """Something with a state, which notes the names of what it was given to load."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.loaded: set[str] = set()

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value, "optimizer": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state.get("value", self.value)
        self.loaded = set(state)


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


class Two(nn.Module):
    """Two layers with an optimizer each; the second one's loss is the batch's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)

    def train_step(
        self, batch: Tensor, wrappers: OptimWrapperDict
    ) -> dict[str, Tensor]:
        loss_one = self.one(torch.ones(2, 4)).square().mean()
        wrappers["one"].update_params(loss_one)
        loss_two = self.two(batch).square().mean()
        wrappers["two"].update_params(loss_two)
        return {"loss_one": loss_one, "loss_two": loss_two}


class ToyModel(BaseModel):
    """One linear layer and two losses."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.linear = nn.Linear(3, 1)

    def forward(self, img: Tensor, label: Tensor, mode: str) -> Any:  # type: ignore[override]
        feat = self.linear(img)
        if mode == "loss":
            error = feat - label
            return {"loss1": error.pow(2).mean(), "loss2": error.abs().mean()}
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


def sgd_wrapper(model: nn.Module, **options: Any) -> OptimWrapper:
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
            return {"loss": (outputs - labels).square().mean()}
        return outputs


def train_steps(
    model: Any, optim_wrapper: Any, steps: range, share: slice = slice(None)
) -> list[float]:
    """The loss of each step, of this rank's share of a batch of 8."""
    losses = []
    for step in steps:
        data = [part[share] for part in batch(8, step)]
        losses.append(model.train_step(data, optim_wrapper)["loss"].item())
    return losses
