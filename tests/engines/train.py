"""A training script as users write it, which each engine of the tests runs unchanged.

    python train.py FOLDER [ITERATION ...]

At each of the given iterations every rank writes its process id to FOLDER/at25-1 (rank 1), and
waits until it gets a signal or FOLDER/go is there. FOLDER/iterations has a line for each iteration
that was finished, with the number of ranks.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hooktrain import (
    Checkpointer,
    HookBase,
    SimpleTrainer,
    build_strategy,
    build_train_loader,
    default_hooks,
    launch,
)
from hooktrain.utils import comm

ITERATIONS = 60


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": (self.net(x)[:, 0] - y).square().mean()}


class Pause(HookBase):
    def __init__(self, folder: Path, iterations: list[int]) -> None:
        self.folder = folder
        self.iterations = iterations

    def after_backward(self) -> None:
        trainer = self.trainer
        if trainer.iter not in self.iterations:
            return
        partly = self.folder / f"partly{comm.get_rank()}"
        partly.write_text(str(os.getpid()))
        partly.rename(self.folder / f"at{trainer.iter}-{comm.get_rank()}")
        while not (trainer.agreement.own_signal or (self.folder / "go").exists()):
            time.sleep(0.02)

    def after_step(self) -> None:
        if comm.is_main_process():
            with open(self.folder / "iterations", "a") as file:
                file.write(f"{self.trainer.iter} {comm.get_world_size()}\n")


def main(folder: str, *iterations: Any) -> None:
    model = build_strategy(seed=0, device="cpu").prepare(Regression)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = build_train_loader(TensorDataset(x, x.sum(1)), total_batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = SimpleTrainer(model, loader, optimizer)
    saver = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([Pause(Path(folder), [*map(int, iterations)])])
    trainer.register_hooks(default_hooks(checkpointer=saver, checkpoint_period=10))
    saver.resume_or_load()
    trainer.train(max_iter=ITERATIONS)


if __name__ == "__main__":
    launch(main, args=tuple(sys.argv[1:]))
