"""What several ranks agree on when they save and load."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import model_of
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, PeriodicCheckpointer
from hooktrain.utils import comm


def save(folder: Path, name: str, value: int) -> Path:
    Checkpointer(model_of(value), folder).save(name, iteration=value)
    return folder / f"{name}.pth"


def outcome(checkpointer: Checkpointer, *path: Path) -> Any:
    """The weight after a load or, without a path, a resume; or the error."""
    try:
        if path:
            checkpointer.load(*path)
        else:
            checkpointer.resume_or_load("")
    except (OSError, CorruptCheckpointError) as error:
        return type(error).__name__, str(error)
    return checkpointer.model.weight[0, 0].item()


class NeedsAllRanks:
    """Its state is gathered in a collective, as that of a sharded model."""

    def state_dict(self) -> dict[str, int]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": int(total)}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def save_on_all_ranks(folder: Path) -> Any:
    folder = folder / str(dist.get_rank())  # so that it can be seen who wrote
    checkpointer = Checkpointer(
        DistributedDataParallel(model_of(3)), folder, gathered=NeedsAllRanks()
    )
    periodic = PeriodicCheckpointer(checkpointer, 1, max_to_keep=1)
    periodic.step(0)
    periodic.step(1)
    dist.barrier()
    names = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    return checkpointer.save_to_disk, type(checkpointer.model).__name__, names


def test_all_ranks_enter_a_save_and_the_main_process_writes(tmp_path: Path) -> None:
    main, other = run_ranks(save_on_all_ranks, 2, tmp_path)
    assert main == (True, "Linear", ["last_checkpoint", "model_0000001.pth"])
    assert other == (False, "Linear", [])
    state = torch.load(tmp_path / "0" / "model_0000001.pth", weights_only=True)
    assert list(state["model"]) == ["weight", "bias"]
    assert state["gathered"] == {"total": 2}


def save_on_one_rank(folder: Path) -> None:
    if dist.get_rank() == 0:
        Checkpointer(model_of(3), folder).save("a")
    # Were there a barrier in the save, it would meet this one, and rank 0 would wait for ever here.
    comm.synchronize()


def test_one_rank_may_save_alone(tmp_path: Path) -> None:
    run_ranks(save_on_one_rank, 2, tmp_path)
    assert (tmp_path / "a.pth").exists()


def load_on_own_disk(root: Path, name: str) -> tuple[Any, str]:
    """Load the file, or resume if ``name`` is empty; each rank sees a disk of its own."""
    records: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("hooktrain").addHandler(Collect())
    os.chdir(root / str(dist.get_rank()))
    checkpointer = Checkpointer(model_of(0), "out")
    result = outcome(checkpointer, *([Path("out") / name] if name else []))
    assert comm.all_gather(dist.get_rank()) == [0, 1]  # no rank has run ahead
    return result, "\n".join(records)


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The folder "out" of each of two machines, with the same files in it."""
    folders = [tmp_path / str(rank) / "out" for rank in range(2)]
    for folder in folders:
        for value in (9, 19):
            save(folder, f"model_{value:07d}", value)
    return folders


def test_what_one_rank_cannot_read_is_an_error_on_all(disks: list[Path], tmp_path: Path) -> None:
    (disks[1] / "model_0000019.pth").unlink()
    for result, _ in run_ranks(load_on_own_disk, 2, tmp_path, "model_0000019.pth"):
        assert result[0] == "FileNotFoundError"
        assert "out/model_0000019.pth" in result[1]
    # A resume takes one that all can read.
    results = run_ranks(load_on_own_disk, 2, tmp_path, "")
    assert [result for result, _ in results] == [9, 9]
    assert "Passing over the checkpoint out/model_0000019.pth" in results[0][1]


def test_all_ranks_resume_from_the_file_that_the_main_process_chose(
    disks: list[Path], tmp_path: Path
) -> None:
    broken = disks[0] / "model_0000019.pth"
    broken.write_bytes(broken.read_bytes()[:-1])
    (main, told), (other, _) = run_ranks(load_on_own_disk, 2, tmp_path, "")
    assert (main, other) == (9, 9)
    assert "Passing over" in told


def test_if_the_main_process_cannot_read_no_rank_goes_on(disks: list[Path], tmp_path: Path) -> None:
    (disks[0] / "model_0000019.pth").unlink()
    results = run_ranks(load_on_own_disk, 2, tmp_path, "model_0000019.pth")
    for (kind, message), _ in results:
        assert kind == "FileNotFoundError"
        assert "out/model_0000019.pth" in message


def test_if_no_checkpoint_is_intact_every_rank_raises(disks: list[Path], tmp_path: Path) -> None:
    for path in disks[0].glob("*.pth"):
        path.write_bytes(b"")
    for (kind, message), _ in run_ranks(load_on_own_disk, 2, tmp_path, ""):
        assert kind == "CorruptCheckpointError"
        assert "model_0000009.pth" in message


def test_all_ranks_start_from_scratch_where_the_main_process_has_nothing(
    disks: list[Path], tmp_path: Path
) -> None:
    shutil.rmtree(disks[0])
    results = run_ranks(load_on_own_disk, 2, tmp_path, "")
    assert [result for result, _ in results] == [0, 0]
