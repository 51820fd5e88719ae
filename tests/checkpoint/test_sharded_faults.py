"""Broken sharded folders are not loaded, and a save that is broken off leaves the one before."""

import errno
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_toys import FILES, copy_of, names, save, state_of
from storage_toys import equal
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hooktrain.checkpoint import folder as folder_module
from hooktrain.checkpoint import shards
from hooktrain.checkpoint.folder import sweep_temporary_folders
from hooktrain.checkpoint.manifest import (
    FileRecord,
    read_manifest,
    record_of,
    verify_folder,
    write_manifest,
)
from hooktrain.checkpoint.sharded_loading import load_sharded
from hooktrain.checkpoint.storage import CorruptCheckpointError
from hooktrain.utils.file_io import is_disk_full


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def must_not_read(*args: Any) -> None:
    raise AssertionError("a tensor was read before the files were verified")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "hole", "empty", "remove"])
def test_a_damaged_file_is_named_before_anything_is_read(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a", 1) / name
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        flip(path, len(data) // 2)
    elif damage == "hole":
        path.write_bytes(data[:100] + bytes(100) + data[200:])
    else:
        path.write_bytes(data[:-1] if damage == "truncate" else b"")
    monkeypatch.setattr(shards._Reader, "read_metadata", must_not_read)
    monkeypatch.setattr(torch, "load", must_not_read)
    for read in (load_sharded, verify_folder):
        with pytest.raises(CorruptCheckpointError, match=re.escape(name)):
            read(tmp_path / "a")


def test_no_flipped_bit_of_the_manifest_is_taken_for_another_value(tmp_path: Path) -> None:
    path = save(tmp_path / "a", 1) / "manifest.json"
    good, content = path.read_bytes(), read_manifest(tmp_path / "a")
    for position in range(0, len(good), 3):
        flip(path, position)
        with suppress(CorruptCheckpointError):
            assert read_manifest(tmp_path / "a") == content  # white space
        path.write_bytes(good)


def test_no_folder_is_told_from_a_broken_one(tmp_path: Path) -> None:
    for read in (load_sharded, verify_folder):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            read(tmp_path / "a")
        with pytest.raises(CorruptCheckpointError, match=r"it has no manifest\.json"):
            read(tmp_path)


def forge(folder: Path, metadata: bytes) -> Path:
    """Replace the metadata, and make the manifest fit it."""
    (folder / ".metadata").write_bytes(metadata)
    files = {n: record_of(folder / n) for n in names(folder) if n != "manifest.json"}
    write_manifest(folder, files, world_size=1, torch="")
    return folder


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_the_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = forge(save(tmp_path / "a", 1), pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(CorruptCheckpointError, match=r"asks for \w+\.mkdir\. Nothing was run"):
        load_sharded(folder)
    assert names(tmp_path) == ["a"]


def test_metadata_can_neither_hold_pickles_nor_refer_to_other_files(tmp_path: Path) -> None:
    good = save(tmp_path / "a", 1)
    metadata = shards._Reader(good).read_metadata()
    metadata.state_dict_metadata["model.w"] = BytesStorageMetadata()
    with pytest.raises(CorruptCheckpointError, match=r"'model\.w', which is no tensor"):
        load_sharded(forge(copy_of(good, tmp_path / "b"), pickle.dumps(metadata)))
    metadata = shards._Reader(good).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../a/__0_0.distcp"
    with pytest.raises(CorruptCheckpointError, match="refers to files it does not have"):
        load_sharded(forge(copy_of(good, tmp_path / "c"), pickle.dumps(metadata)))


def test_a_manifest_cannot_refer_to_files_elsewhere(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 1)
    record = record_of(folder / "state.pth")
    write_manifest(folder, {"../a/state.pth": FileRecord(*record)})
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        verify_folder(folder)


def test_a_manifest_of_a_later_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 1)
    write_manifest(folder, {}, format=2)
    assert json.loads((folder / "manifest.json").read_text())["content"]["format"] == 2
    with pytest.raises(CorruptCheckpointError, match="has the format 2; this version reads 1"):
        verify_folder(folder)


class Killed(BaseException):
    """As a kill: nobody catches it to clean up."""


def break_at(patch: pytest.MonkeyPatch, n: int, error: BaseException) -> list[str]:
    """Let the n-th of the calls that change a folder raise, and the later ones if it is a kill."""
    made: list[str] = []

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) == n or (len(made) > n and isinstance(error, Killed)):
                raise error
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir"):
        patch.setattr(os, name, faulty(name, getattr(os, name)))
    patch.setattr(shutil, "rmtree", faulty("rmtree", shutil.rmtree))
    return made


@pytest.mark.parametrize("replace", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), Killed()], ids=["fails", "killed"])
def test_whatever_call_breaks_the_old_or_the_new_one_is_there(
    error: BaseException, replace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    for n in range(1, 100):
        parent = tmp_path / str(n)
        parent.mkdir()
        target = parent / "a"
        if replace:
            save(target, 1)
        with monkeypatch.context() as patch:
            made = break_at(patch, n, error)
            try:
                save(target, 2)
                broke = False
            except (OSError, Killed):
                broke = True
        if n > len(made):
            break
        if isinstance(error, OSError):
            assert target.exists() or not replace
        monkeypatch.setattr(folder_module, "_in_progress", set())  # as in another process
        sweep_temporary_folders(parent)
        assert names(parent) in ([], ["a"])
        found = load_sharded(target)["iteration"] if target.exists() else None
        assert found is None or equal(load_sharded(target), state_of(found))
        assert found in ({1, 2} if replace else {None, 2})
        assert broke or found == 2
        outcomes.add((broke, found))
    assert not broke
    assert n > 10
    assert {(True, 1 if replace else None), (True, 2)} <= outcomes


def test_an_error_leaves_nothing_to_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 1)
    with monkeypatch.context() as patch:
        break_at(patch, 2, OSError(errno.EIO, "broken"))
        with pytest.raises(OSError, match="broken"):
            save(tmp_path / "b", 2)
    assert names(tmp_path) == ["a"]


def test_folders_of_living_processes_are_not_swept(tmp_path: Path) -> None:
    for process in (os.getppid(), 2**22 + 1):
        (tmp_path / f"a.tmp-{process}-01234567").mkdir()
    (tmp_path / "a.tmp-x").mkdir()
    swept = [path.name for path in sweep_temporary_folders(tmp_path)]
    assert swept == [f"a.tmp-{2**22 + 1}-01234567"]
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("limit", [500, 3_000])
def test_a_full_disk_says_so_and_keeps_the_old_folder(limit: int, tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(OSError, match=r"no space to write .*bytes free") as caught:
            save(tmp_path / "a", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert is_disk_full(caught.value)
    assert names(tmp_path) == ["a"]
    assert equal(load_sharded(tmp_path / "a"), state_of(1))


def test_all_is_on_the_disk_before_the_folder_gets_its_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = []

    def fsync(descriptor: int) -> None:
        trace.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def rename(source: Any, target: Any) -> None:
        real(source, target)
        if Path(target).parent == tmp_path:
            trace.append("renamed")

    real = os.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path / "a", 1)
    kinds = [re.sub(r"tmp-\d+-\w+", "tmp", name) for name in trace]
    assert kinds == [
        "__0_0.distcp",
        ".state.pth.tmp",
        "a.tmp",
        ".metadata.tmp",
        ".manifest.json.tmp",
        "a.tmp",
        "renamed",
        tmp_path.name,
    ]
