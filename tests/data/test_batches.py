"""The batches of loaders that are not ours."""

import logging
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import pytest
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from gloo import run_ranks
from hooktrain.checkpoint.files import load_file, save_file
from hooktrain.data import build_train_loader
from hooktrain.data.batches import Batches


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
        second.load_state_dict(load_file(tmp_path / "state.pth"))
        after = [batch.tolist() for batch in islice(second, 14 - stop)]
        assert before + after == whole


def warnings_of_a_resume() -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain.data.batches").addHandler(handler)
    for data in (Numbers(), range(10)):
        batches = Batches(build_train_loader(data, total_batch_size=2, seed=0))
        batches.load_state_dict(batches.state_dict())
    return told


def test_ranks_that_take_the_main_process_position_in_a_stream_say_so() -> None:
    for texts in run_ranks(warnings_of_a_resume, 2):
        (text,) = texts
        assert text.startswith("Each rank continues")


def test_a_single_process_resumes_a_stream_without_a_warning() -> None:
    assert warnings_of_a_resume() == []


class Undivided(IterableDataset[int]):
    """All of it for each worker."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(("data", "count"), [(Undivided(), 1), (Numbers(), 0)])
def test_workers_that_read_the_same_are_told_once_how_to_share(
    data: IterableDataset[int], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    batches = Batches(DataLoader(data, 2, num_workers=2))
    read = [batch.tolist() for batch in islice(batches, 12)]
    assert len(read) == 12
    assert caplog.text.count("get_worker_info") == count


def test_a_stream_that_begins_anew_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hooktrain.data.loader.find_spec", lambda name: None)
    stream = Batches(build_train_loader(Numbers(), total_batch_size=2))
    stream.load_state_dict(stream.state_dict())
    assert "pip install 'hooktrain[streams]'" in caplog.text


@pytest.mark.parametrize(("taken", "read_again"), [(2, 0), (3, 1), (4, 0)])
def test_a_resume_begins_the_epoch_that_was_not_over(
    taken: int, read_again: int
) -> None:
    def batches() -> Batches:
        sampler = DistributedSampler(range(4), num_replicas=1, rank=0, seed=3)
        return Batches(DataLoader(range(4), batch_size=2, sampler=sampler))  # type: ignore[arg-type]

    whole = [batch.tolist() for batch in islice(batches(), 8)]
    assert whole[:2] != whole[2:4]
    first, second = batches(), batches()
    list(islice(first, taken))
    second.load_state_dict(first.state_dict())
    rest = whole[taken - read_again :]
    assert [batch.tolist() for batch in islice(second, len(rest))] == rest
