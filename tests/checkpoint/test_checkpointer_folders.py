"""Folders of shards beside files: found, passed over, loaded and deleted alike. One process."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import Counter, messages, model_of
from torch import nn

from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    PeriodicCheckpointer,
    load_checkpoint,
)
from hooktrain.checkpoint.files import save_file
from hooktrain.checkpoint.folders import save_folder


def save(
    folder: Path, iteration: int, sharded: bool, name: str = "", **extra: Any
) -> Path:
    """Save a model whose weights are the iteration."""
    name = name or f"model_{iteration:07d}"
    checkpointer = Checkpointer(model_of(iteration), folder, sharded=sharded)
    checkpointer.save(name, iteration=iteration, **extra)
    return folder / (name if sharded else f"{name}.pth")


def resumed(folder: Path, sharded: bool = False) -> int | None:
    """The iteration that a resume arrives at, None if it starts from scratch."""
    model = model_of(-1)
    checkpointer = Checkpointer(model, folder, sharded=sharded)
    iteration = checkpointer.resume_or_load("").get("iteration")
    assert torch.equal(
        model.weight, torch.full((1, 2), -1.0 if iteration is None else iteration)
    )
    assert checkpointer.has_checkpoint() == (iteration is not None)
    return iteration


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_saved_and_loaded_whatever_is_saved_otherwise(
    tmp_path: Path,
) -> None:
    trainer = Counter(5)
    Checkpointer(model_of(3), tmp_path, sharded=True, trainer=trainer).save(
        "a", iteration=9
    )
    assert names(tmp_path) == ["a", "last_checkpoint"]
    assert (tmp_path / "last_checkpoint").read_text() == "a"
    for sharded in (False, True):
        model, trainer = model_of(0), Counter()
        checkpointer = Checkpointer(model, tmp_path, sharded=sharded, trainer=trainer)
        assert checkpointer.get_checkpoint_file() == str(tmp_path / "a")
        assert checkpointer.get_all_checkpoint_files() == [str(tmp_path / "a")]
        assert checkpointer.load(tmp_path / "a") == {"iteration": 9}
        assert torch.equal(model.weight, torch.full((1, 2), 3.0))
        assert trainer.value == 5
    plain = model_of(0)
    assert load_checkpoint(plain, tmp_path / "a")["iteration"] == 9
    assert torch.equal(plain.weight, torch.full((1, 2), 3.0))


def test_a_file_is_loaded_by_one_who_saves_folders(tmp_path: Path) -> None:
    save(tmp_path, 9, sharded=False)
    assert resumed(tmp_path, sharded=True) == 9


def test_who_writes_a_folder_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="all ranks write: save_to_disk is False"):
        Checkpointer(model_of(0), sharded=True, save_to_disk=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files and folders in turn, of two iterations both; the pointer at the newest, a folder."""
    for iteration in (9, 19):
        save(tmp_path, iteration, sharded=False)
        save(tmp_path, iteration + 5, sharded=True)
    save(tmp_path, 99, sharded=True, name="model_best")
    (tmp_path / "last_checkpoint").write_text("model_0000024")
    return tmp_path


def damage(path: Path) -> None:
    if path.is_dir():
        path = path / "state.pth"
    os.truncate(path, path.stat().st_size - 1)


def test_the_newest_good_one_is_resumed_be_it_a_file_or_a_folder(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(folder) == 24
    assert messages(caplog) == ""
    for name, before in [
        ("model_0000024", 19),
        ("model_0000019.pth", 14),
        ("model_0000014", 9),
    ]:
        damage(folder / name)
        assert resumed(folder) == before
        assert f"Passing over the checkpoint {folder / name}: " in messages(caplog)
    damage(folder / "model_0000009.pth")
    with pytest.raises(CorruptCheckpointError, match="is intact") as caught:
        resumed(folder)
    assert [
        line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]
    ] == [
        *("model_0000024", "model_0000019.pth", "model_0000014", "model_0000009.pth"),
    ]


def test_without_a_pointer_the_newest_folder_is_taken_but_not_the_best(
    folder: Path,
) -> None:
    (folder / "last_checkpoint").unlink()
    assert resumed(folder) == 24
    save(folder, 199, sharded=True, name="model_final")
    (folder / "last_checkpoint").unlink()
    assert resumed(folder) == 199


def test_a_folder_that_is_being_written_or_deleted_is_no_checkpoint(
    tmp_path: Path,
) -> None:
    shutil.move(
        save(tmp_path, 9, sharded=True), tmp_path / ".model_0000009.tmp-1-0123abcd"
    )
    assert resumed(tmp_path) is None
    assert Checkpointer(model_of(0), tmp_path).get_all_checkpoint_files() == []


def test_a_folder_that_was_moved_aside_counts_until_it_is_put_back(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, 9, sharded=True, name="model_final")
    aside = str(tmp_path / f"model_final.old-{2**22 + 1}-0123abcd")
    shutil.move(path, aside)  # and killed right then
    assert resumed(tmp_path) == 9
    assert Checkpointer(model_of(0), tmp_path).get_all_checkpoint_files() == [aside]
    save(tmp_path, 4, sharded=False)
    assert names(tmp_path) == ["last_checkpoint", "model_0000004.pth", "model_final"]


def test_a_folder_without_its_manifest_is_a_broken_checkpoint(tmp_path: Path) -> None:
    (save(tmp_path, 9, sharded=True) / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"no manifest\.json"):
        resumed(tmp_path)
    assert resumed(save(tmp_path, 9, sharded=True).parent) == 9  # which may be replaced


def test_what_is_no_checkpoint_is_neither_resumed_from_nor_deleted(
    tmp_path: Path,
) -> None:
    (tmp_path / "model_0000001").mkdir()
    (tmp_path / "model_0000001" / "thesis.txt").touch()
    (tmp_path / "model_0000002").touch()
    (tmp_path / "last_checkpoint").write_text("model_0000001")
    assert resumed(tmp_path) is None
    steps(tmp_path, 10, 30, sharded=True, max_to_keep=1)
    assert names(tmp_path)[1:] == ["model_0000001", "model_0000002", "model_0000029"]


def test_a_strategys_checkpoint_without_a_pointer_is_found_by_the_iteration_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, write in [(9, save_folder), (10, save_file)]:
        state = {"state_dict": model_of(number).state_dict(), "optimizer": {}}
        write({**state, "meta": {"iter": number}}, tmp_path / f"iter_{number}.pth")
    save_file({"state_dict": {}, "meta": {"iter": 99}}, tmp_path / "pretrained.pth")
    model = model_of(-1)
    Checkpointer(model, tmp_path).resume_or_load("")
    assert torch.equal(model.weight, torch.full((1, 2), 10.0))
    assert f"Resuming from {tmp_path / 'iter_10.pth'}" in messages(caplog)


def steps(folder: Path, start: int, stop: int, sharded: bool, **settings: Any) -> None:
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, sharded=sharded)
    periodic = PeriodicCheckpointer(checkpointer, 10, **settings)
    for iteration in range(start, stop):
        periodic.step(iteration)


def test_files_and_folders_are_counted_together(tmp_path: Path) -> None:
    steps(tmp_path, 0, 30, sharded=False)
    steps(tmp_path, 30, 40, sharded=True, max_to_keep=2)
    assert names(tmp_path) == ["last_checkpoint", "model_0000029.pth", "model_0000039"]
    steps(tmp_path, 40, 60, sharded=False, max_to_keep=2)
    assert names(tmp_path) == [
        "last_checkpoint",
        "model_0000049.pth",
        "model_0000059.pth",
    ]
