import errno
import logging
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    PeriodicCheckpointer,
    checkpointer,
    load_file,
)
from hooktrain.checkpoint.files import write_file


def run(folder: Path, start: int, stop: int, **settings: Any) -> PeriodicCheckpointer:
    """Step through the iterations from ``start`` to ``stop - 1``, as one process would."""
    periodic = PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), folder), **settings)
    for iteration in range(start, stop):
        periodic.step(iteration)
    return periodic


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "last_checkpoint")


def pointer(folder: Path) -> str:
    return (folder / "last_checkpoint").read_text()


@pytest.mark.parametrize(
    ("stop", "max_iter", "expected"),
    [
        (25, 25, ["model_0000009.pth", "model_0000019.pth", "model_final.pth"]),
        (20, 20, ["model_0000009.pth", "model_final.pth"]),  # once
        (20, None, ["model_0000009.pth", "model_0000019.pth"]),
    ],
)
def test_each_period_and_a_known_end_are_saved(
    stop: int, max_iter: int | None, expected: list[str], tmp_path: Path
) -> None:
    run(tmp_path, 0, stop, period=10, max_iter=max_iter)
    assert files(tmp_path) == expected
    assert pointer(tmp_path) == expected[-1]
    iterations = [
        load_file(tmp_path / name)["iteration"] for name in (expected[0], expected[-1])
    ]
    assert iterations == [9, stop - 1]


def test_more_entries_are_saved_along(tmp_path: Path) -> None:
    periodic = PeriodicCheckpointer(
        Checkpointer(nn.Linear(1, 1), tmp_path), 1, max_iter=2
    )
    periodic.step(0, epoch=3)
    periodic.step(1, epoch=4)
    periodic.save("by_hand", note="x")
    assert load_file(tmp_path / "model_0000000.pth")["epoch"] == 3
    assert load_file(tmp_path / "model_final.pth")["epoch"] == 4
    assert load_file(tmp_path / "by_hand.pth")["note"] == "x"


@pytest.mark.parametrize(
    "settings", [{"period": 0}, {"period": 2.5}, {"period": 1, "max_to_keep": 0}]
)
def test_a_period_or_count_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    name, value = list(settings.items())[-1]
    with pytest.raises(
        ValueError, match=f"{name} must be a whole number.*at least 1.*got {value}"
    ):
        PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1)), **settings)


def test_whole_numbers_may_be_floats(tmp_path: Path) -> None:
    run(tmp_path, 0, 4, period=1e0, max_to_keep=2e0)
    assert files(tmp_path) == ["model_0000002.pth", "model_0000003.pth"]


def test_the_newest_are_kept_also_after_a_resume_and_the_others_left_alone(
    tmp_path: Path,
) -> None:
    others = ["ema_0000004", "model_0090009", "model_best"]  # one of a longer run
    for other in others:
        Checkpointer(nn.Linear(1, 1), tmp_path).save(other, tag=False)
    for start, stop, keep, kept in ((0, 30, 3, (9, 19, 29)), (30, 50, 2, (39, 49))):
        run(tmp_path, start, stop, period=10, max_to_keep=keep)
        expected = [*others, *(f"model_{i:07d}" for i in kept)]
        assert files(tmp_path) == sorted(f"{name}.pth" for name in expected)
        assert pointer(tmp_path) == f"model_{stop - 1:07d}.pth"
    run(tmp_path, 50, 55, period=10, max_iter=55, max_to_keep=1)
    expected = [
        *others,
        "model_0000039",
        "model_0000049",
        "model_final",
    ]  # none was numbered
    assert files(tmp_path) == sorted(f"{name}.pth" for name in expected)


def test_a_process_that_does_not_write_deletes_nothing(tmp_path: Path) -> None:
    run(tmp_path, 0, 30, period=10)
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, save_to_disk=False)
    PeriodicCheckpointer(checkpointer, 10, max_to_keep=1).step(39)
    assert len(files(tmp_path)) == 3
    PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), ""), 10, max_to_keep=1).step(39)


def test_the_resume_point_is_not_deleted(tmp_path: Path) -> None:
    run(tmp_path, 0, 20, period=10)

    class KeepsThePointer(Checkpointer):
        def save(self, name: str, *, tag: bool = True, **extra: Any) -> None:
            super().save(name, tag=False, **extra)

    (tmp_path / "last_checkpoint").write_text("model_0000009.pth")
    checkpointer = KeepsThePointer(nn.Linear(1, 1), tmp_path)
    PeriodicCheckpointer(checkpointer, 10, max_to_keep=1).step(29)
    assert files(tmp_path) == ["model_0000009.pth", "model_0000029.pth"]


def test_nothing_is_deleted_while_the_newest_file_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save_badly(state: dict[str, Any], path: str) -> None:
        write_file(state, path)
        os.truncate(path, os.path.getsize(path) - 1)

    run(tmp_path, 0, 20, period=10)
    monkeypatch.setattr(checkpointer, "write_file", save_badly)
    run(tmp_path, 29, 30, period=10, max_to_keep=1)
    assert files(tmp_path) == [f"model_{i:07d}.pth" for i in (9, 19, 29)]
    assert "Keeping all older checkpoints, since the newest is broken" in caplog.text
    assert "model_0000029.pth" in caplog.text


def test_a_file_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 0, 10, period=10)

    def remove(path: Path, **options: bool) -> None:
        if path.suffix == ".pth":
            raise PermissionError(errno.EACCES, "not yours", path)
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", remove)
        run(tmp_path, 10, 20, period=10, max_to_keep=1)
    assert "not yours" in caplog.text
    assert files(tmp_path) == ["model_0000009.pth", "model_0000019.pth"]


def test_a_stale_final_file_of_a_shorter_run_is_not_the_newest(tmp_path: Path) -> None:
    run(tmp_path, 0, 20, period=10, max_iter=20)
    run(tmp_path, 20, 45, period=10, max_iter=100)
    assert pointer(tmp_path) == "model_0000039.pth"
    (tmp_path / "last_checkpoint").unlink()
    assert Checkpointer(nn.Linear(1, 1), tmp_path).resume_or_load("")["iteration"] == 39


def test_another_failure_than_a_full_disk_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    periodic = run(tmp_path, 0, 10, period=10)

    def replace(source: Any, target: Any) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="the disk failed"):
            periodic.step(19)


def fill_the_disk(folder: Path) -> dict[str, Any]:
    """Runs in a process of its own, as the limit on the size of files holds for all of it."""
    records: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("hooktrain").addHandler(Collect())
    checkpointer = Checkpointer(nn.Linear(300, 300), folder)
    periodic = PeriodicCheckpointer(checkpointer, 10, max_iter=50, max_to_keep=1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    seen: dict[str, Any] = {"records": records}
    periodic.step(9)
    good = (folder / "model_0000009.pth").read_bytes()

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    periodic.step(19)
    seen["while full"] = files(folder)
    try:
        checkpointer.save("model_0000009", iteration=0)
    except OSError as error:
        seen["overwriting"] = (error.errno, str(error))
    seen["old file intact"] = (folder / "model_0000009.pth").read_bytes() == good
    try:
        periodic.step(49)
    except OSError as error:
        seen["the last save"] = error.errno

    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    seen["resumed at"] = checkpointer.resume_or_load("")["iteration"]
    periodic.step(29)
    seen["after"] = files(folder)
    return seen


def test_a_full_disk_costs_one_save_and_not_the_run(tmp_path: Path) -> None:
    (seen,) = run_ranks(fill_the_disk, 1, tmp_path)
    assert seen["while full"] == ["model_0000009.pth"]
    assert seen["old file intact"]
    number, message = seen["overwriting"]
    assert number == errno.EFBIG
    assert str(tmp_path / "model_0000009.pth") in message
    assert "bytes free" in message
    assert seen["the last save"] == errno.EFBIG
    assert seen["resumed at"] == 9
    assert seen["after"] == ["model_0000029.pth"]
    (error,) = [record for record in seen["records"] if record.startswith("ERROR")]
    assert "NOT SAVED" in error
    assert "model_0000019.pth" in error
    assert "bytes free" in error
    assert "the next attempt is in 10 iterations" in error
