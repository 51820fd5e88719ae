"""Loops of one's own around the events of a trainer, as scripts for detectron2 have them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase, SimpleTrainer, hooks
from hooktrain.utils import comm
from hooktrain.utils.events import EventStorage


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + torch.rand(2)).square().mean()


class OwnLoop(SimpleTrainer):
    """The loop of AdelaiDet, unbiased-teacher and others."""

    def train_loop(self, start_iter: int, max_iter: int) -> None:
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                for self.iter in range(start_iter, max_iter):
                    self.before_step()
                    self.run_step()
                    self.after_step()
            finally:
                self.after_train()


def make(
    kind: type[SimpleTrainer], folder: Path, evaluated: list[Any]
) -> tuple[Any, Checkpointer]:
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = kind(model, [torch.ones(2)], optimizer)
    trainer.seed = 3
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    saving = hooks.PeriodicCheckpointer(checkpointer, 2)
    evaluation = hooks.EvalHook(3, lambda: evaluated.append(trainer.iter))
    trainer.register_hooks([saving, evaluation])
    return trainer, checkpointer


def test_an_own_loop_counts_resumes_evaluates_and_saves_as_train_does(
    tmp_path: Path,
) -> None:
    reference, _ = make(SimpleTrainer, tmp_path / "train", expected := [])
    reference.train(max_iter=5)

    seen: list[int] = []
    first, _ = make(OwnLoop, tmp_path / "own", seen)
    first.train_loop(0, 4)
    (tmp_path / "own" / "model_final.pth").rename(
        tmp_path / "own" / "model_0000003.pth"
    )
    (tmp_path / "own" / "last_checkpoint").write_text("model_0000003.pth")
    trainer, checkpointer = make(OwnLoop, tmp_path / "own", seen)
    checkpointer.resume_or_load("")
    assert trainer.iter == 3
    trainer.train_loop(trainer.iter + 1, 5)

    assert torch.equal(trainer.model.fc.weight, reference.model.fc.weight)
    assert (seen, expected) == ([2, 4, 5], [2, 5])
    assert (trainer.iter, trainer.succeeded) == (5, True)
    assert torch.load(tmp_path / "own" / "model_final.pth")["trainer"]["iteration"] == 4


def test_an_own_loop_that_fails_is_not_evaluated_as_finished(tmp_path: Path) -> None:
    class Broken(HookBase):
        def after_step(self) -> None:
            if self.trainer.iter == 4:
                raise RuntimeError("broken")

    trainer, _ = make(OwnLoop, tmp_path, seen := [])
    trainer.register_hooks([Broken()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train_loop(0, 5)
    assert (seen, trainer.succeeded) == ([2], False)


def train_with_best_on_main(folder: Path, max_iter: int) -> tuple[int, float | None]:
    trainer, checkpointer = make(SimpleTrainer, folder, [])
    trainer.register_hooks([hooks.EvalHook(2, lambda: {"score": trainer.iter})])
    best = hooks.BestCheckpointer(2, checkpointer, "score")
    if comm.is_main_process():
        trainer.register_hooks([best])
    else:
        del trainer._hooks[0]  # the one that saves
    checkpointer.resume_or_load("")
    first = trainer.iter
    trainer.train(max_iter=max_iter)
    return first, best.best_metric


def test_a_run_resumes_with_a_best_checkpointer_on_the_main_rank_only(
    tmp_path: Path,
) -> None:
    assert run_ranks(train_with_best_on_main, 2, tmp_path, 4) == [(0, 4), (0, None)]
    assert run_ranks(train_with_best_on_main, 2, tmp_path, 6) == [(3, 6), (3, None)]
