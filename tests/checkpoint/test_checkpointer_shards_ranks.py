"""Folders of shards of the Checkpointer: written by 2 ranks, resumed by 1 and 2; also files."""

import copy
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_toys import equal
from torch import nn
from torch.distributed.tensor import DTensor

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, checkpointer, folders
from hooktrain.checkpoint.agreement import on_all_ranks
from hooktrain.checkpoint.files import write_file
from hooktrain.checkpoint.folders import read_folder, split_state
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA, PeriodicCheckpointer
from hooktrain.utils import comm
from hooktrain.utils.dtensor import full_tensors
from sharding_toys import batches, make_model, make_sharded, make_wrapper, own_part


def make_trainer(model: nn.Module, folder: Path, **options: Any) -> SimpleTrainer:
    trainer = SimpleTrainer(model, [own_part(batches(1)[0])], make_wrapper(model))
    saver = Checkpointer(model, folder, trainer=trainer, **options)
    periodic = PeriodicCheckpointer(saver, period=1, max_to_keep=1)
    trainer.register_hooks([EMA(model), periodic])
    saver.resume_or_load("")
    return trainer


def states(trainer: SimpleTrainer) -> Any:
    """Model, optimizer and average, whole on the main process."""
    trained = trainer.state_dict()
    parts = [dict(trainer.model.state_dict()), trained["optimizer"]["state"], trained["hooks"]]
    return copy.deepcopy(full_tensors(parts))


def trained(model: nn.Module, folder: Path, **options: Any) -> Any:
    trainer = make_trainer(model, folder, **options)
    trainer.train(max_iter=3)
    return states(trainer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    found["file resumed"] = states(make_trainer(make_sharded(), folder / "file", sharded=True))
    found["one resumed"] = states(make_trainer(make_sharded(), folder / "one", sharded=True))
    state = Checkpointer(make_sharded()).read(folder / "folder" / "model_final")
    tensors = split_state(state)[1].items()
    found["shards"] = sorted(name for name, value in tensors if isinstance(value, DTensor))
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
    sizes = [(folder / "folder" / "model_final" / f"__{r}_0.distcp").stat().st_size for r in (0, 1)]
    assert sizes[1] > sizes[0] / 2  # each rank has written its half
    assert two[1]["file names"] == ["last_checkpoint", "model_0000001.pth", "model_final.pth"]


def test_a_folder_resumes_on_2_ranks(two: list[dict[str, Any]]) -> None:
    assert equal(two[0]["folder resumed"], two[0]["folder"])


def test_a_folder_resumes_in_1_process_with_a_plain_model(
    folder: Path, two: list[dict[str, Any]]
) -> None:
    for name in ("folder", "background"):
        trainer = make_trainer(make_model(), folder / name)
        assert trainer.state_dict()["iteration"] == 2
        assert equal(states(trainer), two[0]["folder"])


def test_files_resume_sharded_whoever_wrote_them(one: Any, two: list[dict[str, Any]]) -> None:
    assert equal(two[0]["file resumed"], two[0]["folder"])
    assert equal(two[0]["one resumed"], one)


def test_each_rank_reads_its_shards_of_model_optimizer_and_average(
    folder: Path, two: list[dict[str, Any]]
) -> None:
    weights = make_model().state_dict()
    shards = two[1]["shards"]
    assert {f"model.{name}" for name in weights} <= set(shards)
    assert {f"trainer.hooks.EMA.module.{name}" for name in weights} <= set(shards)
    moments = [name for name in shards if name.startswith("trainer.optimizer.state.")]
    assert len(moments) == 2 * len(weights)
    assert len(shards) == 4 * len(weights)
    whole = read_folder(folder / "folder" / "model_final", map_location="meta")
    assert whole["trainer"]["iteration"] == 2


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


def test_a_load_raises_on_every_rank_what_failed_in_the_background_of_one(tmp_path: Path) -> None:
    assert run_ranks(load_after_a_failure, 2, tmp_path) == [["no disk on the main process"] * 2] * 2


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


def wait_together(folder: Path, sharded: bool, background: bool) -> bool:
    """Whether each rank finds the file that the main process takes its time to write."""

    def save_late(*args: Any) -> None:
        threading.Event().wait(0.1)
        write_file(*args)

    if comm.is_main_process():
        checkpointer.write_file = folders.write_file = save_late  # of this process only
    saver = Checkpointer(nn.Linear(2, 1), folder, sharded=sharded, background=background)
    saver.save("a")
    on_all_ranks(saver.wait)
    return (folder / ("a" if sharded else "a.pth")).exists()


@pytest.mark.parametrize(("sharded", "background"), [(False, False), (False, True), (True, True)])
def test_waiting_together_no_rank_goes_on_before_all_is_on_the_disk(
    sharded: bool, background: bool, tmp_path: Path
) -> None:
    assert run_ranks(wait_together, 2, tmp_path, sharded, background) == [True, True]
