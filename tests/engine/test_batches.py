"""The batches of a training come from a loader that may end, be replaced, or know its position."""

import gc
import weakref
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from trainer_toys import Stream, batches, make

from hooktrain.checkpoint.files import load_file, save_file
from hooktrain.data import build_train_loader
from hooktrain.engine.batches import Batches


@pytest.mark.parametrize("place", ["sampler", "batch_sampler", "batch_sampler.sampler"])
def test_an_exhausted_loader_starts_again_with_the_next_epoch(place: str) -> None:
    class Loader(list[Tensor]):
        pass

    epochs: list[int] = []
    loader = Loader(batches(2))
    sampler: Any = loader
    for name in place.split("."):
        setattr(sampler, name, SimpleNamespace())
        sampler = getattr(sampler, name)
    sampler.set_epoch = epochs.append
    trainer = make(loader)
    trainer.train(0, 5)
    assert trainer.iter == 5
    assert epochs == [1, 2]


def test_an_empty_loader_is_an_error_not_an_endless_loop() -> None:
    for data in ([], iter(batches(1))):
        with pytest.raises(
            ValueError, match=r"data loader is empty .*or starts only once"
        ):
            make(data).train(0, 2)


def test_a_loader_that_cannot_be_positioned_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved, loaded = make(), make()
    saved.train(0, 1)
    loaded.load_state_dict(saved.state_dict())
    assert "position in the data could not be restored" in caplog.text


def test_a_loader_with_state_continues_where_it_was() -> None:
    saved, loaded = make(Stream()), make(Stream())
    saved.train(0, 3)
    loaded.load_state_dict(saved.state_dict())
    loaded.train(max_iter=5)
    assert loaded.data_loader.position == 5  # type: ignore[attr-defined]


class Numbers(IterableDataset[int]):
    """From 0 to 9, shared by the workers."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, 10, worker.num_workers) if worker else range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_torchdata_continues_where_it_was(
    workers: int, tmp_path: Path
) -> None:
    def stream() -> Batches:
        return Batches(
            build_train_loader(Numbers(), total_batch_size=2, num_workers=workers)
        )

    whole = [batch.tolist() for batch in islice(stream(), 14)]
    assert sorted(chain.from_iterable(whole[: 6 if workers else 5])) == list(range(10))
    for stop in (2, 6, 7):
        first, second = stream(), stream()
        before = [batch.tolist() for batch in islice(first, stop)]
        save_file(first.state_dict(), tmp_path / "state.pth")
        second.load_state_dict(load_file(tmp_path / "state.pth"), begun=True)
        after = [batch.tolist() for batch in islice(second, 14 - stop)]
        assert before + after == whole


def test_the_epoch_of_a_finite_loader_resumes_with_its_order() -> None:
    announced: list[int] = []

    class Loader(list[Tensor]):
        class sampler:  # noqa: N801
            set_epoch = announced.append

    first = make(Loader(batches(2)))
    first.train(0, 5)
    assert announced == [1, 2]
    second = make(Loader(batches(2)))
    second.load_state_dict(first.state_dict())
    second.train(max_iter=6)
    assert announced == [1, 2, 2]


def test_another_loader_is_used_from_the_next_batch_on() -> None:
    trainer = make()
    trainer.train(0, 1)
    seen: list[Tensor] = []
    trainer.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    trainer.data_loader = batches(3)[2:]
    trainer.train(max_iter=2)
    assert torch.equal(seen[0], batches(3)[2])


def test_reset_data_loader_frees_the_old_loader_before_it_builds_the_new_one() -> None:
    class Loader(list[Tensor]):
        pass

    old = Loader(batches(2))
    gone = weakref.ref(old)
    trainer = make(old)
    del old
    trainer.train(0, 1)
    seen = []

    def build() -> Loader:
        gc.collect()
        seen.append(gone() is None)
        return Loader(batches(1))

    trainer.reset_data_loader(build)
    assert seen == [True]
    trainer.train(max_iter=3)
    assert trainer.iter == 3
