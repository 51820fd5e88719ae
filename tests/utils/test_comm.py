import gc
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gloo import run_ranks
from hooktrain.utils import comm

WORLD_SIZE = 4


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def losses_of(rank: int) -> dict[str, Tensor]:
    """The same keys on every rank, in another order on odd ones."""
    losses = {"b": torch.tensor(float(rank)), "a": torch.tensor(rank * 10.0, requires_grad=True)}
    return losses if rank % 2 == 0 else dict(reversed(losses.items()))


def visit(folder: str) -> dict[str, Any]:
    """What one rank sees; the tests below look at it, so that the processes start only once."""
    return {**visit_all_ranks(), **visit_local_groups(), "three groups": visit_three_groups(folder)}


def visit_all_ranks() -> dict[str, Any]:
    rank = comm.get_rank()
    seen: dict[str, Any] = {}
    seen["place"] = (rank, comm.get_world_size(), comm.is_main_process())
    seen["all_gather"] = comm.all_gather({"rank": rank, "text": "x" * rank})
    seen["gather"] = comm.gather(rank * 10)
    seen["gather on 2"] = comm.gather(rank * 10, dst=2)
    seen["gather on 4"] = error_of(comm.gather, rank, dst=4)
    seen["broadcast"] = comm.broadcast(f"from {rank}", src=3)
    values = torch.tensor([1.0, float(rank)], dtype=torch.float64)
    seen["all_reduce"] = comm.all_reduce(values)
    seen["all_reduce in place"] = seen["all_reduce"] is values
    seen["any_rank"] = (comm.any_rank(rank == 3), comm.any_rank(False))
    np.random.seed(rank)
    seen["seed"] = comm.shared_random_seed()

    left, right = dist.new_group([0, 3]), dist.new_group([1, 2])
    group = right if rank in (1, 2) else left
    seen["all_gather in group"] = comm.all_gather(rank, group)
    seen["gather in group"] = comm.gather(rank, dst=2 if rank in (1, 2) else 3, group=group)
    seen["not in group"] = error_of(comm.all_gather, rank, left if rank in (1, 2) else right)

    losses = losses_of(rank)
    seen["mean"] = comm.reduce_dict(losses)
    seen["mean has a gradient"] = seen["mean"]["a"].requires_grad
    seen["sum"] = comm.reduce_dict(losses, average=False)
    seen["mean of integers"] = comm.reduce_dict({"n": torch.tensor(rank)})
    seen["losses are untouched"] = losses["a"].item() == rank * 10 and losses["a"].requires_grad
    comm.synchronize()
    return seen


def visit_local_groups() -> dict[str, Any]:
    rank = comm.get_rank()
    seen: dict[str, Any] = {}
    seen["unknown rank"] = error_of(comm.get_local_rank)
    seen["unknown size"] = error_of(comm.get_local_size)
    seen["unknown group"] = error_of(comm.get_local_process_group)
    os.environ.update(LOCAL_RANK="7", LOCAL_WORLD_SIZE="8")
    seen["torchrun"] = (comm.get_local_rank(), comm.get_local_size())
    seen["does not divide"] = error_of(comm.create_local_process_group, 3)
    seen["zero"] = error_of(comm.create_local_process_group, 0)
    comm.create_local_process_group(2)
    seen["pairs"] = (comm.get_local_rank(), comm.get_local_size())
    seen["in pair"] = comm.all_gather(rank, comm.get_local_process_group())
    comm.create_local_process_group(4)
    seen["replaced"] = (comm.get_local_rank(), comm.get_local_size())
    return seen


def visit_three_groups(folder: str) -> list[Any]:
    """Destroys and initialises the process group again, with the ranks in another order."""
    rank, seen = comm.get_rank(), []
    for i in range(3):
        dist.destroy_process_group()
        gc.collect()
        place = (rank + i) % WORLD_SIZE
        # This name is not "gloo", as is the case with nccl, so objects need a group of their own.
        url = f"file://{folder}/rendezvous{i}"
        dist.init_process_group("cpu:gloo", init_method=url, rank=place, world_size=WORLD_SIZE)
        before = error_of(comm.get_local_process_group)
        comm.create_local_process_group(WORLD_SIZE)
        comm.synchronize()
        gathered = comm.all_gather(rank)
        seen.append((before.split(":")[0], gathered, comm.broadcast(rank), comm.get_local_rank()))
        assert comm._object_groups[dist.group.WORLD] is not dist.group.WORLD
        assert len(comm._object_groups) == len(comm._local_groups) == 1
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(visit, WORLD_SIZE, str(tmp_path_factory.mktemp("comm")))


def test_every_rank_knows_its_place(ranks: list[dict[str, Any]]) -> None:
    assert [r["place"] for r in ranks] == [
        (0, 4, True),
        (1, 4, False),
        (2, 4, False),
        (3, 4, False),
    ]


def test_all_gather_brings_objects_of_any_size_to_every_rank(ranks: list[dict[str, Any]]) -> None:
    expected = [
        {"rank": 0, "text": ""},
        {"rank": 1, "text": "x"},
        {"rank": 2, "text": "xx"},
        {"rank": 3, "text": "xxx"},
    ]
    assert all(r["all_gather"] == expected for r in ranks)


def test_gather_brings_them_to_one_rank_and_an_empty_list_to_the_others(
    ranks: list[dict[str, Any]],
) -> None:
    assert [r["gather"] for r in ranks] == [[0, 10, 20, 30], [], [], []]
    assert [r["gather on 2"] for r in ranks] == [[], [], [0, 10, 20, 30], []]
    assert all(r["gather on 4"].endswith("invalid root rank: 4") for r in ranks)


def test_collectives_keep_to_their_group_whose_ranks_have_the_numbers_of_the_whole_run(
    ranks: list[dict[str, Any]],
) -> None:
    assert [r["all_gather in group"] for r in ranks] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert [r["gather in group"] for r in ranks] == [[], [], [1, 2], [0, 3]]
    message = "ValueError: rank {} is not in the group that was given"
    assert [r["not in group"] for r in ranks] == [message.format(i) for i in range(4)]


def test_sums_flags_seeds_and_objects_of_one_rank_reach_every_rank(
    ranks: list[dict[str, Any]],
) -> None:
    for r in ranks:
        assert torch.equal(r["all_reduce"], torch.tensor([4.0, 6.0], dtype=torch.float64))
        assert r["all_reduce in place"]
        assert r["any_rank"] == (True, False)
        assert r["seed"] == np.random.RandomState(0).randint(2**31)
        assert r["broadcast"] == "from 3"


def test_reduce_dict_averages_or_sums_on_every_rank_whatever_the_order_of_keys(
    ranks: list[dict[str, Any]],
) -> None:
    for i, r in enumerate(ranks):
        assert r["mean"] == {"a": torch.tensor(15.0), "b": torch.tensor(1.5)}
        assert list(r["mean"]) == list(losses_of(i))
        assert r["sum"] == {"a": torch.tensor(60.0), "b": torch.tensor(6.0)}
        assert r["mean of integers"] == {"n": torch.tensor(1.5)}
        assert not r["mean has a gradient"]
        assert r["losses are untouched"]


def test_local_groups_split_the_ranks_into_machines_and_go_before_torchruns(
    ranks: list[dict[str, Any]],
) -> None:
    assert all(r["torchrun"] == (7, 8) for r in ranks)
    assert [r["pairs"] for r in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [r["in pair"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["replaced"] for r in ranks] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_local_place_that_nobody_knows_is_an_error_that_says_what_to_do(
    ranks: list[dict[str, Any]],
) -> None:
    for r in ranks:
        assert r["unknown rank"].startswith("RuntimeError: cannot tell which ranks share")
        assert "launch() or torchrun, or set LOCAL_RANK" in r["unknown rank"]
        assert "set LOCAL_WORLD_SIZE" in r["unknown size"]
        assert "launch()" in r["unknown group"]


def test_local_groups_that_do_not_fit_are_refused_on_every_rank(
    ranks: list[dict[str, Any]],
) -> None:
    for r in ranks:
        assert "world size (4) must be divisible by 'group_size=3'" in r["does not divide"]
        assert "(0) must be positive" in r["zero"]


def test_nothing_outlives_a_process_group_that_was_destroyed(ranks: list[dict[str, Any]]) -> None:
    none = "RuntimeError"  # there was no local group before it was made
    for rank, seen in enumerate(r["three groups"] for r in ranks):
        assert seen == [
            (none, [0, 1, 2, 3], 0, rank),
            (none, [3, 0, 1, 2], 3, (rank + 1) % 4),
            (none, [2, 3, 0, 1], 2, (rank + 2) % 4),
        ]


def test_a_single_process_is_rank_0_of_1() -> None:
    assert (comm.get_rank(), comm.get_world_size(), comm.is_main_process()) == (0, 1, True)
    assert (comm.get_local_rank(), comm.get_local_size()) == (0, 1)


def test_a_process_of_torchrun_knows_its_local_place_before_it_joins_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (comm.get_local_rank(), comm.get_local_size()) == (1, 2)


def test_collectives_of_a_single_process_hand_back_what_they_got() -> None:
    obj = object()
    assert comm.all_gather(obj) == [obj]
    assert comm.gather(obj) == [obj]
    assert comm.broadcast(obj) is obj
    values = torch.ones(2)
    assert comm.all_reduce(values) is values
    assert torch.equal(values, torch.ones(2))
    assert comm.any_rank(True)
    assert not comm.any_rank(False)
    comm.synchronize()
    assert comm.reduce_dict({}) == {}
    reduced = comm.reduce_dict({"loss": torch.tensor(2.0, requires_grad=True)})
    assert reduced == {"loss": torch.tensor(2.0)}
    assert not reduced["loss"].requires_grad


def test_the_shared_seed_of_a_single_process_comes_from_numpys_generator() -> None:
    np.random.seed(5)
    seed = comm.shared_random_seed()
    assert seed == np.random.RandomState(5).randint(2**31)
    assert comm.shared_random_seed() != seed
