import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_dataset import Stream
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from gloo import run_ranks
from hooktrain.data import (
    DatasetFromList,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    ToIterableDataset,
    TrainingSampler,
    TrainLoader,
    build_test_loader,
    build_train_loader,
)


class Noise(Dataset[Tensor]):
    """Each sample: its index, and a number of each global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        numbers = [index, torch.rand(1).item(), np.random.rand(), random.random()]
        return torch.tensor(numbers, dtype=torch.float64)


class Lazy(Sampler[int]):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(6):
            yield int(torch.randint(4, ())) + 4 * np.random.randint(2) + random.randrange(2)


class Counting(Dataset[int]):
    """Notes which samples are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Fragile(Dataset[int]):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if self.how == "raise":
            raise OSError(f"sample {index} cannot be read")
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def make(**kwargs: Any) -> TrainLoader:
    return build_train_loader(Noise(), **{"total_batch_size": 4, "seed": 5, **kwargs})


def take(loader: Any, count: int) -> Tensor:
    return torch.stack(list(islice(loader, count)))


def test_the_stream_is_the_samplers_in_batches() -> None:
    expected = list(islice(TrainingSampler(10, seed=5), 24))
    assert take(make(), 6)[:, :, 0].flatten().tolist() == expected


def test_a_sample_is_augmented_differently_each_time_it_comes() -> None:
    samples = take(make(), 5).flatten(0, 1)
    numbers = samples[samples[:, 0] == samples[0, 0]][:, 1:]
    assert len(numbers) == 2
    assert (numbers[0] != numbers[1]).all()


def disturbed(loader: TrainLoader, count: int) -> Iterator[Tensor]:
    """Batches, between which the global generators are seeded, as trainers do in each step."""
    for batch in islice(loader, count):
        yield batch
        torch.manual_seed(count)
        np.random.seed(count)
        random.seed(count)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [None, Lazy()])
def test_a_loaded_position_continues_bit_for_bit_with_another_number_of_workers(
    workers: int, sampler: Sampler[int] | None
) -> None:
    options: dict[str, Any] = {"sampler": sampler, "collate_fn": draw_and_stack}
    whole = take(make(**options), 9)
    saved = make(num_workers=2 - workers, **options)
    parts = list(disturbed(saved, 4))
    assert saved.state_dict()["batches"] == 4  # handed out, not prefetched
    loaded = make(num_workers=workers, **options)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(torch.stack([*parts, *disturbed(loaded, 5)]), whole)


def test_iterating_again_continues_at_the_position() -> None:
    loader, whole = make(), take(make(), 4)
    assert torch.equal(torch.cat([take(loader, 1), take(loader, 3)]), whole)


def test_skipping_reads_no_sample() -> None:
    dataset = Counting()
    loader = build_train_loader(dataset, total_batch_size=2, seed=0)
    loader.load_state_dict({**loader.state_dict(), "batches": 1_000_000})
    next(iter(loader))
    assert dataset.read == list(islice(TrainingSampler(10, seed=0).stream(2_000_000), 2))


def draw_and_stack(samples: list[Tensor]) -> Tensor:
    return torch.stack([sample + torch.rand(1) + np.random.rand() for sample in samples])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainers_own_random_numbers_are_not_disturbed(workers: int) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    take(make(num_workers=workers, collate_fn=draw_and_stack), 3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "seed=5, but now seed=6"),
        ({"total_batch_size": 2}, "total_batch_size=4, but now total_batch_size=2"),
    ],
)
def test_a_position_in_another_stream_is_refused_with_both_values(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**change).load_state_dict(make().state_dict())


def test_a_position_in_another_data_set_is_refused() -> None:
    state = {**make().state_dict(), "dataset_size": 11}
    with pytest.raises(ValueError, match="dataset_size=11, but now dataset_size=10"):
        make().load_state_dict(state)


@pytest.mark.parametrize(
    ("sampler", "seed"),
    [
        (lambda: None, None),
        (lambda: TrainingSampler(10), None),
        (lambda: TrainingSampler(10), 5),
        (lambda: RandomSubsetTrainingSampler(10, 0.5), None),
        (lambda: RandomSubsetTrainingSampler(10, 0.5, seed_shuffle=3), None),
        (lambda: RepeatFactorTrainingSampler([0.5] * 10), None),
        (lambda: RandomSampler(range(10)), None),
    ],
)
def test_seeds_that_were_drawn_are_replaced_by_the_saved_ones(
    sampler: Callable[[], Any], seed: int | None
) -> None:
    saved = make(seed=seed, sampler=sampler())
    whole = take(saved, 5)
    np.random.seed(77)
    loaded = make(seed=seed, sampler=sampler())
    assert loaded.state_dict() != {**saved.state_dict(), "batches": 0}
    loaded.load_state_dict({**saved.state_dict(), "batches": 2})
    assert loaded.state_dict() == {**saved.state_dict(), "batches": 2}
    assert torch.equal(take(loaded, 3), whole[2:])


def test_a_torch_sampler_is_advanced_and_repeated() -> None:
    loader = make(sampler=SequentialSampler(range(10)))
    assert take(loader, 3)[:, :, 0].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    loaded = make(sampler=SequentialSampler(range(10)))
    loaded.load_state_dict(loader.state_dict())
    assert take(loaded, 1)[0, :, 0].tolist() == [2, 3, 4, 5]


def test_a_long_torch_sampler_gives_each_index_once() -> None:
    sampler = RandomSampler(range(2500))
    batches = build_train_loader(range(2500), total_batch_size=2500, sampler=sampler, seed=0)  # type: ignore[arg-type]
    first, second = (batch.tolist() for batch in islice(batches, 2))
    assert sorted(first) == sorted(second) == list(range(2500))
    assert first != second


def test_an_empty_sampler_is_an_error() -> None:
    with pytest.raises(ValueError, match="sampler is empty"):
        next(iter(make(sampler=SequentialSampler([]))))


def test_a_mapper_and_a_collate_function_are_applied() -> None:
    loader = build_train_loader(
        Counting(), total_batch_size=2, seed=0, mapper=lambda i: i + 100, collate_fn=list
    )
    first = list(islice(TrainingSampler(10, seed=0), 2))
    assert next(iter(loader)) == [i + 100 for i in first]


def test_an_error_in_a_worker_reaches_the_trainer() -> None:
    loader = build_train_loader(Fragile("raise"), total_batch_size=2, seed=0, num_workers=1)
    with pytest.raises(OSError, match="cannot be read"):
        next(iter(loader))


def test_a_killed_worker_is_a_prompt_error() -> None:
    loader = build_train_loader(Fragile("kill"), total_batch_size=2, seed=0, num_workers=1)
    with pytest.raises(RuntimeError, match="worker"):
        next(iter(loader))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="positive multiple of the world size 1, but got 0"):
        make(total_batch_size=0)
    with pytest.raises(TypeError, match="has no len"):
        build_train_loader(Stream(), total_batch_size=1, seed=0)


def test_the_test_loader_reads_each_sample_once() -> None:
    batches = [b.tolist() for b in build_test_loader(Counting(), batch_size=4)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    mapped = build_test_loader(Counting(), mapper=lambda i: 2 * i, num_workers=0)
    assert [int(b) for b in mapped] == list(range(0, 20, 2))


def two_ranks() -> tuple[Tensor, Tensor, str]:
    loader = make(num_workers=1)
    first = take(loader, 2)
    loaded = make()
    loaded.load_state_dict({**loader.state_dict(), "batches": 5})
    try:
        make(total_batch_size=3)
    except ValueError as error:
        return first, take(loaded, 1), str(error)
    return first, take(loaded, 1), "no error"


def test_a_global_batch_is_the_same_set_of_samples_for_any_number_of_ranks() -> None:
    whole = take(make(), 6)
    results = run_ranks(two_ranks, 2)
    for batch in range(2):
        merged = torch.stack([results[0][0][batch], results[1][0][batch]], 1).flatten(0, 1)
        assert torch.equal(merged, whole[batch])
    resumed = torch.stack([results[0][1][0], results[1][1][0]], 1).flatten(0, 1)
    assert torch.equal(resumed, whole[5])
    assert "multiple of the world size 2, but got 3" in results[0][2]


# A saved position is good in the stream that it was saved from, and in no other.

SIZE = 37


def positions(sampler: Sampler[int] | None = None, seed: int | None = None) -> TrainLoader:
    return build_train_loader(range(SIZE), total_batch_size=8, sampler=sampler, seed=seed)  # type: ignore[arg-type]


def indices(loader: TrainLoader, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader, count)]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_given_sampler_with_another_seed_is_refused_with_both_values(seed: int | None) -> None:
    state = positions(TrainingSampler(SIZE, seed=5), seed).state_dict()
    with pytest.raises(ValueError, match=r"seed=5, but now \w*seed=6"):
        positions(TrainingSampler(SIZE, seed=6), seed).load_state_dict(state)


def test_another_random_subset_is_refused_with_both_values() -> None:
    def subset(seed: int) -> Sampler[int]:
        return RandomSubsetTrainingSampler(SIZE, 0.5, seed_shuffle=1, seed_subset=seed)

    state = positions(subset(2)).state_dict()
    positions(subset(2)).load_state_dict(state)
    with pytest.raises(ValueError, match="seed_subset=2, but now seed_subset=3"):
        positions(subset(3)).load_state_dict(state)


def test_a_refused_position_changes_nothing() -> None:
    loader = positions()
    before = loader.state_dict()
    with pytest.raises(ValueError, match="dataset_size=9"):
        loader.load_state_dict({**before, "seed": before["seed"] + 1, "dataset_size": 9})
    assert loader.state_dict() == before


def test_the_state_of_another_kind_of_loader_is_refused() -> None:
    with pytest.raises(ValueError, match="seed=None, but now seed=1"):
        positions(seed=1).load_state_dict({"_num_yielded": 3})


@pytest.mark.parametrize(
    "sampler",
    [lambda: RandomSampler(range(SIZE)), lambda: WeightedRandomSampler([1.0] * SIZE, SIZE)],
    ids=["RandomSampler", "WeightedRandomSampler"],
)
def test_a_random_sampler_of_torch_continues_and_leaves_the_trainers_numbers(
    sampler: Callable[[], Sampler[int]],
) -> None:
    whole = indices(positions(sampler(), seed=1), 11)  # beyond the first epoch and the second
    torch.manual_seed(1234)  # as a resumed process would stand elsewhere
    state = torch.get_rng_state()
    loader = positions(sampler(), seed=1)
    loader.load_state_dict({**loader.state_dict(), "batches": 6})
    assert indices(loader, 5) == whole[6:]
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_drawn_in_a_sample_is_not_what_ordered_the_samples() -> None:
    def draw(_: int) -> list[int]:
        return torch.randperm(SIZE).tolist()

    loader = build_train_loader(
        range(SIZE),  # type: ignore[arg-type]
        total_batch_size=1,
        mapper=draw,
        collate_fn=list,
        seed=7,
    )
    assert next(iter(loader))[0] != TrainingSampler(SIZE, seed=7).epoch_indices(0).tolist()


def first_of_a_spawned_worker() -> Any:
    data = ToIterableDataset(
        DatasetFromList(list(range(100))),
        TrainingSampler(100, shuffle=False, seed=0),
        shard_chunk_size=2,
    )
    # Of rank 1 only: a new interpreter takes seconds.
    spawn = {"num_workers": 1, "multiprocessing_context": "spawn"} if dist.get_rank() == 1 else {}
    return next(iter(DataLoader(data, batch_size=2, **spawn))).tolist()  # type: ignore[arg-type]


def test_workers_that_are_spawned_read_the_share_of_their_rank() -> None:
    assert run_ranks(first_of_a_spawned_worker, 2) == [[0, 2], [1, 3]]
