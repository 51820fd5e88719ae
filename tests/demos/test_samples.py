import errno
import logging
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
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
from hooktrain.demos.samples import make_grid, write_png
from hooktrain.engine import HookBase, SimpleTrainer
from hooktrain.engine.hooks import EMA
from toy import Idle, linear_trainer


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
    monkeypatch.setattr(samples, "write_png", lambda path, grid: written.append((path, grid)))
    trainer = Painting(SampleWriter(1, INPUTS, tmp_path))
    trainer.train(0, 1)
    ((path, grid),) = written
    assert path == tmp_path / "samples" / "0000000.png"
    assert torch.equal(grid, trainer.storage.images()[0][1])


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

    monkeypatch.setattr(samples, "atomic_write", full)
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


def test_a_full_disk_is_logged_as_well_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space to write it")

    monkeypatch.setattr(samples, "atomic_write", full)
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


def read_png(path: Path) -> tuple[tuple[int, ...], Tensor]:
    """A reader of our own: the numbers of the header, and the pixels as (H, W, C)."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, content = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + content)
        chunks[kind] = content
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    header = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    channels = {0: 1, 2: 3}[header[3]]
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    rows = rows.view(header[1], 1 + header[0] * channels)
    assert torch.equal(rows[:, 0], torch.zeros(header[1], dtype=torch.uint8))
    return header, rows[:, 1:].reshape(header[1], header[0], channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(tmp_path: Path, channels: int) -> None:
    image = torch.randint(256, (channels, 5, 7), dtype=torch.uint8)
    write_png(tmp_path / "a.png", image)
    header, pixels = read_png(tmp_path / "a.png")
    assert header == (7, 5, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    assert torch.equal(pixels, image.permute(1, 2, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_others_read_it_too(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = torch.randint(256, (3, 4, 6), dtype=torch.uint8)
    write_png(tmp_path / "a.png", image)
    read = image_module.open(tmp_path / "a.png")
    assert (read.size, read.mode) == ((6, 4), "RGB")
    assert read.tobytes() == image.permute(1, 2, 0).contiguous().numpy().tobytes()


def test_floating_point_is_from_0_to_1_and_clipped(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", torch.tensor([[[-1.0, 0.0, 0.5, 1.0, 2.0]]]))
    assert read_png(tmp_path / "a.png")[1].flatten().tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("shape", [(8, 8), (2, 8, 8), (1, 0, 8)])
def test_a_shape_that_is_no_image_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(C, H, W\) with 1 or 3 channels"):
        write_png(tmp_path / "a.png", torch.zeros(shape))


def test_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="uint8 or floating point, but it is"):
        write_png(tmp_path / "a.png", torch.zeros(1, 2, 2, dtype=torch.int64))


def test_a_grid_goes_row_by_row_with_lines_around() -> None:
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


def test_a_grid_without_lines_is_scaled_by_whole_pixels() -> None:
    images = torch.tensor([[1, 2], [3, 4]]).view(2, 2, 1, 1)  # two images of two channels
    assert make_grid(images, columns=5, scale=2, padding=0).tolist() == [
        [[1, 1, 3, 3], [1, 1, 3, 3]],
        [[2, 2, 4, 4], [2, 2, 4, 4]],
    ]


def test_a_grid_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(N, C, H, W\), but got \(0, 1, 8, 8\)"):
        make_grid(torch.zeros(0, 1, 8, 8))
