"""Files and folders that are the old or the new one, whatever fails."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hooktrain
from faults import fail_at_write
from hooktrain.utils.file_io import atomic_write, delete, replacing, sweep


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def write(path: Path, *parts: bytes, then: BaseException | None = None) -> None:
    with atomic_write(path) as file:
        for part in parts:
            file.write(part)
        if then is not None:
            raise then


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_new_file_takes_its_place_when_the_block_ends_wherever_the_process_is_then(
    old: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    if old is not None:
        path.write_bytes(old)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with atomic_write("a.bin") as file:
        monkeypatch.chdir(tmp_path / "elsewhere")
        file.write(b"new")
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == old
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.bin", "elsewhere"]


@pytest.mark.parametrize("error", [ValueError("poison"), KeyboardInterrupt()])
def test_an_error_in_the_block_leaves_the_old_file(
    tmp_path: Path, error: BaseException
) -> None:
    if isinstance(error, KeyboardInterrupt):  # which is not taken for a full disk
        error.__context__ = OSError(errno.ENOSPC, "full")
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(type(error)) as caught:
        write(path, b"new", then=error)
    assert caught.value is error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


FAULTS = ("write 1", "write 2", "write 3", "fsync", "replace")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("old", [b"old", None])
def test_a_failure_at_any_call_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, old: bytes | None
) -> None:
    def fail(*args: object) -> None:
        raise error

    path, error = tmp_path / "a.bin", OSError(errno.EIO, "injected")
    if old is not None:
        path.write_bytes(old)
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        if fault.startswith("write"):
            fail_at_write(patch, int(fault[-1]), error)
        else:
            patch.setattr(os, fault, fail)
        with pytest.raises(OSError, match="injected") as caught:
            write(path, b"n", b"e", b"w")
    assert caught.value.errno == errno.EIO
    assert names(tmp_path) == before
    assert old is None or path.read_bytes() == old


def test_the_file_reaches_the_disk_before_its_name_and_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        size = "" if path.is_dir() else f" with {os.fstat(descriptor).st_size} bytes"
        trace.append(f"fsync {'folder' if path == tmp_path else 'temporary'}{size}")
        fsync(descriptor)

    def traced_replace(source: Path, target: Path) -> None:
        assert source.parent == target.parent == tmp_path
        trace.append(f"replace {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"12345")
        trace.append("write")
    assert trace == [
        "write",
        "fsync temporary with 5 bytes",
        "replace a.bin",
        "fsync folder",
    ]


CANNOT = ["EINVAL", "EBADF", "ENOSYS", "EOPNOTSUPP"]


@pytest.mark.parametrize("name", [*CANNOT, "EIO"])
def test_a_file_system_that_cannot_flush_folders_is_told_of_once_and_a_failing_one_is_an_error(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fsync = os.fsync

    def fsync_files_only(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(getattr(errno, name), "injected")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files_only)
    for content in (b"one", b"two"):
        if name in CANNOT:
            write(tmp_path / "a.bin", content)
        else:
            with pytest.raises(OSError, match="injected"):
                write(tmp_path / "a.bin", content)
        assert (tmp_path / "a.bin").read_bytes() == content
    assert names(tmp_path) == ["a.bin"]
    assert caplog.text.count(f"{tmp_path} cannot flush folders") == (name in CANNOT)


def save_by_torch(file: Any) -> None:
    torch.save({"a": torch.zeros(1000), "b": torch.ones(1000)}, file)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_the_path_and_the_free_space_also_where_torch_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1234))
    writes: list[Callable[[Any], object]] = [
        lambda file: file.write(b"new"),
        save_by_torch,
    ]
    for n, fill in [(1, writes[0]), *((n, writes[1]) for n in range(1, 6))]:
        fail_at_write(monkeypatch, n, OSError(number, "full"))
        with (
            pytest.raises(OSError, match="1,234 bytes free") as caught,
            atomic_write(path) as file,
        ):
            fill(file)
        assert caught.value.errno == number
        assert f"no space to write {path}: " in str(caught.value)
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["a.bin"]


OWNER = "-1-0123abcd"  # in a container, number 1 may be that of any process


def test_what_nobody_is_writing_is_swept_and_what_has_another_name_stays(
    tmp_path: Path,
) -> None:
    left = [f".a.bin.tmp{OWNER}", f".a.bin.tmp{OWNER}.lock", f".b.tmp{OWNER}.lock"]
    others = [
        *(
            ".lock",
            f".tmp{OWNER}",
            f".a.bin.tmp{OWNER}.bak",
            ".a.bin.tmp-1",
            f"a.bin.tmp{OWNER}",
        ),
        "model.pth",
    ]
    for name in [*left, *others]:
        (tmp_path / name).touch()
    folder_of(tmp_path / f".c.tmp{OWNER}", "half")
    (tmp_path / f".d.tmp{OWNER}").symlink_to(tmp_path)
    sweep(str(tmp_path))
    assert names(tmp_path) == sorted(others)


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_being_written_is_not_swept_by_whomever_and_through_a_link(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 999_999_999)  # as in another container
        with replacing(folder / "a") as temporary:
            folder_of(temporary, "new") if is_folder else temporary.write_text("new")
            sweep(tmp_path / "link")
            command = [sys.executable, "-c", SWEEPS, str(folder)]
            subprocess.run(command, env=WITH_PACKAGE, timeout=30, check=True)
    assert names(folder) == ["a"]


WITH_PACKAGE = {**os.environ, "PYTHONPATH": str(Path(hooktrain.__file__).parent.parent)}
SWEEPS = "import sys; from hooktrain.utils.file_io import sweep; sweep(sys.argv[1])"


def test_without_locks_files_are_written_all_the_same_and_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    left = [f".a.bin.tmp{OWNER}", f".a.bin.tmp{OWNER}.lock"]
    for name in left:
        (tmp_path / name).touch()
    write(tmp_path / "a.bin", b"one")
    sweep(tmp_path)
    assert names(tmp_path) == [*left, "a.bin"]
    assert f"Cannot sweep {tmp_path / left[0]}" in caplog.text


def test_what_may_not_be_removed_is_told_and_the_rest_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(".a"):
            raise PermissionError(errno.EACCES, "not yours")
        os.unlink(path)

    for name in (f".a.tmp{OWNER}", f".b.tmp{OWNER}"):
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "unlink", remove)
    sweep(tmp_path)
    assert names(tmp_path) == [f".a.tmp{OWNER}"]
    assert "not yours" in caplog.text


def folder_of(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_a_file_does_not_take_the_place_of_a_folder(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", "old")
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "a", b"new")
    assert (tmp_path / "a" / "file").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_folder_that_was_moved_aside_for_another_is_put_back_unless_its_place_is_taken(
    tmp_path: Path,
) -> None:
    aside = f"a.old{OWNER}"
    folder_of(tmp_path / aside, "old")
    sweep(tmp_path)
    assert (tmp_path / "a" / "file").read_text() == "old"
    with replacing(tmp_path / "a") as temporary:
        folder_of(temporary, "new")
        assert (tmp_path / "a" / "file").read_text() == "old"
    folder_of(tmp_path / aside, "older")
    sweep(tmp_path)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "new"


def test_a_folder_that_is_deleted_loses_its_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError("no more")

    folder_of(tmp_path / "a", "x")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.raises(OSError, match="no more"):
            delete(tmp_path / "a")
    (left,) = names(tmp_path)
    assert left.startswith(".a.tmp-")
    sweep(tmp_path)
    assert names(tmp_path) == []
    delete(folder_of(tmp_path / "b", "x"))
    (tmp_path / "c").touch()
    delete(tmp_path / "c")
    assert names(tmp_path) == []
