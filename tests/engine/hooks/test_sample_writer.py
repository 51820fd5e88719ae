import errno
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hooktrain.engine import HookBase
from hooktrain.engine.hooks import EMA, SampleWriter
from hooktrain.utils import image as image_module
from hooktrain.utils.image import make_grid
from toy import Idle, linear_trainer


class Painter(nn.Module):
    """Fills an image with what its input says, brighter with each call in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.brightness = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        torch.rand(3)
        random.random()
        np.random.rand()
        return inputs + self.brightness


class Painting(Idle):
    """Each step makes the model's images brighter by a quarter."""

    def __init__(self, *hooks: HookBase) -> None:
        super().__init__(*hooks)
        self.model = Painter()

    def run_step(self) -> None:
        assert self.model.training
        self.model.brightness.data += 0.25


INPUTS = torch.zeros(3, 1, 2, 2)


def test_it_writes_a_grid_every_period_and_at_the_last_iteration(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hook = SampleWriter(2, INPUTS, folder, name="drawn", columns=2, scale=3)
    trainer = Painting(hook)
    trainer.train(0, 5)
    names = ["0000001.png", "0000003.png", "0000004.png"]
    assert sorted(path.name for path in (folder / "drawn").iterdir()) == names
    images = trainer.storage.images()
    assert [(name, iteration) for name, _, iteration in images] == [
        ("drawn", 1),
        ("drawn", 3),
        ("drawn", 4),
    ]
    for (_, grid, _), brightness in zip(images, (0.5, 1.0, 1.25), strict=True):
        assert torch.equal(grid, make_grid(INPUTS + brightness, columns=2, scale=3))


def test_a_file_holds_what_the_storage_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, Tensor]] = []
    module = "hooktrain.engine.hooks.sample_writer.write_png"
    monkeypatch.setattr(module, lambda path, grid: written.append((path, grid)))
    trainer = Painting(SampleWriter(1, INPUTS, tmp_path))
    trainer.train(0, 1)
    ((path, grid),) = written
    assert path == tmp_path / "samples" / "0000000.png"
    assert torch.equal(grid, trainer.storage.images()[0][1])


def test_the_runs_random_numbers_go_on_as_if_nothing_had_been_drawn(tmp_path: Path) -> None:
    def drawn_after(*hooks: HookBase) -> tuple[Any, ...]:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        Painting(*hooks).train(0, 3)
        return torch.rand(2).tolist(), np.random.rand(), random.random()

    assert drawn_after(SampleWriter(1, INPUTS, tmp_path)) == drawn_after()


def test_the_averaged_model_draws_where_there_is_one(tmp_path: Path) -> None:
    trainer = Painting()
    trainer.ema = EMA(trainer.model, decay=0.5, warmup=False)
    trainer.register_hooks([trainer.ema, SampleWriter(2, INPUTS, tmp_path)])
    trainer.train(0, 2)
    # The weights are 0.25 and 0.5; the average 0.125 and then 0.3125.
    assert torch.equal(trainer.storage.images()[0][1], make_grid(INPUTS + 0.3125))


def test_draw_can_be_overridden(tmp_path: Path) -> None:
    class WithoutInput(SampleWriter):
        def draw(self, model: nn.Module) -> Tensor:
            return model.fc.weight.view(3, 1, 2, 2)

    trainer = linear_trainer(WithoutInput(4, torch.empty(0), tmp_path))
    trainer.train(0, 4)
    weights = trainer.model.fc.weight.detach().view(3, 1, 2, 2)
    assert torch.equal(trainer.storage.images()[0][1], make_grid(weights))


def test_a_full_disk_is_logged_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, f"no space to write {tmp_path}")

    monkeypatch.setattr(image_module, "atomic_write", full)
    trainer = Painting(SampleWriter(2, INPUTS, tmp_path))
    trainer.train(0, 4)
    assert trainer.iter == 4
    assert caplog.text.count("NOT WRITTEN") == 2
    assert f"no space to write {tmp_path}" in caplog.text


def test_a_folder_that_cannot_be_written_to_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = Painting(SampleWriter(1, INPUTS, tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        trainer.train(0, 1)
    assert trainer.model.training


def test_a_period_of_0_writes_at_the_last_iteration_only(tmp_path: Path) -> None:
    Painting(SampleWriter(0, INPUTS, tmp_path)).train(0, 3)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["0000002.png"]


def test_a_negative_period_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="period must not be negative, but got -1"):
        SampleWriter(-1, INPUTS, tmp_path)
