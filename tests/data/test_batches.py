"""The batches of loaders that are not ours."""

import copy
import logging
import os
import random
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from gloo import run_ranks
from hooktrain.checkpoint.files import load_file, save_file
from hooktrain.data import TrainingSampler, build_test_loader, build_train_loader
from hooktrain.data.batches import (
    Batches,
    warn_about_equal_batches,
    warn_about_equal_samples,
)
from hooktrain.utils import comm
from hooktrain.utils.env import seed_on_host


class Placed(IterableDataset[Any]):
    """A stream that continues where it was: each reader counts what it has read of the epoch."""

    epoch = 0
    place = 0

    def order(self) -> list[int]:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        worker = get_worker_info()
        mine = self.order()
        if worker is not None:
            mine = mine[worker.id :: worker.num_workers]
        for number in mine[self.place :]:
            self.place += 1
            yield self.sample(number)
        self.place = 0

    def sample(self, number: int) -> float:
        return number

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


class Numbers(Placed):
    """From 0 to 9."""

    def order(self) -> list[int]:
        return list(range(10))


def test_another_iterator_of_a_loader_does_not_move_the_position(
    tmp_path: Path,
) -> None:
    def loader() -> Any:
        return build_train_loader(torch.arange(100.0), total_batch_size=4, seed=3)

    whole = torch.stack(list(islice(Batches(loader()), 6)))
    read = loader()
    batches = Batches(read)
    for i in range(3):
        # Before the first batch and between two, as a hook may do.
        assert torch.equal(next(iter(read)), whole[i])
        assert torch.equal(next(batches), whole[i])
        list(islice(read, 5))
    save_file(batches.state_dict(), tmp_path / "state.pth")
    resumed = loader()
    batches = Batches(resumed)
    batches.load_state_dict(load_file(tmp_path / "state.pth"))
    assert torch.equal(next(iter(resumed)), whole[3])
    assert torch.equal(torch.stack(list(islice(batches, 3))), whole[3:])
    assert batches.state_dict()["loader"]["batches"] == 6


# Inside of an epoch, at its end, and in the second one.
@pytest.mark.parametrize(("workers", "stops"), [(0, (2, 5, 7)), (2, (2, 6, 7))])
def test_a_stream_of_torchdata_continues_where_it_was(
    workers: int, stops: tuple[int, ...], tmp_path: Path
) -> None:
    def stream() -> Batches:
        return Batches(StatefulDataLoader(Numbers(), 2, num_workers=workers))

    whole = [batch.tolist() for batch in islice(stream(), 14)]
    assert sorted(chain.from_iterable(whole[: 6 if workers else 5])) == list(range(10))
    for stop in stops:
        first, second = stream(), stream()
        before = [batch.tolist() for batch in islice(first, stop)]
        save_file(first.state_dict(), tmp_path / "state.pth")
        second.load_state_dict(load_file(tmp_path / "state.pth"))
        after = [batch.tolist() for batch in islice(second, 14 - stop)]
        assert before + after == whole


class Shuffled(Placed):
    """From 0 to 11, in an order of the epoch; workers add random fractions."""

    def order(self) -> list[int]:
        order: Any = TrainingSampler(12, seed=0).epoch_indices(self.epoch)
        return order.tolist()  # type: ignore[no-any-return]

    def sample(self, number: int) -> float:
        worker = get_worker_info()
        if worker is None:
            return number
        seed_on_host(self.place, worker.seed)
        return number + float(torch.rand(()))


def read(batches: Batches, count: int) -> list[float]:
    torch.manual_seed(count)  # the seeds of workers are drawn from it
    return torch.cat(list(islice(batches, count))).tolist()


@pytest.mark.parametrize(("workers", "stops"), [(0, (2, 6, 8)), (2, (8,))])
def test_a_stream_that_resumes_twice_in_any_epoch_gives_each_sample_once(
    workers: int, stops: tuple[int, ...]
) -> None:
    def stream(*state: Any) -> Batches:
        batches = Batches(StatefulDataLoader(Shuffled(), 2, num_workers=workers))
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


class WithoutState(IterableDataset[int]):
    """All of it for each worker."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_stream_without_a_state_is_refused_in_a_loader_that_saves_it() -> None:
    batches = Batches(StatefulDataLoader(WithoutState(), 2))
    for use in (batches.start, batches.state_dict):
        with pytest.raises(TypeError, match=r"state_dict\(\) of WithoutState"):
            use()
    assert next(Batches(DataLoader(WithoutState(), 2))).tolist() == [0, 1]


def loaders_with_a_position() -> list[Any]:
    data: Any = range(10)
    ours = build_train_loader(data, total_batch_size=2, seed=0)
    return [ours, StatefulDataLoader(Numbers(), 2)]


@pytest.mark.parametrize("loader", loaders_with_a_position(), ids=["ours", "torchdata"])
def test_a_loaded_position_counts_where_batches_were_read(loader: Any) -> None:
    batches = Batches(loader)
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
    for loader in loaders_with_a_position():
        batches = Batches(loader)
        for _ in range(2):
            batches.state_dict()
    return told


def test_ranks_whose_checkpoint_has_the_main_process_position_say_so_once() -> None:
    for texts in run_ranks(warnings_of_a_start, 2):
        (text,) = texts
        assert "all ranks continue" in text


def test_a_single_process_saves_its_position_without_a_warning() -> None:
    assert warnings_of_a_start() == []


def texts_by(warn: Callable[[Any], None], given: Any) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hooktrain.data.batches")
    logger.addHandler(handler)
    warn(given)
    logger.removeHandler(handler)
    return told


def told_of_equal_batches(*loaders: Any) -> list[int]:
    return [
        len(texts_by(warn_about_equal_batches, after_three(each))) for each in loaders
    ]


def after_three(loader: Any) -> Batches:
    batches = Batches(loader)
    assert len(list(islice(batches, 3))) == 3
    return batches


class Words(IterableDataset[Any]):
    def __init__(self, word: Any) -> None:
        self.word = word

    def __iter__(self) -> Iterator[Any]:
        yield from [self.word] * 4


class Whole(Sampler[int]):
    """Gives all indices on each rank."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size).tolist()


def loaders_of_streams() -> list[int]:
    data: Any = range(40)
    rank, size = comm.get_rank(), comm.get_world_size()
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    return told_of_equal_batches(
        DataLoader(WithoutState(), 2, num_workers=2),
        DataLoader(WithoutState(), 2),
        DataLoader(Numbers(), 2, num_workers=2),
        DataLoader(data, 2, sampler=sampler, num_workers=1),
        DataLoader([7] * 10, 2),  # type: ignore[arg-type]
        build_train_loader(data, total_batch_size=2),
        [torch.zeros(2)] * 4,
        DataLoader(Words("a"), batch_size=None, num_workers=2),
        DataLoader(Words(torch.eye(2).to_sparse()), batch_size=None),
        build_train_loader(data, total_batch_size=2, sampler=list(data)),  # type: ignore[arg-type]
        build_train_loader(data, total_batch_size=2, sampler=Whole(40)),
        build_train_loader(data, total_batch_size=2, sampler=sampler),
        build_train_loader(data, total_batch_size=2, sampler=RandomSampler(data)),
    )


def in_one_part() -> list[int]:
    comm.set_data_part(0, 1)
    return told_of_equal_batches(DataLoader(WithoutState(), 2))


def test_ranks_and_workers_that_read_the_same_are_told_how_to_share() -> None:
    assert loaders_of_streams() == [1] + [0] * 12
    # Two ranks that each read all of it; the numbers too are the same on both.
    assert (
        run_ranks(loaders_of_streams, 2)
        == [[1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0]] * 2
    )
    assert run_ranks(in_one_part, 2) == [[0], [0]]


class Epochs(Dataset[int]):
    epoch = 0

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


class Wrapped(Sampler[int]):
    """A sampler around another one, as of those that repeat or filter indices."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


class OwnOrder(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2, 0])


@pytest.mark.parametrize(
    ("loader", "is_told"),
    [
        (DataLoader(range(4)), True),
        (DataLoader(range(4), batch_size=None), True),
        (build_test_loader(range(4)), True),
        (DataLoader(range(4), shuffle=True), False),
        (DataLoader(range(4), sampler=OwnOrder()), False),
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 1, 0)), False),
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 1, 0, False)), True),
        (DataLoader(Numbers()), False),
        (build_train_loader(range(4), total_batch_size=2, shuffle=False), False),
        ([torch.ones(1)], False),
    ],
)
def test_training_data_that_are_never_shuffled_are_told(
    loader: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    warn_about_equal_samples(loader)
    assert ["shuffle=True" in text for text in caplog.messages] == [True] * is_told


def test_set_epoch_reaches_what_others_wrap() -> None:
    sampler = DistributedSampler(range(4), 1, 0, shuffle=True)  # type: ignore[arg-type]
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders += [*sampler]
    loaders: list[Any] = [
        DataLoader(range(4), 1, sampler=Wrapped(sampler)),  # type: ignore[arg-type]
        DataLoader(
            range(4),  # type: ignore[arg-type]
            batch_sampler=BatchSampler(Wrapped(Wrapped(sampler)), 1, False),
        ),
        build_train_loader(
            range(4),  # type: ignore[arg-type]
            total_batch_size=1,
            sampler=Wrapped(sampler),
            seed=0,
        ),
    ]
    for loader in loaders:
        sampler.set_epoch(0)
        assert [int(batch) for batch in islice(Batches(loader), 12)] == orders
    inner = Subset(Subset(Epochs(), [0, 1]), [0])
    loader = DataLoader(inner, 1, num_workers=1, persistent_workers=True)
    assert [int(batch) for batch in islice(Batches(loader), 3)] == [0, 1, 2]


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_set_epoch_of_a_data_set_reaches_its_workers(
    workers: int, persistent: bool
) -> None:
    loader = DataLoader(Epochs(), 2, num_workers=workers, persistent_workers=persistent)
    epochs = [batch.tolist() for batch in islice(Batches(loader), 6)]
    assert epochs == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]


def test_a_data_set_that_waits_for_epochs_is_told_that_the_stream_has_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"total_batch_size": 2, "seed": 0}
    for mapper in (None, str):
        Batches(build_train_loader(Epochs(), mapper=mapper, **options))  # type: ignore[arg-type]
    Batches(build_train_loader([1, 2], **options))  # type: ignore[arg-type]
    Batches(DataLoader(Epochs(), 2))
    assert len(caplog.messages) == 2
    assert "Epochs.set_epoch() is not called" in caplog.text


def test_persistent_workers_of_a_data_set_without_epochs_go_on() -> None:
    loader = DataLoader(Pids(), 1, num_workers=1, persistent_workers=True)
    assert len({int(batch) for batch in islice(Batches(loader), 6)}) == 1


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def told_of_equal_samples(*loaders: Any) -> list[list[str]]:
    return [texts_by(warn_about_equal_samples, loader) for loader in loaders]


class Backwards(Sampler[int]):
    """Whether it divides the data is not known."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7 - comm.get_rank(), -1, -comm.get_world_size()))


def told_of_ranks() -> list[list[str]]:
    data: Any = range(8)
    divided = DistributedSampler(data, comm.get_world_size(), comm.get_rank())
    batches = BatchSampler(divided, 2, drop_last=False)
    return told_of_equal_samples(
        DataLoader(data),
        DataLoader(data, shuffle=True),
        DataLoader(data, batch_size=None),
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, True)),
        DataLoader(data, sampler=RandomSampler(data, replacement=True)),
        # These are right.
        DataLoader(data, sampler=divided),
        DataLoader(data, sampler=Backwards()),
        build_train_loader(data, total_batch_size=2, sampler=Backwards()),
        DataLoader(data, sampler=[0, 1]),
        DataLoader(data, batch_sampler=batches),
        DataLoader(data, batch_sampler=[[0, 1], [2]]),
        DataLoader(Numbers()),
        build_train_loader(data, total_batch_size=2),
        build_train_loader(data, total_batch_size=2, sampler=SequentialSampler(data)),
        build_train_loader(data, total_batch_size=2, sampler=divided),
        [[0], [1]],
    )


def test_ranks_that_read_the_same_are_told() -> None:
    for told in run_ranks(told_of_ranks, 2):
        are_told = ["DistributedSampler" in "".join(each) for each in told]
        assert are_told == [True] * 5 + [False] * 11
    assert not any(told_of_ranks())


class Noisy(Epochs):
    """Has a generator of its own, and may use it."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __getitem__(self, index: int) -> Any:
        return self.generator.random()


class Unused(Noisy):
    def __getitem__(self, index: int) -> Any:
        return index


class NoisyStream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.rng.random()


def test_workers_with_copies_of_one_generator_are_told() -> None:
    kinds = [np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]
    noisy = [Noisy(kind) for kind in (*kinds, torch.Generator())]
    loaders = [DataLoader(data, num_workers=2) for data in (*noisy, NoisyStream())]
    ours: Any = build_train_loader(
        noisy[0], mapper=str, total_batch_size=2, num_workers=2
    )
    for told in told_of_equal_samples(*loaders, ours):
        assert len(told) == 1
        assert re.search(r"Noisy(Stream)?\.(generator|rng) ", told[0])
    right: list[Any] = [
        DataLoader(noisy[0]),
        DataLoader(noisy[0], num_workers=1),
        DataLoader(noisy[0], num_workers=2, worker_init_fn=print),
        DataLoader(Unused(kinds[0]), num_workers=2),
        DataLoader(Noisy(None), num_workers=2),
        build_train_loader(noisy[0], total_batch_size=2),
    ]
    assert not any(told_of_equal_samples(*right))


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, sample: Any) -> Any:
        return sample + self.rng.random()


class Transformed(Epochs):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


def test_workers_with_copies_of_the_generator_of_a_transform_are_told() -> None:
    ours: Any = build_train_loader(
        Transformed(abs), mapper=Jitter(), total_batch_size=2, num_workers=2
    )
    loaders = [DataLoader(Transformed(Jitter()), num_workers=2), ours]
    [of_dataset], [of_mapper] = told_of_equal_samples(*loaders)
    assert "Transformed.transform" in of_dataset
    assert "MapDataset.map_func" in of_mapper
    inside = Transformed(abs)
    subset = Subset(Unused(random.Random(0)), [0, 1])
    for right in (inside, subset):
        [told] = told_of_equal_samples(DataLoader(right, num_workers=2))
        assert told == []


class Closing(Dataset[Any]):
    is_strong = True

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return float(self.is_strong)


@pytest.mark.parametrize(
    ("workers", "changes", "names"),
    [
        (1, {"is_strong": False}, ["is_strong"]),
        (1, {"transform": abs}, ["transform"]),
        (1, {}, []),
        (0, {"is_strong": False}, []),
    ],
)
def test_a_data_set_that_changes_after_its_workers_started_is_told_once(
    workers: int,
    changes: dict[str, Any],
    names: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    data = Closing()
    loader = build_train_loader(data, total_batch_size=2, seed=0, num_workers=workers)
    found = Batches(loader)
    next(found)
    found.log_stale_copies()
    assert caplog.messages == []
    vars(data).update(changes)
    for _ in range(2):
        found.log_stale_copies()
    assert [text.split()[0] for text in caplog.messages] == names


def test_a_state_without_a_position_is_told(caplog: pytest.LogCaptureFixture) -> None:
    state = Batches(DataLoader(range(4))).state_dict()  # type: ignore[arg-type]
    batches = Batches(build_train_loader(range(4), total_batch_size=2, seed=0))  # type: ignore[arg-type]
    batches.check_state_dict(state)
    batches.load_state_dict(state)
    assert "starts from the beginning" in caplog.text


def test_a_stream_that_begins_anew_is_told_what_would_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = build_train_loader(WithoutState(), total_batch_size=2, drop_last=True)
    stream = Batches(loader)
    assert len(list(islice(stream, 2))) == 2
    stream.load_state_dict(stream.state_dict())
    assert "StatefulDataLoader" in caplog.text
    assert next(stream).tolist() == [0, 1]


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
