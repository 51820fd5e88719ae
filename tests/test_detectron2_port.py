"""Scripts in the shape of detectron2's, ported by replacing the names of the packages alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, PeriodicCheckpointer
from hooktrain.config import LazyCall as L
from hooktrain.config import instantiate
from hooktrain.data import DigitsDataset, build_train_loader
from hooktrain.engine import (
    AMPTrainer,
    HookBase,
    SimpleTrainer,
    create_ddp_model,
    default_writers,
    hooks,
)
from hooktrain.model import DigitsCNN
from hooktrain.solver import CosineParamScheduler, LRMultiplier
from hooktrain.utils import comm
from hooktrain.utils.events import (
    CommonMetricPrinter,
    EventStorage,
    JSONWriter,
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
    train_loader = build_train_loader(DigitsDataset(train=True), total_batch_size=8, seed=0)
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
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 3, 5, 7, 9, 10]
    assert "score/accuracy" in lines[-1]
    assert {"total_loss", "loss_cls", "weight_norm", "lr"} <= set(lines[-2])


def test_the_script_without_hooks_trains(tmp_path: Path) -> None:
    model = DigitsCNN(channels=2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = LRMultiplier(optimizer, CosineParamScheduler(1.0, 0.0), max_iter=6)
    checkpointer = Checkpointer(model, str(tmp_path), optimizer=optimizer, scheduler=scheduler)
    start_iter = checkpointer.resume_or_load("", resume=True).get("iteration", -1) + 1
    periodic_checkpointer = PeriodicCheckpointer(checkpointer, 4, max_iter=6)
    writers = [CommonMetricPrinter(6), JSONWriter(str(tmp_path / "metrics.json"))]
    loader = build_train_loader(DigitsDataset(train=True), total_batch_size=8, seed=0)
    with EventStorage(start_iter) as storage:
        for data, iteration in zip(loader, range(start_iter, 6), strict=False):
            storage.iter = iteration
            loss_dict = model(data)
            losses = sum(loss_dict.values())
            reduced = {k: v.item() for k, v in comm.reduce_dict(loss_dict).items()}
            storage.put_scalars(total_loss=sum(reduced.values()), **reduced)
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            scheduler.step()
            if iteration % 3 == 2:
                for writer in writers:
                    writer.write()
            periodic_checkpointer.step(iteration)
            storage.step()
    for writer in writers:
        writer.close()
    lines = (tmp_path / "metrics.json").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [2, 5]
    assert (tmp_path / "model_final.pth").exists()


def test_a_checkpoint_of_detectron2_continues_with_the_usual_hooks(tmp_path: Path) -> None:
    """The layout that its trainer and its LRScheduler hook leave behind, written by hand."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    old = nn.Linear(4, 1)
    old_optimizer = torch.optim.SGD([{"params": old.parameters(), "initial_lr": 0.1}], lr=0.1)
    trainer_state = {
        "iteration": 4,
        "hooks": {"LRScheduler": {"base_lrs": [0.1], "last_epoch": 5}},
        "optimizer": old_optimizer.state_dict(),
        "grad_scaler": {},
    }
    torch.save(
        {"model": old.state_dict(), "trainer": trainer_state, "iteration": 4},
        tmp_path / "model_0000004.pth",
    )
    (tmp_path / "last_checkpoint").write_text("model_0000004.pth")

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    wrapped = Loss()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    trainer = AMPTrainer(wrapped, [torch.ones(2, 4)], optimizer, precision=torch.bfloat16)
    trainer.register_hooks([hooks.LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0))])
    checkpointer = Checkpointer(model, str(tmp_path), trainer=trainer)
    checkpointer.resume_or_load("", resume=True)
    assert torch.equal(model.weight, old.weight)
    assert trainer.iter == 4
    trainer.train(max_iter=10)
    rates = [value for value, _ in trainer.storage.history("lr").values()]
    assert rates[0] == pytest.approx(0.1 * CosineParamScheduler(1.0, 0.0)(0.5))
    assert len(rates) == 5
