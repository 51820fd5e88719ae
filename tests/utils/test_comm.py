import gc
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gloo import run_ranks
from hooktrain.utils import comm, timer
from processes import CONTEXT, as_on_its_own

WORLD_SIZE = 4


def exchange() -> None:
    rank = comm.get_rank()
    assert (comm.get_world_size(), comm.is_main_process()) == (4, rank == 0)
    everybody = [{"rank": r, "text": "x" * r} for r in range(4)]
    assert comm.all_gather(everybody[rank]) == everybody
    assert comm.broadcast(f"from {rank}", src=3) == "from 3"
    values = torch.tensor([1.0, float(rank)], dtype=torch.float64)
    assert comm.all_reduce(values) is values
    assert values.tolist() == [4.0, 6.0]
    assert comm.any_rank(rank == 3)
    assert not comm.any_rank(False)
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(0)
    expected = int(torch.randint(2**31, (), generator=generator))
    assert comm.shared_random_seed() == expected
    comm.synchronize()

    # Groups are given by the ranks of the whole run.
    groups = {members: dist.new_group(members) for members in ((0, 3), (1, 2))}
    for members, group in groups.items():
        if rank in members:
            assert comm.all_gather(rank, group) == [*members]


def test_collectives_reach_the_ranks_of_the_run_or_a_group() -> None:
    run_ranks(exchange, WORLD_SIZE)


def meet_at_two_places() -> None:
    comm.meet("the end")
    if comm.get_rank() == 0:
        comm.all_gather([1, 2])
    else:
        comm.meet("the end")


def test_a_rank_that_is_elsewhere_than_the_others_is_refused() -> None:
    others = r"this rank is at the end, .* data: \[\[1, 2\], 'the end'\]"
    with pytest.raises(RuntimeError, match=others):
        run_ranks(meet_at_two_places, 2)


def take_maxima_and_sums() -> list[list[float]]:
    rank = comm.get_rank()
    values = [rank, -rank, 10.0**rank, 0.1, 1e16 if rank == 1 else 1.0]
    found = []
    for maxima, broken in ((2, 0.0), (0, 0.0), (5, 0.0), (1, math.nan)):
        numbers = torch.tensor(values, dtype=torch.float64)
        if rank == 2:
            numbers += broken
        comm.max_and_sum(numbers, maxima)
        found.append(numbers.tolist())
    return found


def test_maxima_and_sums_are_the_same_on_all_ranks() -> None:
    first, *others = run_ranks(take_maxima_and_sums, 5)
    # Added in the order of the ranks: 1 + 1e16 is 1e16 in float64, and so on.
    sums = [11111, 0.1 + 0.1 + 0.1 + 0.1 + 0.1, 1e16]
    assert first[:3] == [[4, 0, *sums], [10, -10, *sums], [4, 0, 10000, 0.1, 1e16]]
    assert all(map(math.isnan, first[3]))
    for found in others:
        np.testing.assert_array_equal(found, first)


def lose_rank_1(rank: int, folder: str) -> None:
    as_on_its_own()
    url = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3)
    comm.synchronize()
    if rank == 1:
        os._exit(7)
    with pytest.raises(RuntimeError, match=r"closed|reset"):
        comm.max_and_sum(torch.ones(3), 1)
    os._exit(0)


def test_a_rank_that_dies_ends_the_others_with_an_error(tmp_path: Path) -> None:
    processes = [
        CONTEXT.Process(target=lose_rank_1, args=(rank, str(tmp_path)))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 7, 0]


def visit_local_ranks() -> None:
    for ask in (comm.get_local_rank, comm.get_local_size):
        with pytest.raises(RuntimeError, match="LOCAL_RANK and LOCAL_WORLD_SIZE"):
            ask()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "7")
        patch.setenv("LOCAL_WORLD_SIZE", "8")
        assert (comm.get_local_rank(), comm.get_local_size()) == (7, 8)


def test_a_rank_has_a_place_on_its_machine() -> None:
    run_ranks(visit_local_ranks, WORLD_SIZE)


def test_a_number_on_a_device_is_exchanged_there_by_the_runs_own_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda _, group: used.append(group))
    comm.all_reduce(torch.zeros(1, device="meta"))
    assert used == [None]


def parts_of_the_data() -> list[tuple[int, int]]:
    parts = [(comm.data_parallel_rank(), comm.data_parallel_size())]
    comm.set_data_part(comm.get_rank() // 2, 2)
    parts += [(comm.data_parallel_rank(), comm.data_parallel_size())]
    dist.destroy_process_group()
    gc.collect()
    return [*parts, (comm.data_parallel_rank(), comm.data_parallel_size())]


def test_ranks_that_compute_one_batch_together_have_one_part_of_the_data() -> None:
    first, _, third, last = run_ranks(parts_of_the_data, WORLD_SIZE)
    assert first == [(0, 4), (0, 2), (0, 1)]
    assert third == [(2, 4), (1, 2), (0, 1)]
    assert last == [(3, 4), (1, 2), (0, 1)]


def visit_three_groups(folder: str) -> None:
    """Destroy the process group and initialise another, with the ranks in another order."""
    rank = comm.get_rank()
    for i, order in enumerate(([0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1])):
        dist.destroy_process_group()
        gc.collect()
        place = (rank + i) % WORLD_SIZE
        # The default group serves, since gloo is one of its backends.
        url = f"file://{folder}/rendezvous{i}"
        dist.init_process_group(
            "cpu:gloo", init_method=url, rank=place, world_size=WORLD_SIZE
        )
        comm.synchronize()
        assert comm.all_gather(rank) == order
        assert comm.broadcast(rank) == order[0]
        assert comm.object_group() is dist.group.WORLD
        with pytest.MonkeyPatch.context() as patch:  # as with nccl
            patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
            assert comm.object_group() is not dist.group.WORLD
            assert comm.all_gather(rank) == order


def wait_long(seconds: float) -> tuple[list[bool], str]:
    """Wait longer than the timeout of the process group; then one rank fails."""
    group = comm.object_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds / 2), group)
    comm._BEAT_SECONDS = 0.01
    rank = comm.get_rank()
    waited: list[bool] = []

    def wait() -> None:
        time.sleep(seconds * rank)
        waited.append(True)

    def fail() -> None:
        if rank == 1:
            time.sleep(seconds)
            raise ValueError(f"on rank {rank}")

    before, start = timer.last_beat, time.monotonic()
    comm.on_all_ranks_patiently(wait)
    # Longer than the timeout, also on rank 0, which has not to wait and may have begun later.
    assert time.monotonic() - start > seconds / 2
    assert timer.last_beat > before
    with pytest.raises(ValueError, match="on rank 1") as caught:
        comm.on_all_ranks_patiently(fail)
    return waited, str(caught.value)


def test_what_takes_longer_than_the_timeout_is_waited_for_on_all_ranks() -> None:
    assert run_ranks(wait_long, 2, 2.0) == [([True], "on rank 1")] * 2


def test_nothing_outlives_a_process_group_that_was_destroyed(tmp_path: Path) -> None:
    run_ranks(visit_three_groups, WORLD_SIZE, str(tmp_path))


def test_a_single_process_is_rank_0_of_1() -> None:
    assert (comm.get_rank(), comm.get_world_size(), comm.is_main_process()) == (
        0,
        1,
        True,
    )
    assert (comm.get_local_rank(), comm.get_local_size()) == (0, 1)


def test_collectives_of_a_single_process_hand_back_what_they_got() -> None:
    obj = object()
    assert comm.all_gather(obj) == [obj]
    assert comm.broadcast(obj) is obj
    values = torch.ones(2)
    assert comm.all_reduce(values) is values
    assert torch.equal(values, torch.ones(2))
    assert comm.any_rank(True)
    assert not comm.any_rank(False)
    comm.synchronize()
