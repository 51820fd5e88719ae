"""Runs on machines with full disks, jumping clocks, foreign folders and thousands of files."""

import codecs
import math
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import processes
from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.resume import files_to_delete, names_to_resume
from hooktrain.config import LazyConfig
from hooktrain.engine import default_hooks, hooks
from hooktrain.events import JSONWriter, TensorboardXWriter, load_json_metrics
from processes import end, run_program, start
from toys import LinearLoss, linear_trainer, net_trainer

ROOT = Path(__file__).parent.parent
NOBODY = 65534
SMALL = [
    *["--config-file", str(ROOT / "configs" / "digits_cnn.py")],
    *["train.max_iter=4", "train.checkpointer.period=2", "train.log_period=1"],
    *["train.eval_period=0", "model.channels=4"],
]


def train(folder: Path, *options: str) -> list[str]:
    """The command of a short run."""
    tool = str(ROOT / "tools" / "train_net.py")
    return [tool, *SMALL, f"train.output_dir={folder}", *options]


def losses(folder: Path) -> list[float]:
    rows = load_json_metrics(folder / "metrics.json")
    return [row["total_loss"] for row in rows if "total_loss" in row]


def test_a_disk_that_is_full_for_the_log_alone_ends_no_run(tmp_path: Path) -> None:
    for name in ("full", "free"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "log.txt").symlink_to("/dev/full")
    full = run_program(*train(tmp_path / "full"))
    assert full.returncode == 0, full.stdout
    told = [line for line in full.stdout.splitlines() if "Cannot write" in line]
    assert len(told) == 1
    assert re.search(r"ERROR .*/full/log\.txt: .*No space left on device", told[0])
    assert "Total training time" in full.stdout
    assert run_program(*train(tmp_path / "free")).returncode == 0
    assert losses(tmp_path / "full") == losses(tmp_path / "free")
    assert (tmp_path / "full" / "model_final.pth").exists()


# Of globs, URLs, formats, shells and overrides.
ODD = "größe 数据 #%d%(x)s [1]*?{y}$HOME 'q' back\\slash =,;~ new\nline"


@pytest.mark.parametrize("is_sharded", [False, True], ids=["file", "folder"])
def test_a_folder_and_a_store_may_have_any_name(
    is_sharded: bool, tmp_path: Path
) -> None:
    folder, store = tmp_path / ODD / "run", tmp_path / ODD / "store"
    options = [f"train.store={store}", f"train.checkpointer.sharded={is_sharded}"]
    first = run_program(*train(folder, *options))
    assert first.returncode == 0, first.stdout
    assert "WARNING" not in first.stdout
    shutil.rmtree(folder)
    again = run_program(*train(folder, *options, "train.max_iter=5", "--resume"))
    assert again.returncode == 0, again.stdout
    assert "Starting training from iteration 4" in again.stdout
    assert len(losses(folder)) == 5


def test_a_run_stays_in_its_folder_when_the_current_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()

    def change(trainer: Any) -> None:
        if trainer.iter == 2:
            os.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    trainer = linear_trainer(hooks.CallbackHook(before_step=change))
    saver = Checkpointer(trainer.model, "run", trainer=trainer)
    writers = [JSONWriter("run/metrics.json"), TensorboardXWriter("run")]
    trainer.register_hooks(
        default_hooks(
            checkpointer=saver, checkpoint_period=1, writers=writers, log_period=1
        )
    )
    trainer.train(max_iter=4)
    assert os.listdir(tmp_path / "elsewhere") == []
    assert len(losses(tmp_path / "run")) == 4
    assert (tmp_path / "run" / "last_checkpoint").read_text() == "model_final.pth"


def test_a_run_in_a_folder_whose_name_is_not_utf_8_has_its_log_and_configuration(
    tmp_path: Path,
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/gr\xf6\xdfe"))  # latin-1
    run = run_program(*train(folder))
    assert run.returncode == 0, run.stdout
    assert "Logging error" not in run.stdout
    log = (folder / "log.txt").read_text()
    assert r"Saving checkpoint to " in log
    assert r"gr\udcf6\udcdfe/model_final.pth" in log
    assert LazyConfig.load(folder / "config.json").train.output_dir == str(folder)


def start_at(moment: Path, output: Path, command: list[str]) -> None:
    """Begin a run when a file is there."""
    (output.parent / f"{output.name}.waits").touch()
    while not moment.exists():
        pass  # the sooner, the closer
    processes._become(command, output, output.parent, dict(os.environ))


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("options", [[], ["--resume"]], ids=["new", "resumed"])
def test_of_two_jobs_that_begin_at_once_in_one_folder_one_is_refused(
    options: list[str], is_used: bool, tmp_path: Path
) -> None:
    folder, moment = tmp_path / "run", tmp_path / "moment"
    if is_used:
        assert run_program(*train(folder, "train.max_iter=2")).returncode == 0
    outputs = [tmp_path / f"job{i}" for i in range(2)]
    command = train(folder, *options)
    jobs = [start(start_at, moment, output, command) for output in outputs]
    processes.wait_until(lambda: len(list(tmp_path.glob("*.waits"))) == 2)
    moment.touch()
    codes = [end(job) for job in jobs]
    assert sorted(codes) == [0, 1]
    said = outputs[codes.index(1)].read_text()
    assert "is in use by another run" in said
    assert "Traceback" not in said
    assert len(losses(folder)) == 4
    if not (options and is_used):  # a schedule depends on the length of a run
        assert run_program(*train(tmp_path / "whole")).returncode == 0
        assert losses(folder) == losses(tmp_path / "whole")
    assert [path for path in folder.iterdir() if ".tmp-" in path.name] == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="other-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_another_user(command: list[str], output: Path) -> None:
    # Its interpreter may lie in root's home, from which it can import nothing more.
    codecs.lookup("cp437")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    processes._become(command, output, output.parent, dict(os.environ))


def run_as_another_user(output: Path, *command: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    output.touch()
    output.chmod(0o666)
    code = end(start(as_another_user, list(command), output))
    return code, output.read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_of_another_users_run_all_can_be_read_and_nothing_written(
    open_folder: Path,
) -> None:
    folder = open_folder / "run"
    assert run_program(*train(folder)).returncode == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    printed = open_folder / "printed"
    code, said = run_as_another_user(printed, *train(folder, "--resume"))
    assert code != 0
    assert "Permission denied" in said
    assert str(folder) in said[said.index("Permission denied") :]
    assert "Traceback" not in said
    code, said = run_as_another_user(printed, *train(folder, "--eval-only", "--resume"))
    assert code == 0, said
    assert "accuracy" in said
    tool = str(ROOT / "tools" / "plot.py")
    code, said = run_as_another_user(printed, tool, str(folder), "--text")
    assert code == 0, said
    assert "total_loss" in said
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_root_of_a_disk_with_its_lost_and_found_is_an_output_folder(
    open_folder: Path,
) -> None:
    disk = open_folder / "disk"
    disk.mkdir()
    os.chown(disk, NOBODY, NOBODY)
    (disk / "lost+found").mkdir(mode=0o700)
    printed = open_folder / "printed"
    for options in ([], ["--resume", "train.max_iter=5"]):
        code, said = run_as_another_user(printed, *train(disk, *options))
        assert code == 0, said
    assert len(losses(disk)) == 5


def test_five_thousand_checkpoints_cost_little_time_at_a_start_and_a_save(
    tmp_path: Path,
) -> None:
    trainer = net_trainer()
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    checkpointer.save("model_0009999", iteration=9999)
    for i in range(5000):
        os.link(tmp_path / "model_0009999.pth", tmp_path / f"model_{i:07d}.pth")
    begin = time.monotonic()
    names = names_to_resume(tmp_path)
    assert names[:3] == [f"model_000{i}.pth" for i in (9999, 4999, 4998)]
    assert len(names) == 5001
    assert len(files_to_delete(tmp_path, "model", 4000, 9999)) == 1001
    checkpointer.resume_or_load("")
    checkpointer.begin_run()
    assert (
        time.monotonic() - begin < 10
    )  # a fraction of a second; for each pair: minutes


def test_a_folder_with_a_name_of_250_bytes_holds_a_run(tmp_path: Path) -> None:
    folder = tmp_path / ("ü" * 125)
    for max_iter in (2, 4):
        trainer = net_trainer()
        checkpointer = Checkpointer(trainer.model, folder, trainer=trainer)
        saver = hooks.PeriodicCheckpointer(checkpointer, 1, max_to_keep=1)
        trainer.register_hooks([saver])
        found = checkpointer.resume_or_load("")
        assert found.get("iteration", -1) == max_iter - 3
        trainer.train(max_iter=max_iter)


def test_a_checkpoint_with_a_name_of_250_bytes_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(LinearLoss(), tmp_path)
    with pytest.raises(OSError, match=f"too long.*{'n' * 250}"):
        checkpointer.save("n" * 250)
    assert list(tmp_path.iterdir()) == []


OLDER = ("0000014", "0000009", "0000004")


def run_by_clock(folder: Path) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The weights of a run, and its rows without those that measure time."""
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, folder, trainer=trainer)
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.EvalHook("10 minutes", lambda: {"score": 1.0}),
            hooks.PeriodicWriter([JSONWriter(folder / "metrics.json")], 5),
            hooks.PeriodicCheckpointer(checkpointer, 5, max_to_keep=3),
            hooks.Watchdog(60.0),
        ]
    )
    checkpointer.resume_or_load("")
    trainer.train(max_iter=20)
    rows = load_json_metrics(folder / "metrics.json")
    for row in rows:
        times = [row.pop(name) for name in list(row) if "time" in name or "eta" in name]
        assert all(0 <= value < 60 for value in times)
    return trainer.model.fc.weight, rows


def test_a_clock_that_jumps_changes_no_period_no_order_and_no_measured_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, rows = run_by_clock(tmp_path / "steady")
    draw, clock = random.Random(1), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + draw.uniform(-1e8, 1e8))
    jumped, jumped_rows = run_by_clock(tmp_path / "jumping")
    assert torch.equal(jumped, weight)
    assert jumped_rows == rows
    # By their times the checkpoints on the disk would be in another order.
    (tmp_path / "jumping" / "last_checkpoint").unlink()
    in_order = names_to_resume(tmp_path / "jumping")
    assert in_order == [f"model_{i}.pth" for i in ("final", *OLDER)]
    for i, name in enumerate(in_order):
        os.utime(tmp_path / "jumping" / name, (4e9 + i, 4e9 + i))
    assert names_to_resume(tmp_path / "jumping") == in_order


def save_each_iteration(folder: Path, sharded: bool, end_at: Path) -> None:
    """A run whose checkpoints live for one iteration each."""
    trainer = linear_trainer()
    model = trainer.model
    checkpointer = Checkpointer(model, folder, trainer=trainer, sharded=sharded)

    def stop(_: Any) -> None:
        if end_at.exists():
            trainer.request_stop("the reader has read enough")

    trainer.register_hooks(
        [
            hooks.EvalHook(1, lambda: {"score": float(trainer.iter)}),
            hooks.BestCheckpointer(checkpointer, "score", "max"),
            hooks.PeriodicCheckpointer(checkpointer, 1, max_to_keep=1),
            hooks.PeriodicWriter([JSONWriter(folder / "metrics.json")], 1),
            hooks.CallbackHook(after_step=stop),
        ]
    )
    trainer.train(max_iter=1_000_000)


@pytest.mark.parametrize("sharded", [False, True])
def test_beside_a_run_that_saves_its_newest_and_best_models_and_metrics_are_read(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import plot
    import train_net

    folder, enough = tmp_path / "run", tmp_path / "enough"
    run = start(save_each_iteration, folder, sharded, enough)
    best = "model_best" if sharded else "model_best.pth"
    files = [folder / name for name in ("metrics.json", best, "last_checkpoint")]
    processes.wait_until(lambda: all(file.exists() for file in files))
    last, last_count = -1, 0
    seen = set()
    try:
        while len(seen) < 15:
            found = train_net.load_newest(Checkpointer(LinearLoss(), folder))
            assert found["iteration"] >= last  # a run only goes on
            last = found["iteration"]
            seen.add(last)
            train_net.load_best(Checkpointer(LinearLoss(), folder))
            panels = plot.read([folder], ["total_loss"], count=1)
            values = panels["losses"]["total_loss"].values
            assert [i for i, _ in values] == list(range(len(values)))
            assert all(math.isfinite(value) for _, value in values)
            assert len(values) >= last_count
            last_count = len(values)
            assert run.is_alive()
    finally:
        enough.touch()
        assert end(run) == 0
