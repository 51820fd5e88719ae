import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_io_toys import fail_at_write, names, write

from hooktrain.utils.file_io import atomic_write


def test_a_new_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"one")
        assert not (tmp_path / "a.bin").exists()
    assert (tmp_path / "a.bin").read_bytes() == b"one"
    assert names(tmp_path) == ["a.bin"]


def test_an_old_file_stays_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with atomic_write(str(path)) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_text_is_written_in_utf_8(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "a.txt", "w") as file:
        file.write("ü")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xbc"


def test_a_bare_name_is_a_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with atomic_write("a.bin") as file:
        file.write(b"one")
    assert (tmp_path / "a.bin").read_bytes() == b"one"


def test_the_target_stays_the_same_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with atomic_write("a.bin") as file:
        monkeypatch.chdir(tmp_path / "elsewhere")
        file.write(b"one")
    assert names(tmp_path) == ["a.bin", "elsewhere"]


@pytest.mark.parametrize("mode", ["ab", "r+b", "x"])
def test_other_modes_are_refused(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(ValueError, match="mode must be 'wb' or 'w'"), atomic_write("a", mode):
        pass


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"), atomic_write(tmp_path / "missing/a"):
        pass


@pytest.mark.parametrize("error", [ValueError("poison"), KeyboardInterrupt()])
def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(type(error)) as caught:
        write(path, b"new", then=error)
    assert caught.value is error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, name, fail)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "write 1": lambda m: fail_at_write(m, 1, OSError(errno.EIO, "injected")),
    "write 2": lambda m: fail_at_write(m, 2, OSError(errno.EIO, "injected")),
    "write 3": lambda m: fail_at_write(m, 3, OSError(errno.EIO, "injected")),
    "fsync": lambda m: fail_at(m, "fsync"),
    "replace": lambda m: fail_at(m, "replace"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("old", [b"old", None])
def test_a_failure_at_any_call_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, old: bytes | None
) -> None:
    path = tmp_path / "a.bin"
    if old is not None:
        path.write_bytes(old)
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
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
    assert trace == ["write", "fsync temporary with 5 bytes", "replace a.bin", "fsync folder"]


def test_a_folder_that_cannot_be_flushed_is_no_error_where_there_is_no_such_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fsync_files_only(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files_only)
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"one")
    assert (tmp_path / "a.bin").read_bytes() == b"one"


def test_a_failure_to_flush_the_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fsync_files_only(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(errno.EIO, "injected")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files_only)
    with pytest.raises(OSError, match="injected"), atomic_write(tmp_path / "a.bin") as file:
        file.write(b"one")
    assert names(tmp_path) == ["a.bin"]
