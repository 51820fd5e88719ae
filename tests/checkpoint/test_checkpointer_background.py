"""The Checkpointer saving in the background: files and, by one process, folders of shards."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import Counter, equal, model_of
from torch import nn

from hooktrain.checkpoint import (
    Checkpointer,
    PeriodicCheckpointer,
    checkpointer as checkpointer_module,
    folders,
)
from hooktrain.checkpoint.files import write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.utils.file_io import is_disk_full

LIMIT = 20.0
FULL = OSError(errno.ENOSPC, "no space left for this one")
BROKEN = OSError(errno.EIO, "the disk failed")


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def shards(request: pytest.FixtureRequest) -> bool:
    """Whether folders are saved."""
    return bool(request.param)


@contextmanager
def writing_by(write: Callable[..., None]) -> Iterator[None]:
    """What writes all of a file, or a part of each folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer_module, "write_file", write)
        patch.setattr(folders, "write_file", write)
        yield


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Writing goes on when it is set."""
    event = threading.Event()

    def wait_and_save(*args: Any) -> None:
        assert event.wait(LIMIT)
        write_file(*args)

    with writing_by(wait_and_save):
        yield event


def failing(error: Exception, saves: int = 1) -> Callable[..., None]:
    """Writes that fail so many times."""
    left = saves

    def save(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error
        write_file(*args)

    return save


def names(folder: Path) -> list[str]:
    return sorted(
        p.name.removesuffix(".pth") for p in folder.iterdir() if ".tmp-" not in p.name
    )


def pointer(folder: Path) -> str:
    return (folder / "last_checkpoint").read_text().removesuffix(".pth")


def checkpoint(folder: Path, name: str, shards: bool) -> Any:
    return read_checkpoint(str(folder / (name if shards else f"{name}.pth")))


def test_what_is_saved_is_the_state_of_the_call_as_in_the_foreground(
    shards: bool, go: threading.Event, tmp_path: Path
) -> None:
    model, trainer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), Counter(5)
    checkpointers = [
        Checkpointer(
            model,
            tmp_path / name,
            background=name == "b",
            sharded=shards,
            trainer=trainer,
        )
        for name in ("a", "b")
    ]
    go.set()
    checkpointers[0].save("x", iteration=9, note=[torch.ones(2), "text"])
    go.clear()
    checkpointers[1].save("x", iteration=9, note=[torch.ones(2), "text"])
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 1
    trainer.value = 6
    go.set()
    checkpointers[1].wait()
    states = [checkpoint(tmp_path / name, "x", shards) for name in ("a", "b")]
    assert equal(*states)
    assert states[0]["trainer"]["value"] == 5
    assert not torch.equal(states[0]["model"]["0.weight"], model[0].weight)


LOOKS: dict[str, Callable[[Checkpointer], Any]] = {
    "has": lambda c: c.has_checkpoint(),
    "file": lambda c: c.get_checkpoint_file(),
    "files": lambda c: c.get_all_checkpoint_files(),
    "resume": lambda c: c.resume_or_load(""),
    "load": lambda c: c.load(os.path.join(c.save_dir, "a" if c.sharded else "a.pth")),
    "tag": lambda c: c.tag_last_checkpoint("a" if c.sharded else "a.pth") or True,
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_waits_first(look: str, shards: bool, tmp_path: Path) -> None:
    def save_late(*args: Any) -> None:
        threading.Event().wait(0.02)
        write_file(*args)

    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    with writing_by(save_late):
        checkpointer.save("a", iteration=1)
        assert LOOKS[look](checkpointer)


@pytest.mark.parametrize("look", [*LOOKS, "save", "wait", "give up"])
def test_what_failed_in_the_background_is_raised_once_by_the_next_call(
    look: str, shards: bool, tmp_path: Path
) -> None:
    more: dict[str, Callable[[Checkpointer], Any]] = {
        "save": lambda c: c.save("b"),
        "wait": lambda c: c.wait(),
        "give up": lambda c: c.give_up(),
    }
    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    with writing_by(failing(BROKEN)):
        checkpointer.save("a")
        with pytest.raises(OSError, match="the disk failed"):
            {**LOOKS, **more}[look](checkpointer)
    assert names(tmp_path) == []
    checkpointer.wait()
    checkpointer.save("c")
    checkpointer.wait()
    assert names(tmp_path) == ["c", "last_checkpoint"]


@pytest.mark.parametrize("background", [False, True])
def test_callbacks_tell_when_it_is_there_and_what_failed(
    background: bool, shards: bool, tmp_path: Path
) -> None:
    seen: list[Any] = []
    checkpointer = Checkpointer(
        model_of(1), tmp_path, background=background, sharded=shards
    )

    def saved(path: str) -> None:
        assert pointer(tmp_path) == "a"
        seen.append(os.path.relpath(path, tmp_path))
        seen.append(threading.current_thread() is threading.main_thread())

    checkpointer.save("a", on_saved=saved)
    checkpointer.wait()
    assert seen == ["a" if shards else "a.pth", not background]
    with writing_by(failing(FULL)):
        checkpointer.save("b", on_saved=saved, on_full=seen.append)
        checkpointer.wait()
    assert is_disk_full(seen[2])
    assert len(seen) == 3
    assert checkpoint(tmp_path, "a", shards).keys() == {"model"}


def test_a_failure_is_told_before_the_next_state_is_taken(
    shards: bool, tmp_path: Path
) -> None:
    trainer = Counter(1)
    checkpointer = Checkpointer(
        model_of(1), tmp_path, background=True, sharded=shards, trainer=trainer
    )
    with writing_by(failing(FULL)):
        checkpointer.save("a", on_full=lambda error: setattr(trainer, "value", 2))
        checkpointer.save("b")
        checkpointer.wait()
    assert checkpoint(tmp_path, "b", shards)["trainer"]["value"] == 2


def test_old_ones_are_deleted_and_the_pointer_moves_only_when_the_new_one_is_there(
    shards: bool, go: threading.Event, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    periodic = PeriodicCheckpointer(checkpointer, 10, max_iter=50, max_to_keep=2)
    go.set()
    for iteration in range(20):
        periodic.step(iteration)
    checkpointer.wait()
    go.clear()
    periodic.step(29)
    assert names(tmp_path) == ["last_checkpoint", "model_0000009", "model_0000019"]
    assert pointer(tmp_path) == "model_0000019"
    go.set()
    periodic.step(39)
    periodic.step(49)
    assert names(tmp_path) == [
        "last_checkpoint",
        "model_0000029",
        "model_0000039",
        "model_final",
    ]
    assert pointer(tmp_path) == "model_final"


def test_a_full_disk_costs_one_save_and_not_the_run(
    shards: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    periodic = PeriodicCheckpointer(checkpointer, 10, max_iter=50, max_to_keep=1)
    periodic.step(9)
    checkpointer.wait()
    with writing_by(failing(FULL)):
        periodic.step(19)
        periodic.step(29)
        assert "NOT SAVED: [Errno 28] no space" in caplog.text
        assert "Training goes on; the next attempt is in 10 iterations" in caplog.text
        checkpointer.wait()
    assert names(tmp_path) == ["last_checkpoint", "model_0000029"]
    with writing_by(failing(FULL, saves=2)):
        periodic.step(39)
        with pytest.raises(OSError, match="no space"):
            periodic.step(49)
    assert names(tmp_path) == ["last_checkpoint", "model_0000029"]


def test_what_cannot_be_saved_is_refused_at_once(shards: bool, tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    with pytest.raises(TypeError, match=r"cannot save note of type builtins\.object"):
        checkpointer.save("a", note=object())
    assert names(tmp_path) == []


def test_a_save_that_ctrl_c_did_not_wait_for_can_still_be_finished(
    shards: bool, go: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    checkpointer.save("a")

    def ctrl_c(thread: threading.Thread, seconds: float | None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.wait()
    go.set()
    checkpointer.give_up()  # as at the end of a run that failed
    assert pointer(tmp_path) == "a"
    assert names(tmp_path) == ["a", "last_checkpoint"]
