"""The batches of loaders that are not ours."""

import copy
import logging
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from gloo import run_ranks
from hooktrain.checkpoint.files import load_file, save_file
from hooktrain.data import TrainingSampler, build_train_loader
from hooktrain.data.batches import Batches


class Numbers(IterableDataset[int]):
    """From 0 to 9, shared by the workers."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, 10, worker.num_workers) if worker else range(10))


# Inside of an epoch, at its end, and in the second one.
@pytest.mark.parametrize(("workers", "stops"), [(0, (2, 5, 7)), (2, (2, 6, 7))])
def test_a_stream_of_torchdata_continues_where_it_was(
    workers: int, stops: tuple[int, ...], tmp_path: Path
) -> None:
    def stream() -> Batches:
        return Batches(
            build_train_loader(Numbers(), total_batch_size=2, num_workers=workers)
        )

    whole = [batch.tolist() for batch in islice(stream(), 14)]
    assert sorted(chain.from_iterable(whole[: 6 if workers else 5])) == list(range(10))
    for stop in stops:
        first, second = stream(), stream()
        before = [batch.tolist() for batch in islice(first, stop)]
        save_file(first.state_dict(), tmp_path / "state.pth")
        second.load_state_dict(load_file(tmp_path / "state.pth"))
        after = [batch.tolist() for batch in islice(second, 14 - stop)]
        assert before + after == whole


class Shuffled(IterableDataset[float]):
    """From 0 to 11 in an order of the epoch, shared by the workers, which add random fractions."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        order = TrainingSampler(12, seed=0).epoch_indices(self.epoch).tolist()
        worker = get_worker_info()
        if worker is None:
            return iter(order)
        mine = order[worker.id :: worker.num_workers]
        return (index + float(torch.rand(())) for index in mine)


def read(batches: Batches, count: int) -> list[float]:
    torch.manual_seed(count)  # the seeds of workers are drawn from it
    return torch.cat(list(islice(batches, count))).tolist()


@pytest.mark.parametrize(("workers", "stops"), [(0, (2, 6, 8)), (2, (8,))])
def test_a_stream_that_resumes_twice_in_any_epoch_gives_each_sample_once(
    workers: int, stops: tuple[int, ...]
) -> None:
    def stream(*state: Any) -> Batches:
        loader = build_train_loader(Shuffled(), total_batch_size=2, num_workers=workers)
        batches = Batches(loader)
        for each in state:
            batches.load_state_dict(each)
        batches.state_dict()  # a checkpointer asks for it before the first step
        return batches

    for stop in stops:  # of 6 batches in an epoch
        whole = stream()
        before = read(whole, stop)
        second = stream(whole.state_dict())
        before += read(whole, 2)
        assert read(second, 2) == before[-4:]
        after = read(whole, 10 - stop)
        assert read(stream(second.state_dict()), 10 - stop) == after
        samples = [int(sample) for sample in before + after]
        assert sorted(samples[:12]) == sorted(samples[12:]) == list(range(12))


class Counted(Shuffled):
    """It continues by a state of its own: how many samples of the epoch were read."""

    place = 0

    def __iter__(self) -> Iterator[float]:
        order = TrainingSampler(12, seed=0).epoch_indices(self.epoch).tolist()
        return self._rest(order)

    def _rest(self, order: list[float]) -> Iterator[float]:
        for index in order[self.place :]:
            self.place += 1
            yield index
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


def test_a_stream_with_a_state_goes_on_in_the_order_of_its_epoch() -> None:
    def stream() -> Batches:
        return Batches(build_train_loader(Counted(), total_batch_size=2))

    first, second = stream(), stream()
    assert sorted(read(first, 6)) == list(range(12))
    read(first, 1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.state_dict()  # a checkpointer asks for it before the first step
    assert read(second, 7) == read(first, 7)


@pytest.mark.parametrize("data", [range(10), Numbers()])
def test_a_loaded_position_counts_where_batches_were_read(data: Any) -> None:
    batches = Batches(build_train_loader(data, total_batch_size=2, seed=0))
    state = copy.deepcopy(batches.state_dict())
    first = [batch.tolist() for batch in islice(batches, 3)]
    batches.load_state_dict(state)
    assert [batch.tolist() for batch in islice(batches, 3)] == first


def test_a_list_of_loaders_is_refused_before_the_first_step() -> None:
    ours = build_train_loader(range(10), total_batch_size=2, seed=0)  # type: ignore[arg-type]
    for loader in (ours, DataLoader(range(10))):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ConcatDataset"):
            Batches([loader, loader]).start()


def warnings_of_a_start() -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain.data.batches").addHandler(handler)
    for data in (Numbers(), range(10)):
        batches = Batches(build_train_loader(data, total_batch_size=2, seed=0))
        for _ in range(2):
            batches.state_dict()
    return told


def test_ranks_whose_checkpoint_has_the_main_process_position_say_so_once() -> None:
    for texts in run_ranks(warnings_of_a_start, 2):
        (text,) = texts
        assert "each rank continues" in text


def test_a_single_process_saves_its_position_without_a_warning() -> None:
    assert warnings_of_a_start() == []


class Undivided(IterableDataset[int]):
    """All of it for each worker."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("data", "workers", "count"),
    [(Undivided(), 2, 1), (Numbers(), 2, 0), ([7] * 10, 1, 0), ([7] * 10, 0, 0)],
)
def test_workers_that_read_the_same_are_told_once_how_to_share(
    data: Any, workers: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    batches = Batches(DataLoader(data, 2, num_workers=workers))
    for number in (2, 10):
        assert len(list(islice(batches, number))) == number
        assert caplog.text.count("get_worker_info") == count


def test_a_state_without_a_position_is_told(caplog: pytest.LogCaptureFixture) -> None:
    state = Batches(DataLoader(range(4))).state_dict()  # type: ignore[arg-type]
    batches = Batches(build_train_loader(range(4), total_batch_size=2, seed=0))  # type: ignore[arg-type]
    batches.check_state_dict(state)
    batches.load_state_dict(state)
    assert "starts from the beginning" in caplog.text


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
