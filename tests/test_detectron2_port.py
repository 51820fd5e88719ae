"""A script in the shape of detectron2's, ported by replacing the names of the packages alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.config import LazyCall as L, instantiate
from hooktrain.data import build_train_loader
from hooktrain.demos import DigitsCNN, DigitsDataset
from hooktrain.engine import (
    HookBase,
    SimpleTrainer,
    create_ddp_model,
    default_writers,
    hooks,
)
from hooktrain.solver import CosineParamScheduler
from hooktrain.utils import comm
from hooktrain.utils.events import (
    get_event_storage,
)


class PutScalar(HookBase):
    """A hook that uses the current storage, as models and hooks do there."""

    def after_step(self) -> None:
        get_event_storage().put_scalar("weight_norm", self.trainer.model_norm())


class CustomStep(SimpleTrainer):
    """A step of one's own, over the same attributes."""

    def model_norm(self) -> float:
        return sum(p.detach().norm().item() for p in self.model.parameters())

    def run_step(self) -> None:
        assert self.model.training
        data = next(self._data_loader_iter)
        loss_dict = self.model(data)
        losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        losses.backward()
        self._write_metrics(loss_dict, data_time=0.01)
        self.optimizer.step()


def lazyconfig_train_net(folder: Path, max_iter: int, resume: bool) -> tuple[int, int]:
    """Checkpointer and writer on the main rank only; the caller does the arithmetic of resuming."""
    torch.manual_seed(0)
    model = instantiate(L(DigitsCNN)(channels=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_loader = build_train_loader(
        DigitsDataset(train=True), total_batch_size=8, seed=0
    )
    model = create_ddp_model(model, broadcast_buffers=False, fp16_compression=False)
    trainer = CustomStep(model, train_loader, optimizer)
    checkpointer = Checkpointer(model, str(folder), trainer=trainer)
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)),
            PutScalar(),
            hooks.PeriodicCheckpointer(checkpointer, period=4, max_to_keep=100)
            if comm.is_main_process()
            else None,
            hooks.EvalHook(4, lambda: {"score": {"accuracy": 1.0}}),
            hooks.PeriodicWriter(default_writers(str(folder), max_iter), period=2)
            if comm.is_main_process()
            else None,
        ]
    )
    checkpointer.resume_or_load("", resume=resume)
    start_iter = trainer.iter + 1 if resume and checkpointer.has_checkpoint() else 0
    trainer.train(start_iter, max_iter)
    comm.synchronize()
    return start_iter, trainer.iter


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_with_hooks_trains_and_resumes(tmp_path: Path, ranks: int) -> None:
    def run(max_iter: int, resume: bool) -> Any:
        if ranks == 1:
            return [lazyconfig_train_net(tmp_path, max_iter, resume)]
        return run_ranks(lazyconfig_train_net, ranks, tmp_path, max_iter, resume)

    assert run(6, False) == [(0, 6)] * ranks
    assert run(10, True) == [(6, 10)] * ranks
    names = {path.name for path in tmp_path.glob("*.pth")}
    assert names == {"model_0000003.pth", "model_0000007.pth", "model_final.pth"}
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.json").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == [1, 3, 5, 7, 9, 10]
    assert "score/accuracy" in lines[-1]
    assert {"total_loss", "loss_cls", "weight_norm", "lr"} <= set(lines[-2])
