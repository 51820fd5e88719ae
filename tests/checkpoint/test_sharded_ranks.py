"""Sharded checkpoints of several ranks: loaded by other numbers of them, and ranks that fail."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_toys import names, save, state_of
from storage_toys import equal
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gloo import run_ranks
from hooktrain.checkpoint import sharded
from hooktrain.checkpoint.manifest import verify_folder
from hooktrain.checkpoint.sharded import ShardedSaver, save_sharded
from hooktrain.checkpoint.sharded_loading import load_sharded, read_sharded
from hooktrain.checkpoint.staging import StagingBuffers
from hooktrain.checkpoint.storage import CorruptCheckpointError
from hooktrain.checkpoint.tree import join_state, split_state
from hooktrain.utils import comm


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    # Rows that 2 and 4 ranks share unevenly, and fewer rows than 4 ranks.
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (comm.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    trainer = {"iteration": 3, "rng": dict(enumerate(comm.all_gather(torch.get_rng_state())))}
    return {"model": model_state, "optimizer": optimizer_state, "trainer": trainer}


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all tensors by name, each in full."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in split_state(state)[2].items()
    }


def train_and_save(folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = build(0)
    train_step(model, optimizer)
    state = state_of_training(model, optimizer)
    expected = whole(state)
    save_sharded(state, folder / "now")
    staged = StagingBuffers().stage(state)["model"]
    assert equal(staged["0.weight"], state["model"]["0.weight"].to_local().detach())
    saver = ShardedSaver()
    saver.save(state, folder / "background")
    train_step(model, optimizer)  # changes the tensors in place
    assert not equal(whole(state_of_training(model, optimizer)), expected)
    saver.finish()
    return expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of two checkpoints that 2 ranks have saved, and what each holds."""
    folder = tmp_path_factory.mktemp("saved")
    expected, same = run_ranks(train_and_save, 2, folder)
    assert equal(expected, same)
    return folder, expected


def resume_on_1_rank(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    model, optimizer = build(1)
    into = state_of_training(model, optimizer)
    loaded = load_sharded(folder, into)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    restored = state_of_training(model, optimizer)
    return whole({**restored, "trainer": loaded["trainer"]}), loaded["trainer"]["iteration"]


def test_what_2_ranks_saved_is_resumed_by_1(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, expected = saved
    [(tensors, iteration)] = run_ranks(resume_on_1_rank, 1, folder / "background")
    tensors["trainer.rng.1"] = expected["trainer.rng.1"]
    assert equal(dict(sorted(tensors.items())), dict(sorted(expected.items())))
    assert iteration == 3


def load_on_4_ranks(folder: Path) -> tuple[dict[str, torch.Tensor], set[int]]:
    mesh = init_device_mesh("cpu", (4,))
    tree, paths, tensors = split_state(read_sharded(folder, "meta"))
    into = {
        name: distribute_tensor(torch.zeros(tensor.shape), mesh, [Shard(0)])
        for name, tensor in tensors.items()
        if name.startswith(("model", "optimizer")) and tensor.dim() > 0
    }
    others = {name: torch.zeros_like(tensors[name], device="cpu") for name in tensors.keys() - into}
    loaded = load_sharded(folder, join_state(tree, paths, {**others, **into}))
    rows = {tensor.to_local().shape[0] for tensor in into.values()}
    assert all(item is into[name] for name, item in split_state(loaded)[2].items() if name in into)
    return whole(loaded), rows


def test_what_2_ranks_saved_is_loaded_by_4_each_its_shard(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, expected = saved
    results = run_ranks(load_on_4_ranks, 4, folder / "now")
    for tensors, _ in results:
        assert equal(tensors, expected)
    # Of 7 and 3 rows.
    assert [rows for _, rows in results] == [{2, 1}, {2, 1}, {2, 1}, {1, 0}]


@pytest.mark.parametrize("name", ["now", "background"])
def test_what_2_ranks_saved_is_loaded_whole_without_a_process_group(
    name: str, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, expected = saved
    assert equal(whole(load_sharded(folder / name)), expected)
    manifest = verify_folder(folder / name)
    assert manifest["world_size"] == 2
    assert sorted(manifest["files"]) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "state.pth",
    ]


def load_a_broken_one(folder: Path) -> list[str]:
    problems = []
    for name in ("__0_0.distcp", "__1_0.distcp"):
        try:
            load_sharded(folder / name)
        except CorruptCheckpointError as error:
            problems.append(str(error))
    return problems


def outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail_on_rank_1(folder: Path) -> list[str]:
    """What each of several saves and loads raises, where rank 1 alone has a problem."""
    saver, is_main = ShardedSaver(), dist.get_rank() == 0
    found = []
    if not is_main:
        real, sharded.record_of = sharded.record_of, disk_full
    found.append(outcome(save_sharded, state_of(1), folder / "a"))
    saver.save(state_of(1), folder / "a")
    found.append(outcome(saver.finish))
    if not is_main:
        sharded.record_of = real
    state = state_of(1) if is_main else {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}
    found.append(outcome(save_sharded, state, folder / "a"))
    mesh = init_device_mesh("cpu", (2,))
    shards = {"x": distribute_tensor(torch.zeros(2), mesh, [Shard(0)])}
    found.append(outcome(save_sharded, {} if is_main else shards, folder / "a"))
    into = {} if is_main else {"model": {"w": torch.zeros(1)}}
    save_sharded(state_of(1 if is_main else 2), folder / "main")
    save_sharded(state_of(1), folder / "good")
    found.append(outcome(load_sharded, folder / "good", into))
    if is_main:
        path = folder / "good" / "__0_0.distcp"  # the second file: rank 1 compares its digest
        path.write_bytes(path.read_bytes().replace(b"PK", b"KP"))
    comm.synchronize()
    found.append(outcome(load_sharded, folder / "good"))
    return found


def disk_full(path: Path) -> None:
    raise OSError(errno.ENOSPC, f"no space on rank 1 for {path.name}")


def test_what_fails_on_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    main, other = run_ranks(fail_on_rank_1, 2, tmp_path)
    assert main == other
    full, full_in_background, twice, lacking, shape, altered = main
    assert full == "OSError: [Errno 28] no space on rank 1 for __1_0.distcp"
    assert full_in_background == full
    assert twice == "ValueError: the keys ('a.b',) and ('a', 'b') are both named 'a.b'"
    assert lacking == "ValueError: the main process has no ['x'], which other ranks have"
    assert shape.startswith("ValueError: model.w has the shape (3, 4)")
    assert "CorruptCheckpointError" in altered
    assert "__0_0.distcp was altered" in altered
    assert names(tmp_path) == ["good", "main"]
    # Of what is not sharded, the main process's is saved.
    assert equal(load_sharded(tmp_path / "main"), state_of(1))


def die_in_a_save(folder: Path) -> None:
    if dist.get_rank() == 1:

        def die(path: Path) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        sharded.record_of = die
    save_sharded(state_of(2), folder / "a")


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    with pytest.raises(RuntimeError, match=r"rank [01]"):
        run_ranks(die_in_a_save, 2, tmp_path)
    assert equal(load_sharded(tmp_path / "a"), state_of(1))
    left = [name for name in names(tmp_path) if name != "a"]
    assert all(name.startswith("a.tmp-") for name in left)
    save(tmp_path / "b", 3)
    assert names(tmp_path) == ["a", "b"]
