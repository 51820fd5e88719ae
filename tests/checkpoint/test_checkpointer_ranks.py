"""What several ranks do together when they save and load, files and folders of shards."""

import copy
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import equal, model_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    PeriodicCheckpointer,
    checkpointer,
    folders,
)
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA, PeriodicCheckpointer as PeriodicHook
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensors
from sharding_toys import batches, make_model, make_sharded, make_wrapper, own_part


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
    written = names(folder) if folder.exists() else []
    return checkpointer.save_to_disk, type(checkpointer.model).__name__, written


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


def gone(folder: Path) -> None:
    (folder / "model_0000019.pth").unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / "model_0000019.pth", 100)


def emptied(folder: Path) -> None:
    for path in folder.glob("*.pth"):
        path.write_bytes(b"")


# What happens on the disk of which rank, what is loaded (or resumed), and what every rank gets.
CASES: list[tuple[Callable[[Path], object], int, str, str]] = [
    (gone, 0, "model_0000019.pth", "FileNotFoundError: .*out/model_0000019.pth"),
    (gone, 1, "model_0000019.pth", "FileNotFoundError: .*out/model_0000019.pth"),
    (gone, 1, "", "9.0"),  # one that all can read
    (cut, 0, "", "9.0"),  # what the main process can read
    (emptied, 0, "", r"(?s)CorruptCheckpointError: .*model_0000009.pth"),
    (shutil.rmtree, 0, "", "0.0"),  # from scratch
]


def load_on_own_disks(root: Path) -> list[tuple[str, str]]:
    """The weight or the error of each case, and what was logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    found = []
    for number, (_, _, name, _) in enumerate(CASES):
        os.chdir(root / str(number) / str(dist.get_rank()))
        checkpointer = Checkpointer(model_of(0), "out")
        try:
            checkpointer.load(f"out/{name}") if name else checkpointer.resume_or_load(
                ""
            )
            outcome = str(checkpointer.model.weight[0, 0].item())
        except (OSError, CorruptCheckpointError) as error:
            outcome = f"{type(error).__name__}: {error}"
        found.append((outcome, "\n".join(told)))
        told.clear()
        assert comm.all_gather(dist.get_rank()) == [0, 1]  # no rank has run ahead
    return found


def test_ranks_with_disks_of_their_own_load_the_same_or_fail_alike(
    tmp_path: Path,
) -> None:
    for number, (harm, struck, _, _) in enumerate(CASES):
        for rank in range(2):
            folder = tmp_path / str(number) / str(rank) / "out"
            for value in (9, 19):
                saver = Checkpointer(model_of(value), folder)
                saver.save(f"model_{value:07d}", iteration=value)
            if rank == struck:
                harm(folder)
    for results in run_ranks(load_on_own_disks, 2, tmp_path):
        for case, (outcome, told) in zip(CASES, results, strict=True):
            assert re.match(case[3], outcome), case
            assert ("Passing over the checkpoint out/model_00000" in told) == (
                not case[2] and case[0] is not shutil.rmtree
            )


def make_trainer(model: nn.Module, folder: Path, **options: Any) -> SimpleTrainer:
    trainer = SimpleTrainer(model, [own_part(batches(1)[0])], make_wrapper(model))
    saver = Checkpointer(model, folder, trainer=trainer, **options)
    periodic = PeriodicHook(saver, period=1, max_to_keep=1)
    trainer.register_hooks([EMA(model), periodic])
    saver.resume_or_load("")
    return trainer


def states(trainer: SimpleTrainer) -> Any:
    """Model, optimizer and average, whole on the main process."""
    trained = trainer.state_dict()
    parts = [
        dict(trainer.model.state_dict()),
        trained["optimizer"]["state"],
        trained["hooks"],
    ]
    return copy.deepcopy(full_tensors(parts))


def trained(model: nn.Module, folder: Path, **options: Any) -> Any:
    trainer = make_trainer(model, folder, **options)
    trainer.train(max_iter=3)
    return states(trainer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "folder": {"sharded": True},
        "background": {"sharded": True, "background": True},
        "file": {"background": True},
    }.items():
        found[name] = trained(make_sharded(), folder / name, **options)
        comm.synchronize()  # files are written by the main process alone
        found[f"{name} names"] = names(folder / name)
    resumed = make_trainer(make_sharded(), folder / "background")
    found["folder resumed"] = states(resumed)
    found["file resumed"] = states(
        make_trainer(make_sharded(), folder / "file", sharded=True)
    )
    found["one resumed"] = states(
        make_trainer(make_sharded(), folder / "one", sharded=True)
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def one(folder: Path) -> Any:
    return trained(make_model(), folder / "one")


@pytest.fixture(scope="module")
def two(folder: Path, one: Any) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


def test_files_and_folders_in_the_background_or_not_hold_the_same(
    folder: Path, two: list[dict[str, Any]]
) -> None:
    assert equal(two[0]["folder"], two[0]["background"])
    assert equal(two[0]["folder"], two[0]["file"])
    kept = ["last_checkpoint", "model_0000001", "model_final"]
    assert two[1]["folder names"] == two[1]["background names"] == kept
    assert two[1]["file names"] == [
        "last_checkpoint",
        "model_0000001.pth",
        "model_final.pth",
    ]


def test_a_folder_resumes_on_2_ranks(two: list[dict[str, Any]]) -> None:
    assert equal(two[0]["folder resumed"], two[0]["folder"])


def test_a_folder_resumes_in_1_process_with_a_plain_model(
    folder: Path, two: list[dict[str, Any]]
) -> None:
    for name in ("folder", "background"):
        trainer = make_trainer(make_model(), folder / name)
        assert trainer.state_dict()["iteration"] == 2
        assert equal(states(trainer), two[0]["folder"])


def test_files_resume_sharded_whoever_wrote_them(
    one: Any, two: list[dict[str, Any]]
) -> None:
    assert equal(two[0]["file resumed"], two[0]["folder"])
    assert equal(two[0]["one resumed"], one)


def fail_on_main(*_: Any) -> None:
    raise OSError("no disk on the main process")


def load_after_a_failure(folder: Path) -> list[str]:
    """What each rank gets to know of a failure in the background of the main process."""
    checkpointer.write_file = folders.write_file = fail_on_main  # of this process only
    errors = []
    for sharded in (False, True):
        saver = Checkpointer(nn.Linear(2, 1), folder, sharded=sharded, background=True)
        saver.save("a")
        try:
            saver.resume_or_load("")
        except OSError as error:
            errors.append(str(error))
    return errors


def test_a_load_raises_on_every_rank_what_failed_in_the_background_of_one(
    tmp_path: Path,
) -> None:
    assert (
        run_ranks(load_after_a_failure, 2, tmp_path)
        == [["no disk on the main process"] * 2] * 2
    )


def one_rank_fails(folder: Path) -> float:
    """How long the rank that has begun a save without the other waits, as its run has failed."""
    saver = Checkpointer(nn.Linear(2, 1), folder, sharded=True, background=True)
    saver.save("model_0000000", iteration=0)
    saver.wait()
    checkpointer._GIVE_UP_SECONDS = 0.5
    start = time.perf_counter()
    if comm.is_main_process():
        job = partial(folders.save_folder, {"model": {}}, folder / "a", saver._group)
        saver._worker.submit(job, daemon=True)
        saver.give_up()
    seconds = time.perf_counter() - start
    comm.synchronize()
    return seconds


def test_after_a_failure_no_rank_waits_long_for_another(tmp_path: Path) -> None:
    seconds, _ = run_ranks(one_rank_fails, 2, tmp_path)
    assert 0.5 <= seconds < 5
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000000"
    assert not (tmp_path / "a").exists()
