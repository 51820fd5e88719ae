"""A saved position is good in the stream that it was saved from, and in no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from gloo import run_ranks
from hooktrain.data import (
    DatasetFromList,
    RandomSubsetTrainingSampler,
    ToIterableDataset,
    TrainingSampler,
    TrainLoader,
    build_train_loader,
)

SIZE = 37


def make(sampler: Sampler[int] | None = None, seed: int | None = None) -> TrainLoader:
    return build_train_loader(range(SIZE), total_batch_size=8, sampler=sampler, seed=seed)  # type: ignore[arg-type]


def take(loader: TrainLoader, count: int) -> list[list[int]]:
    batches = iter(loader)
    return [next(batches).tolist() for _ in range(count)]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_given_sampler_with_another_seed_is_refused_with_both_values(seed: int | None) -> None:
    state = make(TrainingSampler(SIZE, seed=5), seed).state_dict()
    with pytest.raises(ValueError, match=r"seed=5, but now \w*seed=6"):
        make(TrainingSampler(SIZE, seed=6), seed).load_state_dict(state)


def test_another_random_subset_is_refused_with_both_values() -> None:
    def subset(seed: int) -> Sampler[int]:
        return RandomSubsetTrainingSampler(SIZE, 0.5, seed_shuffle=1, seed_subset=seed)

    state = make(subset(2)).state_dict()
    make(subset(2)).load_state_dict(state)
    with pytest.raises(ValueError, match="seed_subset=2, but now seed_subset=3"):
        make(subset(3)).load_state_dict(state)


def test_a_refused_position_changes_nothing() -> None:
    loader = make()
    before = loader.state_dict()
    with pytest.raises(ValueError, match="dataset_size=9"):
        loader.load_state_dict({**before, "seed": before["seed"] + 1, "dataset_size": 9})
    assert loader.state_dict() == before


def test_the_state_of_another_kind_of_loader_is_refused_by_the_names_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"batches.*_num_yielded"):
        make(seed=1).load_state_dict({"_num_yielded": 3})


@pytest.mark.parametrize(
    "sampler",
    [lambda: RandomSampler(range(SIZE)), lambda: WeightedRandomSampler([1.0] * SIZE, SIZE)],
    ids=["RandomSampler", "WeightedRandomSampler"],
)
def test_a_random_sampler_of_torch_continues_and_leaves_the_trainers_numbers(
    sampler: Callable[[], Sampler[int]],
) -> None:
    whole = take(make(sampler(), seed=1), 11)  # beyond the first epoch and the second
    torch.manual_seed(1234)  # as a resumed process would stand elsewhere
    state = torch.get_rng_state()
    loader = make(sampler(), seed=1)
    loader.load_state_dict({**loader.state_dict(), "batches": 6})
    assert take(loader, 5) == whole[6:]
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
    batches = iter(DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn"))
    return next(batches).tolist()


def test_workers_that_are_spawned_read_the_share_of_their_rank() -> None:
    assert run_ranks(first_of_a_spawned_worker, 2) == [[0, 2], [1, 3]]
