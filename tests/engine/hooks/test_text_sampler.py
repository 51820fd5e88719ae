import errno
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hooktrain.engine.hooks.text_sampler as module
from gloo import run_ranks
from hooktrain.data.text import CharVocabulary, TextDataset
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA
from hooktrain.engine.hooks.text_sampler import TextSampler
from hooktrain.model.text_gpt import TextGPT

TEXT = "abcabcabcabd"
VOCABULARY = CharVocabulary(TEXT)


def make_trainer(*hooks: Any, model: nn.Module | None = None, lr: float = 1e-2) -> SimpleTrainer:
    torch.manual_seed(0)
    if model is None:
        model = TextGPT(len(VOCABULARY), 8, "tiny", dropout=0.1)
    data = TextDataset(TEXT, VOCABULARY, 8)
    batches = [{key: value[None] for key, value in sample.items()} for sample in data]
    trainer = SimpleTrainer(model, batches * 10, torch.optim.Adam(model.parameters(), lr=lr))
    trainer.register_hooks(hooks)
    return trainer


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "samples").iterdir())


@pytest.mark.parametrize(
    ("period", "expected"),
    [(3, ["0000002.txt", "0000005.txt", "0000007.txt"]), (0, ["0000007.txt"])],
)
def test_texts_come_every_period_and_at_the_last_iteration(
    tmp_path: Path, period: int, expected: list[str]
) -> None:
    make_trainer(TextSampler(period, VOCABULARY, tmp_path, length=5)).train(0, 8)
    assert files(tmp_path) == expected


def test_a_text_is_the_prompt_and_what_the_model_makes_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = TextSampler(0, VOCABULARY, tmp_path, prompt="ab", length=20, temperature=0.5, seed=7)
    trainer = make_trainer(sampler)
    with caplog.at_level(logging.INFO):
        trainer.train(0, 5)
    generator = torch.Generator().manual_seed(7)
    model: Any = trainer.model.eval()
    expected = VOCABULARY.decode(model.generate(VOCABULARY.encode("ab"), 20, 0.5, generator))
    assert (tmp_path / "samples" / "0000004.txt").read_text() == expected
    assert expected[:2] == "ab"
    assert len(expected) == 22
    assert f"After 5 iterations the model writes:\n{expected}" in caplog.text


def test_the_random_numbers_are_the_same_each_time(tmp_path: Path) -> None:
    make_trainer(TextSampler(1, VOCABULARY, tmp_path, length=50), lr=0.0).train(0, 2)
    first, second = ((tmp_path / "samples" / f).read_text() for f in files(tmp_path))
    assert first == second


def test_sampling_changes_nothing_in_the_run(tmp_path: Path) -> None:
    plain = make_trainer()
    plain.train(0, 6)
    sampled = make_trainer(TextSampler(1, VOCABULARY, tmp_path, length=5))
    sampled.train(0, 6)
    for a, b in zip(plain.model.parameters(), sampled.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(m.training for m in sampled.model.modules())


class Dicer(nn.Module):
    """Draws from every global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.weight.sum()}

    def generate(self, prompt: Tensor, count: int, *_: Any) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        torch.rand(1), np.random.rand(), random.random()
        return prompt


def test_the_random_numbers_of_the_run_go_on_whatever_a_model_draws(tmp_path: Path) -> None:
    trainer = make_trainer(TextSampler(1, VOCABULARY, tmp_path), model=Dicer())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    trainer.train(0, 3)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_the_averaged_model_writes_if_there_is_one(tmp_path: Path) -> None:
    sampler = TextSampler(0, VOCABULARY, tmp_path, length=40, temperature=2.0)
    trainer = make_trainer(sampler)
    ema = EMA(trainer.model, decay=0.9)
    trainer.ema = ema  # type: ignore[attr-defined]
    trainer.register_hooks([ema], before=sampler)
    trainer.train(0, 20)
    of_average = sampler.sample()
    trainer.ema = None  # type: ignore[attr-defined]
    assert (tmp_path / "samples" / "0000019.txt").read_text() == of_average
    assert of_average != sampler.sample()


def test_a_full_disk_is_told_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space to write it")

    monkeypatch.setattr(module, "atomic_write", full)
    trainer = make_trainer(TextSampler(1, VOCABULARY, tmp_path, length=5))
    trainer.train(0, 2)
    assert trainer.iter == 2
    assert "NOT WRITTEN: [Errno 28] no space to write it" in caplog.text


def test_any_other_failure_to_write_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("no folder")
    with pytest.raises(FileExistsError):
        make_trainer(TextSampler(1, VOCABULARY, tmp_path, length=5)).train(0, 2)


def test_a_model_that_cannot_write_is_refused_at_the_start(tmp_path: Path) -> None:
    trainer = make_trainer(TextSampler(1, VOCABULARY, tmp_path), model=nn.Linear(1, 1))
    with pytest.raises(TypeError, match="method generate; Linear has none"):
        trainer.train(0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"period": -1}, "period must not be negative, but got -1"),
        ({"prompt": ""}, "prompt must not be empty"),
        ({"length": 0}, "length must be at least 1, but got 0"),
        ({"temperature": -1.0}, "temperature must not be negative, but got -1.0"),
    ],
)
def test_arguments_out_of_range_are_named(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    defaults = {"period": 1, "vocabulary": VOCABULARY, "output_dir": tmp_path}
    with pytest.raises(ValueError, match=message):
        TextSampler(**{**defaults, **arguments})


def sample_on_a_rank(folder: Path) -> str:
    model = DistributedDataParallel(TextGPT(len(VOCABULARY), 8, "tiny"))
    rank = torch.distributed.get_rank()
    sampler = TextSampler(2, VOCABULARY, folder / str(rank), length=10)
    trainer = make_trainer(sampler, model=model)
    trainer.train(0, 4)
    return sampler.sample()


def test_every_rank_samples_the_same_and_the_main_one_writes(tmp_path: Path) -> None:
    texts = run_ranks(sample_on_a_rank, 2, tmp_path)
    assert texts[0] == texts[1]
    assert files(tmp_path / "0") == ["0000001.txt", "0000003.txt"]
    assert not (tmp_path / "1").exists()
