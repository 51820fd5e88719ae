import errno
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.demos import (
    CharVocabulary,
    SampleWriter,
    TextDataset,
    TextGPT,
    TextSampler,
    samples,
)
from hooktrain.demos.samples import make_grid
from hooktrain.engine import HookBase, SimpleTrainer
from hooktrain.engine.hooks import EMA
from toys import Idle


class Painter(nn.Module):
    """Fills an image with what its input says, brighter with each call in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.brightness = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
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


@pytest.mark.parametrize(
    ("period", "written"), [(2, {1: 0.5, 3: 1.0, 4: 1.25}), (0, {4: 1.25})]
)
def test_it_writes_a_grid_every_period(
    tmp_path: Path, period: int, written: dict[int, float]
) -> None:
    folder = tmp_path / "run"
    trainer = Painting(
        SampleWriter(period, INPUTS, folder, name="drawn", columns=2, scale=3)
    )
    trainer.train(0, 5)
    assert len(list((folder / "drawn").iterdir())) == len(written)
    for (name, grid, at), (i, brightness) in zip(
        trainer.storage._vis_data, written.items(), strict=True
    ):
        assert (name, at) == ("drawn", i)
        assert torch.equal(grid, make_grid(INPUTS + brightness, columns=2, scale=3))
        with Image.open(folder / "drawn" / f"{i:07d}.png") as image:
            assert np.array_equal(image, (grid[0].clamp(0, 1) * 255).round().byte())
    with pytest.raises(ValueError, match="period must not be negative, but got -1"):
        SampleWriter(-1, INPUTS, tmp_path)


def test_the_averaged_model_draws_where_there_is_one(tmp_path: Path) -> None:
    trainer = Painting()
    trainer.ema = EMA(trainer.model, decay=0.5, warmup=False)
    trainer.register_hooks([trainer.ema, SampleWriter(2, INPUTS, tmp_path)])
    trainer.train(0, 2)
    # The weights are 0.25 and 0.5; the average 0.125 and then 0.3125.
    assert torch.equal(trainer.storage._vis_data[0][1], make_grid(INPUTS + 0.3125))


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_a_full_disk_is_logged(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run() -> None:
        if kind == "images":
            Painting(SampleWriter(1, INPUTS, tmp_path)).train(0, 2)
        else:
            make_trainer(TextSampler(1, VOCABULARY, tmp_path, length=5)).train(0, 2)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, f"no space to write {tmp_path}")

    with monkeypatch.context() as patch:
        patch.setattr(samples, "write_png", full)
        patch.setattr(samples, "atomic_write", full)
        run()
    assert (
        caplog.text.count(f"NOT WRITTEN: [Errno 28] no space to write {tmp_path}") == 2
    )
    (tmp_path / "samples").rmdir()
    (tmp_path / "samples").touch()
    with pytest.raises(FileExistsError):
        run()


TEXT = "abcabcabcabd"
VOCABULARY = CharVocabulary(TEXT)


def make_trainer(
    *hooks: Any, model: nn.Module | None = None, lr: float = 1e-2
) -> SimpleTrainer:
    torch.manual_seed(0)
    if model is None:
        model = TextGPT(len(VOCABULARY), 8, "tiny", dropout=0.1)
    data = TextDataset(TEXT, VOCABULARY, 8)
    batches = [{key: value[None] for key, value in sample.items()} for sample in data]
    trainer = SimpleTrainer(
        model, batches * 10, torch.optim.Adam(model.parameters(), lr=lr)
    )
    trainer.register_hooks(hooks)
    return trainer


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "samples").iterdir())


@pytest.mark.parametrize(("period", "expected"), [(3, [2, 5, 7]), (0, [7])])
def test_a_text_comes_every_period(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, period: int, expected: list[int]
) -> None:
    caplog.set_level(logging.INFO)
    sampler = TextSampler(
        period, VOCABULARY, tmp_path, prompt="ab", length=20, temperature=2.0, seed=7
    )
    trainer = make_trainer(sampler)
    trainer.ema = EMA(trainer.model, decay=0.9)  # type: ignore[attr-defined]
    trainer.register_hooks([trainer.ema], before=sampler)  # type: ignore[attr-defined]
    trainer.train(0, 8)
    assert files(tmp_path) == [f"{i:07d}.txt" for i in expected]
    model: Any = trainer.model.eval()
    with trainer.ema.swap():  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(7)
        tokens = model.generate(VOCABULARY.encode("ab"), 20, 2.0, generator)
    text = VOCABULARY.decode(tokens)
    assert (tmp_path / "samples" / "0000007.txt").read_text() == text
    assert text != VOCABULARY.decode(model.generate(VOCABULARY.encode("ab"), 20, 2.0))
    assert f"After 8 iterations the model writes:\n{text}" in caplog.text


def test_sampling_changes_nothing_in_the_run(tmp_path: Path) -> None:
    plain = make_trainer()
    plain.train(0, 6)
    sampled = make_trainer(TextSampler(1, VOCABULARY, tmp_path, length=5))
    sampled.train(0, 6)
    for a, b in zip(plain.model.parameters(), sampled.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(m.training for m in sampled.model.modules())


def sample_on_a_rank(folder: Path) -> str:
    model = DistributedDataParallel(TextGPT(len(VOCABULARY), 8, "tiny"))
    rank = torch.distributed.get_rank()
    sampler = TextSampler(2, VOCABULARY, folder / str(rank), length=10)
    trainer = make_trainer(sampler, model=model)
    trainer.train(0, 4)
    return sampler.sample()


def test_every_rank_samples_the_same(tmp_path: Path) -> None:
    texts = run_ranks(sample_on_a_rank, 2, tmp_path)
    assert texts[0] == texts[1]
    assert files(tmp_path / "0") == ["0000001.txt", "0000003.txt"]
    assert not (tmp_path / "1").exists()


def test_a_grid_goes_row_by_row() -> None:
    images = torch.arange(1, 4).view(3, 1, 1, 1).expand(3, 1, 1, 2)
    assert make_grid(images, columns=2).tolist() == [
        [
            [0, 0, 0, 0, 0, 0, 0],
            [0, 1, 1, 0, 2, 2, 0],
            [0, 0, 0, 0, 0, 0, 0],
            [0, 3, 3, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0],
        ]
    ]
    images = torch.tensor([[1, 2], [3, 4]]).view(
        2, 2, 1, 1
    )  # two images of two channels
    assert make_grid(images, columns=5, scale=2, padding=0).tolist() == [
        [[1, 1, 3, 3], [1, 1, 3, 3]],
        [[2, 2, 4, 4], [2, 2, 4, 4]],
    ]
