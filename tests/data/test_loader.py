import gc
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from test_dataset import Stream
from torch import Tensor
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
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from gloo import run_ranks
from hooktrain.data import (
    InferenceSampler,
    StreamSampler,
    TrainingSampler,
    TrainLoader,
    build_test_loader,
    build_train_loader,
)
from hooktrain.utils import comm
from hooktrain.utils.env import seed_on_host
from toys import Repeated


class Noise(Dataset[Tensor]):
    """Each sample: its index, and a number of each global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        numbers = [index, torch.rand(1).item(), np.random.rand(), random.random()]
        return torch.tensor(numbers, dtype=torch.float64)


class Lazy(Sampler[int]):
    """Draws each index when it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield (
                int(torch.randint(4, ()))
                + 4 * np.random.randint(2)
                + random.randrange(2)
            )


def fail(sample: Tensor) -> Tensor:
    raise OSError("the sample cannot be read")


def die(sample: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return sample


def make(dataset: int = 10, **kwargs: Any) -> TrainLoader:
    return build_train_loader(
        Noise(dataset), **{"total_batch_size": 4, "seed": 5, **kwargs}
    )


def take(loader: Any, count: int) -> Tensor:
    return torch.stack(list(islice(loader, count)))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (None, TrainingSampler(10, seed=5)),
        (TrainingSampler(10, False, 5), [*range(10)] * 3),
        (SequentialSampler(range(10)), [*range(10)] * 3),  # one of torch's is repeated
        ([3, 1, 2], [3, 1, 2] * 8),
    ],
)
def test_the_stream_is_the_samplers_in_batches(
    sampler: Any, expected: Iterable[int]
) -> None:
    samples = take(make(sampler=sampler), 6)[:, :, 0].flatten().tolist()
    assert samples == list(islice(expected, 24))


@pytest.mark.parametrize("size", [999, 1000, 1001, 2500])
def test_a_sampler_of_any_length_is_read_to_its_end_and_again(size: int) -> None:
    data, ordered = range(size), [*range(size)]
    loader: Any = build_train_loader(
        data,  # type: ignore[arg-type]
        total_batch_size=1,
        sampler=SequentialSampler(data),
        seed=5,
    )
    assert take(loader, 2 * size).flatten().tolist() == ordered * 2


def test_a_sampler_draws_other_numbers_in_each_thousand_and_in_each_epoch() -> None:
    def indices(sampler: Sampler[int], count: int) -> Iterator[list[int]]:
        stream = take(make(sampler=sampler), count // 4)[:, :, 0].flatten().tolist()
        return iter((stream[: count // 2], stream[count // 2 :]))

    for sampler in (Lazy(2000), Lazy(1000)):
        first, second = indices(sampler, 2000)
        assert first != second
    first, second = indices(RandomSampler(range(10)), 20)
    assert first != second
    assert sorted(first) == sorted(second) == [*range(10)]


def test_what_is_drawn_in_a_sample_differs_each_time() -> None:
    samples = (
        take(make(mapper=lambda sample: torch.randperm(10)), 5).flatten(0, 1).tolist()
    )
    assert len({tuple(order) for order in samples}) == 20
    assert samples[0] != TrainingSampler(10, seed=5).epoch_indices(0).tolist()


def disturbed(loader: TrainLoader, count: int) -> Iterator[Tensor]:
    """Batches, between which the global generators are seeded, as trainers do in each step."""
    for batch in islice(loader, count):
        yield batch
        torch.manual_seed(count)
        np.random.seed(count)
        random.seed(count)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "sampler",
    [None, Lazy(6), RandomSampler(range(10)), WeightedRandomSampler([1.0] * 10, 7)],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_position_continues_bit_for_bit_with_other_workers(
    workers: int, sampler: Sampler[int] | None
) -> None:
    options: dict[str, Any] = {"sampler": sampler, "collate_fn": draw_and_stack}
    whole = take(make(**options), 9)
    saved = make(num_workers=2 - workers, **options)
    parts = [*disturbed(saved, 1), *disturbed(saved, 3)]  # iterating again goes on
    assert saved.state_dict()["batches"] == 4  # handed out, not prefetched
    loaded = make(num_workers=workers, **options)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(torch.stack([*parts, *disturbed(loaded, 5)]), whole)


def test_skipping_reads_no_sample() -> None:
    read: list[int] = []

    def note(sample: Tensor) -> Tensor:
        read.append(int(sample[0]))
        return sample

    loader = make(total_batch_size=2, mapper=note)
    loader.load_state_dict({**loader.state_dict(), "batches": 1_000_000})
    next(iter(loader))
    assert read == list(islice(TrainingSampler(10, seed=5).stream(2_000_000), 2))


def draw_and_stack(samples: list[Tensor]) -> Tensor:
    return torch.stack(
        [sample + torch.rand(1) + np.random.rand() for sample in samples]
    )


class Rows(TensorDataset):
    """Reads what a TensorDataset reads, and may draw, for all that is known of it."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


def collate_by_chance(samples: list[Tensor]) -> Tensor:
    chosen = samples[random.randrange(4)], samples[np.random.randint(4)]
    return torch.stack(chosen) * torch.rand(())


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_plain_containers_are_those_of_any_data_set(workers: int) -> None:
    data = torch.arange(20.0)
    plain = {"a tensor": data, "a list": [*data], "a part": Subset(data, range(20))}  # type: ignore[arg-type]
    options = {"total_batch_size": 4, "seed": 5, "collate_fn": collate_by_chance}
    wanted = take(build_train_loader(Rows(data), **options), 12)  # type: ignore[arg-type]
    for name, dataset in plain.items():
        loader: Any = build_train_loader(dataset, **options, num_workers=workers)  # type: ignore[arg-type]
        assert torch.equal(take(loader, 12), wanted), name


@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainers_own_random_numbers_are_not_disturbed(workers: int) -> None:
    samplers = (None, RandomSampler(range(10)))  # torch's draws from torch's generator
    for sampler in samplers:
        np.random.rand()  # in the middle of what numpy draws at once
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        take(make(num_workers=workers, collate_fn=draw_and_stack, sampler=sampler), 3)
        assert torch.equal(torch.get_rng_state(), states[0])
        for before, after in zip(states[1], np.random.get_state(), strict=True):
            assert np.array_equal(before, after)
        assert random.getstate() == states[2]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"seed": 6}, "seed=5.*seed=6"),
        ({}, {"total_batch_size": 2}, "batch_size=4.*batch_size=2"),
        (
            {"sampler": TrainingSampler(10, seed=5), "seed": None},
            {"sampler": TrainingSampler(10, seed=6), "seed": None},
            "seed=5.*seed=6",
        ),
        ({"seed": None}, {"seed": None, "dataset": 9}, "size=10.*size=9"),
        ({"state": {"_num_yielded": 3}}, {}, "seed=None.*seed=5"),
    ],
)
def test_a_position_in_another_stream_is_refused(
    before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    state = before["state"] if "state" in before else make(**before).state_dict()
    loader = make(**{"sampler": None, **after})
    unchanged = loader.state_dict()
    for method in (loader.check_state_dict, loader.load_state_dict):
        with pytest.raises(ValueError, match=message):
            method(state)
        assert loader.state_dict() == unchanged


@pytest.mark.parametrize(
    "change",
    [
        {"total_batch_size": 2},
        {"sampler": RandomSampler(range(10))},
        {"dataset": range(9)},
        {"batch_size": 2},
    ],
)
def test_what_a_running_iterator_would_not_notice_is_refused(
    change: dict[str, Any],
) -> None:
    loader = make()
    next(iter(loader))
    before = {**vars(loader)}
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"{name} of a loader.*trainer.data_loader"):
        setattr(loader, name, value)
    assert vars(loader) == before
    loader.name = "train"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sampler", "seed"),
    [
        (lambda: None, None),
        (lambda: TrainingSampler(10), None),
        (lambda: Repeated(10, most=1), None),
        (lambda: RandomSampler(range(10)), None),
    ],
)
def test_seeds_are_drawn_as_torch_is_seeded_and_replaced_by_the_saved_ones(
    sampler: Callable[[], Any], seed: int | None
) -> None:
    saved = make(seed=seed, sampler=sampler())
    whole = take(saved, 5)
    torch.manual_seed(0)
    again = make(seed=seed, sampler=sampler())
    assert again.state_dict() == {**saved.state_dict(), "batches": 0}
    loaded = make(seed=seed, sampler=sampler())
    assert loaded.state_dict() != again.state_dict()
    loaded.load_state_dict({**saved.state_dict(), "batches": 2})
    assert loaded.state_dict() == {**saved.state_dict(), "batches": 2}
    assert torch.equal(take(loaded, 3), whole[2:])


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [(fail, OSError, "cannot be read"), (die, RuntimeError, "worker")],
)
def test_a_worker_that_fails_or_is_killed_is_a_prompt_error(
    how: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = iter(make(mapper=how, num_workers=1))
    with pytest.raises(error, match=message) as caught:
        next(batches)
    # So long torch waits for a worker that has failed.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    del caught, batches
    gc.collect()


X, Y = torch.zeros(8, 3), torch.zeros(8)


@pytest.mark.parametrize(
    "wrong", [(X, Y), {"x": X, "y": Y}, zip(X, Y, strict=True), None, DataLoader([X])]
)
def test_what_is_no_data_set_is_refused(wrong: Any) -> None:
    for build in (build_train_loader, build_test_loader):
        options = {"total_batch_size": 2} if build is build_train_loader else {}
        with pytest.raises(TypeError, match=r"TensorDataset\(X, y\).*but got"):
            build(wrong, **options)
    assert len(build_train_loader(TensorDataset(X, Y), total_batch_size=2)) == 4


def test_an_epoch_may_be_one_batch_which_is_full_whatever_drop_last_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for drop_last in (True, False):
        loader: Any = build_train_loader(
            range(10),  # type: ignore[arg-type]
            total_batch_size=10,
            shuffle=False,
            drop_last=drop_last,
        )
        assert take(loader, 2).tolist() == [[*range(10)]] * 2
    assert caplog.messages == []


def test_what_makes_batches_another_way_is_refused_with_the_way_to_go() -> None:
    data: Any = range(8)
    batches: Any = BatchSampler(SequentialSampler(data), 2, drop_last=True)
    with pytest.raises(TypeError, match=r"single indices.*BatchSampler"):
        build_train_loader(data, total_batch_size=2, sampler=batches)
    with pytest.raises(TypeError, match=r"single indices.*\[\[0, 1\]\]"):
        build_train_loader(data, total_batch_size=2, batch_sampler=[[0, 1]])
    with pytest.raises(ValueError, match=r"total_batch_size must be .* 1, but got 0"):
        build_train_loader(data, total_batch_size=0)
    with pytest.raises(ValueError, match=r"seed=5.*6"):
        make(sampler=TrainingSampler(10, seed=6))
    with pytest.raises(TypeError, match="'transform'") as error:
        build_train_loader(data, total_batch_size=2, transform=abs)
    assert "mapper is a function of each sample" in str(notes(error.value))


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_the_test_loader_reads_each_sample_once() -> None:
    data = list(range(10))
    batches = [batch.tolist() for batch in build_test_loader(data, batch_size=4)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    mapped = build_test_loader(data, mapper=lambda i: 2 * i)
    assert [int(batch) for batch in mapped] == list(range(0, 20, 2))
    chosen: Any = build_test_loader(data, sampler=[7, 2])  # type: ignore[arg-type]
    assert [int(batch) for batch in chosen] == [7, 2]


def two_ranks() -> tuple[Tensor, Tensor, list[int], str]:
    loader = make(num_workers=1)
    first = take(loader, 2)
    loaded = make()
    loaded.load_state_dict({**loader.state_dict(), "batches": 5})
    torchs = make(sampler=DistributedSampler(range(10), shuffle=False))
    torchs.batches = 1
    error = ""
    try:
        make(total_batch_size=3)
    except ValueError as refused:
        error = str(refused)
    return first, take(loaded, 1), take(torchs, 1)[0, :, 0].tolist(), error


def test_a_global_batch_is_the_same_set_of_samples_for_any_number_of_ranks() -> None:
    whole = take(make(), 6)
    results = run_ranks(two_ranks, 2)
    for batch in range(2):
        merged = torch.stack([results[0][0][batch], results[1][0][batch]], 1).flatten(
            0, 1
        )
        assert torch.equal(merged, whole[batch])
    resumed = torch.stack([results[0][1][0], results[1][1][0]], 1).flatten(0, 1)
    assert torch.equal(resumed, whole[5])
    assert [result[2] for result in results] == [
        [4, 6],
        [5, 7],
    ]  # torch's divides by itself
    assert "a positive multiple of 2, the ranks, but got 3" in results[0][3]


PLAIN = [
    lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 5, 11),
    lambda: SubsetRandomSampler([*range(1, 14, 2)]),
    lambda: RandomSampler(range(15), replacement=True, num_samples=9),
    lambda: SequentialSampler(range(15)),
    lambda: type("Named", (WeightedRandomSampler,), {})([1.0] * 15, 15),
]


def of_plain_samplers() -> list[tuple[Tensor, Tensor]]:
    results = []
    for sampler in PLAIN:
        loader = make(15, sampler=sampler())
        batches = take(loader, 6)
        resumed = make(15, sampler=sampler())
        resumed.batches = 5
        results.append((batches, take(resumed, 1)))
    return results


def test_torchs_samplers_of_one_process_are_divided_among_the_ranks() -> None:
    first, second = run_ranks(of_plain_samplers, 2)
    for whole, *parts in zip(of_plain_samplers(), first, second, strict=True):
        batches, resumed = (torch.stack(each, 2) for each in zip(*parts, strict=True))
        assert torch.equal(batches.flatten(1, 2), whole[0])
        assert torch.equal(resumed.flatten(1, 2), whole[0][5:])


class Doubled(StreamSampler):
    """Each sample twice in an epoch."""

    def epoch_indices(self, epoch: int) -> Tensor:
        return torch.arange(20) % 10


def lengths_of_epochs() -> list[int]:
    samplers = [
        None,
        Doubled(5),
        SubsetRandomSampler(range(6)),
        WeightedRandomSampler([1.0] * 10, 30),
        DistributedSampler(range(12), comm.get_world_size(), comm.get_rank()),
        Lazy(10),  # has no length
    ]
    return [len(make(sampler=sampler)) for sampler in samplers]


def test_an_epoch_is_as_long_as_its_sampler_on_any_number_of_ranks() -> None:
    assert lengths_of_epochs() == [3, 5, 2, 8, 3, 3]
    assert run_ranks(lengths_of_epochs, 2) == [[3, 5, 2, 8, 3, 3]] * 2


def pairs_of_ranks() -> tuple[Tensor, list[int], list[int]]:
    comm.set_data_part(comm.get_rank() // 2, 2)
    batch = take(make(), 1)[0]
    return batch, list(InferenceSampler(5)), [*islice(TrainingSampler(9, False), 2)]


def test_ranks_that_compute_one_batch_together_read_the_same() -> None:
    results = run_ranks(pairs_of_ranks, 4)
    batches = [result[0] for result in results]
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[2], batches[3])
    merged = torch.stack([batches[0], batches[2]], 1).flatten(0, 1)
    assert torch.equal(merged, take(make(), 1)[0])
    assert [result[1] for result in results] == [[0, 1, 2]] * 2 + [[3, 4]] * 2
    assert [result[2] for result in results] == [[0, 2]] * 2 + [[1, 3]] * 2


def test_a_stream_is_read_in_its_own_order() -> None:
    loader = build_train_loader(Stream(), total_batch_size=2, drop_last=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def batch_of_a_stream() -> list[int]:
    return next(iter(build_train_loader(Stream(), total_batch_size=4))).tolist()


def test_ranks_share_a_batch_of_streams() -> None:
    assert batch_of_a_stream() == [0, 1, 2, 3]
    assert run_ranks(batch_of_a_stream, 2) == [[0, 1]] * 2


class Jumping(IterableDataset[Tensor]):
    """As in docs/guide/data.md; a number of each generator in each sample."""

    place = 0

    def __iter__(self) -> Iterator[Tensor]:
        noise = Noise(0)
        worker = get_worker_info()
        assert worker is not None
        while self.place < 100:
            seed_on_host(self.place, worker.seed)
            self.place += 1
            yield noise[2 * self.place + worker.id]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_what_a_stream_draws_in_workers_is_the_same_after_a_resume() -> None:
    def stream() -> Any:
        return StatefulDataLoader(Jumping(), 2, num_workers=2)

    first = stream()
    read = iter(first)
    for _ in range(3):
        next(read)
    second = stream()
    second.load_state_dict(first.state_dict())
    assert torch.equal(take(second, 4), take(read, 4))


def flip(_: Any) -> list[int]:
    return [int(torch.randint(2, ())), np.random.randint(2), random.getrandbits(1)]


def test_bits_of_generators_in_neighbouring_samples_are_uncorrelated() -> None:
    loader = build_train_loader(range(10), total_batch_size=1, mapper=flip, seed=0)  # type: ignore[arg-type]
    columns = np.array(list(islice(iter(loader), 2001)))[:, :, 0].T
    found = np.corrcoef(np.vstack([columns[:, 1:], columns[:, :-1]]))
    np.fill_diagonal(found, 0)
    assert np.abs(found).max() < 5 / np.sqrt(2000)


def tell(worker_id: int) -> None:
    os.environ["TOLD"] = str(10 + worker_id)


def test_options_of_the_workers_reach_them() -> None:
    told = make(
        mapper=lambda _: int(os.environ["TOLD"]),
        num_workers=2,
        worker_init_fn=tell,
        persistent_workers=True,
        prefetch_factor=1,
    )
    assert take(told, 3)[:, 0].tolist() == [10, 11, 10]


def test_without_shuffling_the_samples_come_in_the_order_of_the_data_set() -> None:
    data: Any = range(6)
    loader = build_train_loader(data, total_batch_size=3, seed=0, shuffle=False)
    first = [batch.tolist() for batch in islice(loader, 3)]
    assert first == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("count", [3, 11])
def test_weights_that_are_not_one_for_each_sample_are_refused(count: int) -> None:
    sampler = WeightedRandomSampler([1.0] * count, 10)
    with pytest.raises(ValueError, match=f"each of the 10 samples, not {count}"):
        build_train_loader(range(10), total_batch_size=2, sampler=sampler)  # type: ignore[arg-type]
