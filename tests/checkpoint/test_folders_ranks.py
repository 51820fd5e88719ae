"""Folders of shards of several ranks: loaded by other numbers of them, and ranks that fail."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import equal
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, folders
from hooktrain.checkpoint.folders import save_folder, split_state
from hooktrain.checkpoint.loading import read_checkpoint, read_on_all_ranks
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


class Training:
    """Its state is that of model and optimizer by names, as torch gives it."""

    def __init__(self, seed: int) -> None:
        self.model, self.optimizer = build(seed)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"average": dict(model), "optimizer": optimizer, "iteration": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model = dict(self.model.state_dict())
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=state["optimizer"],
        )
        assert state["iteration"] == 3


def whole(state: Any) -> dict[str, torch.Tensor]:
    """Copies of all tensors by name, each in full."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in split_state(state)[1].items()
    }


def state_of(training: Training) -> dict[str, Any]:
    return {
        "model": dict(training.model.state_dict()),
        "training": training.state_dict(),
    }


def train_and_save(folder: Path) -> dict[str, torch.Tensor]:
    training = Training(0)
    train_step(training.model, training.optimizer)
    expected = whole(state_of(training))
    now = Checkpointer(training.model, folder, sharded=True, training=training)
    now.save("now")
    later = Checkpointer(
        training.model, folder, sharded=True, background=True, training=training
    )
    for name in ("background", "again"):  # the second one from the memory of the first
        later.save(name)
    train_step(training.model, training.optimizer)  # changes the tensors in place
    assert not equal(whole(state_of(training)), expected)
    later.wait()
    return expected


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of checkpoints that 2 ranks have saved, and what each holds."""
    folder = tmp_path_factory.mktemp("saved")
    expected, same = run_ranks(train_and_save, 2, folder)
    assert equal(expected, same)
    return folder, expected


NAMES = ("now", "background", "again")


def resume(folder: Path) -> list[tuple[dict[str, torch.Tensor], dict[str, int]]]:
    """The tensors in full after a resume, and the rows that this rank has read of each."""
    found = []
    for name in NAMES:
        training = Training(1)
        checkpointer = Checkpointer(training.model, folder, training=training)
        state = checkpointer.read(folder / name)
        shards = {
            tensor: value.to_local().shape[0]
            for tensor, value in split_state(state)[1].items()
            if isinstance(value, DTensor)
        }
        checkpointer.load(folder / name)
        found.append((whole(state_of(training)), shards))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_2_ranks_saved_is_resumed_by_others_each_its_shards(
    ranks: int, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, expected = saved
    results = run_ranks(resume, ranks, folder)
    rows = []
    for result in results:
        assert all(equal(tensors, expected) for tensors, _ in result)
        shards = result[0][1]
        rows.append((shards["model.0.weight"], shards["model.2.weight"]))
        assert shards["training.average.0.weight"] == shards["model.0.weight"]
        assert (
            shards["training.optimizer.state.0.weight.exp_avg"]
            == shards["model.0.weight"]
        )
        assert "training.optimizer.state.0.weight.step" not in shards
        assert (
            len(shards) == 2 * 6 + 2 * 6
        )  # of 2 layers and a norm: weights, averages, moments
    expected_rows = {
        1: [(7, 3)],
        2: [(4, 2), (3, 1)],
        4: [(2, 1), (2, 1), (2, 1), (1, 0)],
    }
    assert rows == expected_rows[ranks]


@pytest.mark.parametrize("name", NAMES)
def test_what_2_ranks_saved_is_loaded_whole_without_a_process_group(
    name: str, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, expected = saved
    assert equal(whole(read_checkpoint(folder / name)), expected)
    sizes = [(folder / name / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert sizes[1] > sizes[0] / 3  # each rank has written its part


def small_state(value: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3, 4), float(value))}, "iteration": value}


def outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail_on_rank_1(folder: Path) -> list[str]:
    """What each of several saves and loads raises, where rank 1 alone has a problem."""
    is_main = dist.get_rank() == 0
    background = Checkpointer(nn.Linear(1, 1), folder, sharded=True, background=True)
    found = []
    if not is_main:
        real, folders._digest = folders._digest, disk_full
    found.append(outcome(save_folder, small_state(1), folder / "a"))
    background.save("a")
    found.append(outcome(background.wait))
    if not is_main:
        folders._digest = real
    mesh = init_device_mesh("cpu", (2,))
    shards = {"x": distribute_tensor(torch.zeros(2), mesh, [Shard(0)])}
    found.append(outcome(save_folder, {} if is_main else shards, folder / "a"))
    save_folder(small_state(1 if is_main else 2), folder / "main")
    save_folder(small_state(1), folder / "good")
    if is_main:
        path = (
            folder / "good" / "__0_0.distcp"
        )  # the second file: rank 1 compares its digest
        path.write_bytes(path.read_bytes().replace(b"PK", b"KP"))
    comm.synchronize()
    found.append(outcome(read_on_all_ranks, folder / "good", nn.Linear(1, 1)))
    return found


def disk_full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "no space to write on rank 1")


def test_what_fails_on_one_rank_is_raised_on_all_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    main, other = run_ranks(fail_on_rank_1, 2, tmp_path)
    assert main == other
    full, full_in_background, lacking, altered = main
    assert full == "OSError: [Errno 28] no space to write on rank 1"
    assert full_in_background == f"{full}: '{tmp_path / 'a'}'"
    assert "ValueError: Failed to validate global plan: key:x" in lacking
    assert "CorruptCheckpointError" in altered
    assert "__0_0.distcp was altered" in altered
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "main"]
    # Of what is not sharded, the main process's is saved.
    assert equal(read_checkpoint(tmp_path / "main"), small_state(1))


def die_in_a_save(folder: Path) -> None:
    if dist.get_rank() == 1:
        folders._digest = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    save_folder(small_state(2), folder / "a")


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    save_folder(small_state(1), tmp_path / "a")
    with pytest.raises(RuntimeError):
        run_ranks(die_in_a_save, 2, tmp_path)
    assert equal(read_checkpoint(tmp_path / "a"), small_state(1))
    left = [path.name for path in tmp_path.iterdir() if path.name != "a"]
    assert all(name.startswith(".a.tmp-") for name in left)
    Checkpointer(nn.Linear(1, 1), tmp_path).save("b")
    assert {path.name for path in tmp_path.iterdir()} == {
        "a",
        "b.pth",
        "last_checkpoint",
    }
