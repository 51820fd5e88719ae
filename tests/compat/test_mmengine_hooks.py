"""Hooks for MMEngine."""

from typing import Any

import torch

from hooktrain.compat.mmengine import Hook, StepTrainer
from mmengine_toys import Net, sgd


class Noting(Hook):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before_run(self, runner: Any) -> None:
        self.seen.append(("run", runner.max_iters, runner.epoch))

    def before_train(self, runner: Any) -> None:
        super().before_train(runner)
        self.seen.append("train")

    def before_train_epoch(self, runner: Any) -> None:
        self.seen.append(("epoch", runner.epoch))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.seen.append((batch_idx, data_batch[0].shape[0], sorted(outputs)))
        if self.every_n_train_iters(runner, 2) or self.is_last_train_iter(runner):
            self.seen.append(f"iter {runner.iter}")
        if self.end_of_epoch(runner.train_dataloader, batch_idx):
            self.seen.append("last of epoch")
        if self.is_last_train_epoch(runner):
            self.seen.append("last epoch")

    def after_train_epoch(self, runner: Any) -> None:
        assert self.every_n_epochs(runner, 1)
        self.seen.append("end of epoch")

    def after_train(self, runner: Any) -> None:
        self.seen.append("end of train")

    def after_run(self, runner: Any) -> None:
        self.seen.append("end of run")


def test_a_hook_has_mmengines_events() -> None:
    model, hook = Net(), Noting()
    trainer = StepTrainer(model, [[torch.ones(3, 2)], [torch.ones(4, 2)]], sgd(model))
    trainer.register_hooks([hook])
    trainer.train(max_iter=3)
    assert hook.seen == [
        ("run", 3, 0),
        "train",
        ("epoch", 0),
        (0, 3, ["loss"]),
        (1, 4, ["loss"]),
        "iter 1",
        "last of epoch",
        "end of epoch",
        ("epoch", 1),
        (0, 3, ["loss"]),
        "iter 2",
        "last epoch",
        "end of train",
        "end of run",
    ]
