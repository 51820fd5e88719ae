"""Whole runs on a CUDA device: saved, killed, resumed, out of memory, profiled."""

import json
import os
import re
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from card import CARD, CUDA, DEVICE, Perceptron, needs_card, now, pinned, register_all
from equality import assert_equal, assert_same_end
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA, TorchProfiler
from hooktrain.solver import AmpOptimWrapper
from processes import run_program
from toys import StopOnce, Stream, sgd

README = Path(__file__).parents[2] / "README.md"


@needs_card
def test_the_readme_program_trains_on_the_device(tmp_path: Path) -> None:
    (program, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    program += "print('trained on', next(model.parameters()).device.type)\n"
    (tmp_path / "train.py").write_text(program)
    for _ in range(2):  # the second one finds that all is done
        done = run_program("train.py", folder=tmp_path)
        assert "trained on cuda" in done.stdout
        assert done.returncode == 0


class Convolutions(nn.Module):
    """With dropout, noise on the device, batch norms, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, None, :, None].expand(-1, 1, -1, 4)
        images = images.to(memory_format=torch.channels_last)
        noisy = images + 0.01 * torch.randn_like(images)
        return self.layers(noisy).float().square().mean()


def convolutions_in(folder: Path, compiled: bool, *hooks: Any) -> SimpleTrainer:
    model = Convolutions().to(DEVICE, memory_format=torch.channels_last)
    if compiled:
        model.compile()
    wrapper = AmpOptimWrapper(
        sgd(model, lr=0.01),
        "float16",
        clip_grad={"max_norm": 1.0},
        # So that it overflows, and grows, in these few iterations.
        grad_scaler=torch.amp.GradScaler(
            DEVICE.type, init_scale=2.0**40, growth_interval=4
        ),
    )
    trainer = SimpleTrainer(model, Stream(), wrapper)
    trainer.seed = 0
    saver = register_all(
        trainer, folder, EMA(model), *hooks, period=10, background=True
    )
    saver.resume_or_load("")
    return trainer


@patch.dict(os.environ)  # the compiler leaves variables of its own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's imports
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=CARD)])
def test_a_run_that_was_stopped_resumes_bit_for_bit(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    trainer = convolutions_in(tmp_path / "one", compiled)
    trainer.train(max_iter=40)
    assert trainer.optim_wrapper.skipped_updates > 0
    broken = convolutions_in(tmp_path / "two", compiled, StopOnce(27))
    with pytest.raises(KeyboardInterrupt):
        broken.train(max_iter=40)
    resumed = convolutions_in(tmp_path / "two", compiled)
    assert resumed.iter == 19
    resumed.train(max_iter=40)
    assert_same_end(tmp_path / "one", tmp_path / "two")


class Greedy(nn.Module):
    """Once it needs more memory than there is."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        Greedy.calls += 1
        if Greedy.calls == 13:
            if CUDA:
                torch.empty(10**13, dtype=torch.uint8, device=DEVICE)
            raise torch.OutOfMemoryError("made up")
        return self.fc(x).square().mean()


def test_after_running_out_of_memory_the_process_can_go_on(tmp_path: Path) -> None:
    Greedy.calls = 0
    for first in (True, False):
        model = Greedy().to(DEVICE)
        trainer = SimpleTrainer(model, Stream(), sgd(model))
        saver = register_all(trainer, tmp_path, period=5, background=True)
        saver.resume_or_load("")
        if first:
            with pytest.raises(torch.OutOfMemoryError):
                trainer.train(max_iter=20)
            assert not trainer.succeeded
        else:
            assert trainer.iter == 9
            trainer.train(max_iter=20)
            assert trainer.succeeded


class Many(nn.Module):
    """Hundreds of small tensors."""

    def __init__(self) -> None:
        super().__init__()
        count = 200 if CUDA else 5
        layers = [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(count)
        ]
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def test_small_tensors_are_saved_in_the_background_as_they_were(tmp_path: Path) -> None:
    model = Many().to(DEVICE)
    trainer = SimpleTrainer(model, Stream(), torch.optim.AdamW(model.parameters()))
    saver = Checkpointer(model, tmp_path, trainer=trainer, background=True)
    blocked = []
    for i in range(4):
        trainer.train(max_iter=2 * (i + 1))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        start = now()
        saver.save("model")
        blocked.append(now() - start)
        trainer.train(max_iter=trainer.iter + 1)  # while it is written
        saver.wait()
        found = torch.load(tmp_path / "model.pth", map_location=DEVICE)
        assert_equal(dict(found["model"]), expected)
    assert not CUDA or min(blocked[1:]) < 0.25


@needs_card
def test_a_save_in_the_background_blocks_for_a_copy_to_pinned_memory(
    tmp_path: Path,
) -> None:
    model = Perceptron(4096, 7).to(DEVICE)
    trainer = SimpleTrainer(model, cycle(pinned(2, 64, 4096)), sgd(model))
    trainer.train(max_iter=3)
    saver = Checkpointer(model, tmp_path, trainer=trainer, background=True)
    tensors = [*model.parameters()]
    tensors += [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    kept = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
    copies, blocked = [], []
    for _ in range(4):
        start = now()
        for room, tensor in zip(kept, tensors, strict=True):
            room.copy_(tensor.detach(), non_blocking=True)
        copies.append(now() - start)
        start = now()
        saver.save("model")
        blocked.append(now() - start)
        saver.wait()
    # The first one pins the memory.
    assert min(blocked[1:]) < 2 * min(copies[1:]) + 0.05


@needs_card
def test_a_profile_shows_what_the_device_did(tmp_path: Path) -> None:
    model = Perceptron(64, 2).to(DEVICE)
    trainer = SimpleTrainer(model, cycle(pinned(2, 8, 64)), sgd(model))
    profiler = TorchProfiler(
        lambda trainer: trainer.iter == 6, str(tmp_path), save_tensorboard=False
    )
    trainer.register_hooks([profiler])
    trainer.train(max_iter=10)
    (path,) = tmp_path.glob("profiler-trace-iter6.*.json")
    trace = json.loads(path.read_text())
    assert "kernel" in {event.get("cat") for event in trace["traceEvents"]}
