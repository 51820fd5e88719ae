"""Hooks that a configuration can name to let a run part from another one."""

from typing import Any

import torch

from hooktrain.engine import HookBase
from hooktrain.utils import comm


class Scale(HookBase):
    """Scales what the last module returns, by a little, from an iteration on."""

    def __init__(self, start: int) -> None:
        self.start = start

    def before_train(self) -> None:
        *_, last = self.trainer.model.modules()
        self.handle = last.register_forward_hook(self.scale)

    def scale(
        self, module: Any, _args: Any, output: torch.Tensor
    ) -> torch.Tensor | None:
        is_due = module.training and self.trainer.iter >= self.start
        return output * (1 + 1e-6) if is_due else None

    def after_train(self) -> None:
        self.handle.remove()


class Flip(HookBase):
    """Flips a bit in the gradient of the first weight, in one iteration, on one rank."""

    def __init__(self, iteration: int, rank: int) -> None:
        self.iteration = iteration
        self.rank = rank

    def after_backward(self) -> None:
        if (self.trainer.iter, comm.get_rank()) == (self.iteration, self.rank):
            gradient = next(self.trainer.model.parameters()).grad
            gradient.view(torch.int32).view(-1)[5] ^= 1


class OtherDropout(HookBase):
    """Draws other numbers in the step of an iteration."""

    phase = "end"

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self) -> None:
        if self.trainer.iter == self.iteration:
            torch.manual_seed(1234)


class Noise(HookBase):
    """Adds to a weight what no seed decides, in one iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_backward(self) -> None:
        if self.trainer.iter == self.iteration:
            generator = torch.Generator()
            generator.seed()
            gradient = next(self.trainer.model.parameters()).grad
            gradient += torch.rand(gradient.shape, generator=generator)
