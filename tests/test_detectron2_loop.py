"""A script in the shape of detectron2's plain_train_net.py, started and resumed as it would be."""

import argparse
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.compat.detectron2 import PeriodicCheckpointer, TrainerBase, comm
from hooktrain.config import ConfigDict
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.data.samplers import TrainingSampler
from hooktrain.demos import ClassificationEvaluator, DigitsCNN, DigitsDataset
from hooktrain.engine import (
    SimpleTrainer,
    default_argument_parser,
    default_hooks,
    default_setup,
    default_writers,
    hooks,
    launch,
)
from hooktrain.engine.defaults import create_ddp_model
from hooktrain.evaluation import inference_on_dataset, print_csv_format
from hooktrain.events import EventStorage, load_json_metrics
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import CosineParamScheduler, LRMultiplier, WarmupParamScheduler
from hooktrain.utils.logger import close_logger

BASE_RATE = 0.05
MAX_ITER = 12


def schedule() -> WarmupParamScheduler:
    return WarmupParamScheduler(CosineParamScheduler(1.0, 0.0), 0.1, 0.25)


def do_test(model: nn.Module) -> dict[str, Any]:
    names = [str(digit) for digit in range(10)]
    loader = build_test_loader(DigitsDataset(train=False), batch_size=90)
    results = inference_on_dataset(model, loader, ClassificationEvaluator(names))
    if comm.is_main_process():
        print_csv_format(results)
    return results


def do_train(folder: str, model: nn.Module, resume: bool, end: int) -> int:
    """Train up to `end` of `MAX_ITER` iterations, as if the process died there."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_RATE, momentum=0.9)
    scheduler = LRMultiplier(optimizer, schedule(), MAX_ITER)
    checkpointer = Checkpointer(model, folder, optimizer=optimizer, scheduler=scheduler)
    start_iter = checkpointer.resume_or_load("", resume=resume).get("iteration", -1) + 1
    periodic_checkpointer = PeriodicCheckpointer(checkpointer, 3, max_iter=MAX_ITER)
    writers = default_writers(folder, MAX_ITER) if comm.is_main_process() else []
    data_set = DigitsDataset(train=True)
    sampler = TrainingSampler(len(data_set), seed=0)
    data_loader = build_train_loader(data_set, total_batch_size=8, sampler=sampler)
    with EventStorage(start_iter) as storage:
        for data, iteration in zip(data_loader, range(start_iter, end), strict=False):
            storage.iter = iteration
            loss_dict = model(data)
            losses = sum(loss_dict.values())
            assert torch.isfinite(losses).all(), loss_dict
            reduced = {k: v.item() for k, v in comm.reduce_dict(loss_dict).items()}
            if comm.is_main_process():
                storage.put_scalars(total_loss=sum(reduced.values()), **reduced)
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            storage.put_scalar(
                "lr", optimizer.param_groups[0]["lr"], smoothing_hint=False
            )
            scheduler.step()
            for writer in writers:
                writer.write()
            periodic_checkpointer.step(iteration)
    for writer in writers:
        writer.close()
    return start_iter


def main(args: argparse.Namespace, folder: str, end: int) -> tuple[int, float]:
    default_setup(ConfigDict(train={"output_dir": folder}), args)
    torch.manual_seed(0)
    model: nn.Module = DigitsCNN(channels=2)
    if comm.get_world_size() > 1:
        model = create_ddp_model(model, broadcast_buffers=False)
    start = do_train(folder, model, args.resume, end)
    return start, do_test(model).get("classification", {}).get("accuracy", -1.0)


def start_script(folder: str, end: int, *arguments: str) -> tuple[int, float]:
    args = default_argument_parser().parse_args(arguments)
    place = (args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
    result: tuple[int, float] = launch(main, *place, args=(args, folder, end))
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out"
    close_logger()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_of_ones_own_resumes(folder: Path, ranks: int) -> None:
    def run(end: int, *arguments: str) -> list[tuple[int, float]]:
        if ranks == 1:
            return [start_script(os.fspath(folder), end, *arguments)]
        return run_ranks(start_script, ranks, os.fspath(folder), end, *arguments)

    assert [start for start, _ in run(8)] == [0] * ranks
    results = run(MAX_ITER, "--resume")
    assert [start for start, _ in results] == [6] * ranks
    assert results[0][1] >= 0
    lines = [
        json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()
    ]
    # Iterations 6 and 7 were done twice: the checkpoint was before them.
    assert [line["iteration"] for line in lines] == [*range(8), *range(6, MAX_ITER)]
    for line in lines:
        expected = BASE_RATE * schedule()(line["iteration"] / MAX_ITER)
        assert line["lr"] == pytest.approx(expected, rel=1e-12)


def detectron2_files() -> dict[str, Any]:
    """What its trainers save after iteration 4, in the layouts of all of them."""
    old = Loss()
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
    scheduler = LRMultiplier(optimizer, CosineParamScheduler(1.0, 0.0), 10)
    for _ in range(5):
        optimizer.zero_grad()
        old(torch.ones(2, 4)).backward()
        optimizer.step()
        scheduler.step()
    hooks = {"LRScheduler": {"base_lrs": [0.1], "last_epoch": 5}}
    scale = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler = {**scale, "growth_interval": 2000, "_growth_tracker": 5}
    simple = {"iteration": 4, "hooks": hooks, "optimizer": optimizer.state_dict()}
    inner = {"iteration": 4, "optimizer": optimizer.state_dict()}
    trainers = {
        "SimpleTrainer": simple,
        "AMPTrainer": {**simple, "grad_scaler": scaler},
        "DefaultTrainer": {"iteration": 4, "hooks": hooks, "_trainer": inner},
    }
    model = old.state_dict()
    return {
        name: {"model": model, "trainer": trainer, "iteration": 4}
        for name, trainer in trainers.items()
    }


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


@pytest.mark.parametrize(
    "trainer_there", ["SimpleTrainer", "AMPTrainer", "DefaultTrainer"]
)
def test_a_file_of_each_of_detectron2s_trainers_goes_on_with_the_default_hooks(
    tmp_path: Path, trainer_there: str
) -> None:
    torch.save(detectron2_files()[trainer_there], tmp_path / "model_0000004.pth")
    (tmp_path / "last_checkpoint").write_text("model_0000004.pth")

    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = SimpleTrainer(model, [torch.ones(2, 4)], optimizer)
    checkpointer = Checkpointer(model, str(tmp_path), trainer=trainer)
    cosine = CosineParamScheduler(1.0, 0.0)
    trainer.register_hooks(
        default_hooks(
            scheduler=cosine,
            checkpointer=checkpointer,
            checkpoint_period=5,
            writers=default_writers(str(tmp_path), 10),
        )
    )
    assert checkpointer.resume_or_load("", resume=True) == {"iteration": 4}
    trainer.train(trainer.iter + 1, 10)

    # The same ten iterations by hand, in one piece.
    reference = Loss()
    by_hand = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for iteration in range(10):
        by_hand.param_groups[0]["lr"] = 0.1 * cosine(iteration / 10)
        by_hand.zero_grad()
        reference(torch.ones(2, 4)).backward()
        by_hand.step()
    assert torch.equal(model.fc.weight, reference.fc.weight)
    assert (tmp_path / "model_final.pth").exists()


class Copied(TrainerBase):
    """As copies of detectron2's DefaultTrainer are built: a trainer inside makes the steps."""

    def __init__(self, folder: str, data: Any) -> None:
        super().__init__()
        model: nn.Module = Loss()
        if comm.get_world_size() > 1:
            model = create_ddp_model(model, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self._trainer = SimpleTrainer(model, data, optimizer, gather_metric_period=2)
        self.checkpointer = Checkpointer(model, folder, trainer=weakref.proxy(self))
        self.seen: list[int] = []
        self.register_hooks(
            [
                hooks.IterationTimer(),
                hooks.CallbackHook(after_backward=lambda t: t.seen.append(t.iter)),
                hooks.PeriodicWriter(default_writers(folder), period=2),
                hooks.PeriodicCheckpointer(self.checkpointer, 2),
            ]
        )

    def run_step(self) -> None:
        self._trainer.iter = self.iter
        self._trainer.run_step()

    @property
    def weight(self) -> Tensor:
        return unwrap_model(self._trainer.model).fc.weight.detach()


class CopiedWithState(Copied):
    """Newer copies save the state of the trainer inside themselves."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["_trainer"] = self._trainer.state_dict()
        return state

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self._trainer.load_state_dict(state_dict["_trainer"])


def stream() -> Any:
    data: Any = list(torch.arange(24.0).reshape(6, 4) / 24)
    return build_train_loader(data, total_batch_size=2, seed=0)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO")
    return caplog


def test_a_trainer_inside_gets_its_losses_to_the_writers(
    folder: Path, told: pytest.LogCaptureFixture
) -> None:
    trainer = Copied(str(folder), stream())
    trainer.train(0, 4)
    lines = load_json_metrics(folder / "metrics.json")
    assert [line["iteration"] for line in lines] == [1, 3]
    assert all("total_loss" in line and "data_time" in line for line in lines)
    assert "total_loss: " in told.text
    assert trainer.seen == [0, 1, 2, 3]


def test_a_trainer_inside_ends_on_nan(folder: Path) -> None:
    trainer = Copied(str(folder), [torch.ones(2, 4), torch.full((2, 4), torch.nan)])
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        trainer.train(0, 4)
    assert trainer.weight.isfinite().all()
    assert list(folder.glob("*.pth")) == []


@pytest.mark.parametrize("kind", [Copied, CopiedWithState])
def test_a_trainer_inside_is_resumed_bit_for_bit(
    folder: Path, kind: type[Copied]
) -> None:
    whole = kind(str(folder / "whole"), stream())
    whole.seed = 3
    whole.train(0, 7)
    first = kind(str(folder / "parts"), stream())
    first.seed = 3
    first.train(0, 4)
    second = kind(str(folder / "parts"), stream())
    second.checkpointer.resume_or_load("", resume=True)
    assert second.iter == 3
    second.train(second.iter + 1, 7)
    assert torch.equal(second.weight, whole.weight)
    histories = [t.storage.history("total_loss").values() for t in (second, whole)]
    assert histories[0] == histories[1]
    buffers = [t._trainer.optimizer.state_dict()["state"][0] for t in (second, whole)]
    assert torch.equal(buffers[0]["momentum_buffer"], buffers[1]["momentum_buffer"])


def mean_losses(folder: str, bad: bool) -> Any:
    data = [torch.full((2, 4), 1.0 + comm.get_rank())] * 4
    if bad and comm.get_rank() == 1:
        data[2] = torch.full((2, 4), torch.nan)
    trainer = Copied(folder, data)
    try:
        trainer.train(0, 4)
    except FloatingPointError as error:
        return str(error).partition("!")[0]
    return trainer.storage.history("total_loss").values()


def test_ranks_exchange_the_losses_of_a_trainer_inside(folder: Path) -> None:
    first, second = run_ranks(mean_losses, 2, str(folder), False)
    assert first == second
    assert [i for _, i in first] == [0, 1, 2, 3]
    by_hand = [Loss()(torch.full((2, 4), 1.0 + rank)).item() for rank in range(2)]
    assert first[0][0] == sum(by_hand) / 2
    verdict = "Loss became infinite or NaN at iteration=2"
    assert run_ranks(mean_losses, 2, str(folder / "bad"), True) == [verdict] * 2
