"""Atomic replacement of files and folders under faults; the lock of a folder."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults import fail_at_write
from hooktrain.utils.file_io import (
    atomic_write,
    delete,
    is_disk_full,
    keep_lock,
    lock_folder,
    replacing,
    sweep,
    temporary_path,
    unlock_folder,
)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def write(path: Path, *parts: bytes, then: BaseException | None = None) -> None:
    with atomic_write(path) as file:
        for part in parts:
            file.write(part)
        if then is not None:
            raise then


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_new_file_takes_its_place_when_the_block_ends(
    old: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    if old is not None:
        path.write_bytes(old)
    monkeypatch.chdir(tmp_path)
    with atomic_write("a.bin") as file:
        monkeypatch.chdir("/")
        file.write(b"new")
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == old
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("poison"),
        KeyboardInterrupt(),
        OSError("without a number"),
        OSError(errno.ENOENT, "missing", "another file"),
    ],
)
def test_an_error_in_the_block_leaves_the_old_file(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    message = str(error)
    with pytest.raises(type(error)) as caught:
        write(path, b"new", then=error)
    assert caught.value is error
    assert str(error) == message
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("fault", ["write 1", "write 3", "fsync", "replace"])
@pytest.mark.parametrize("old", [b"old", None])
def test_a_failure_at_any_call_leaves_the_old_file_alone(
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


def test_a_file_does_not_replace_a_folder(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "a", "old")
    with pytest.raises(IsADirectoryError, match="/a'"):
        write(path, b"new")
    assert names(tmp_path) == ["a"]
    assert (path / "file").read_text() == "old"


def test_what_a_killed_process_of_the_same_number_has_left_is_in_nothing_new(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    folder_of(temporary_path(path), "half")
    with replacing(path) as temporary:
        temporary.mkdir()
    assert names(path) == []


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    write(tmp_path / "a.bin", b"new")
    assert os.listdir("/proc/self/fd") == before


def test_the_file_reaches_the_disk_before_its_name(
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
        trace.append(f"replace {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"12345")
        trace.append("write")
    calls = ["fsync temporary with 5 bytes", "replace a.bin", "fsync folder"]
    assert trace == ["write", *calls]


CANNOT = ["EINVAL", "EBADF", "ENOSYS", "EOPNOTSUPP"]


@pytest.mark.parametrize("name", [*CANNOT, "EIO"])
def test_only_a_file_system_that_cannot_flush_folders_is_forgiven(
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
    assert caplog.text.count(f"Cannot flush {tmp_path}") == (name in CANNOT)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_from_other_errors(number: int) -> None:
    assert is_disk_full(OSError(number, "full"))
    assert not is_disk_full(OSError(errno.EIO, "broken"))
    assert not is_disk_full(RuntimeError("full"))


def folder_of(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


OWNER = "-hooktrain-1-host-2.example"


def test_what_a_killed_process_has_left_is_swept_by_who_locks_the_folder(
    tmp_path: Path,
) -> None:
    unknown = f"{2**64}-{socket.gethostname()}"  # no process has this number
    (tmp_path / f".e.tmp-hooktrain-{unknown}").touch()
    others = [f".tmp{OWNER}", ".a.bin.tmp-1", f"a.bin.tmp{OWNER}", "model.pth"]
    # Names with a date are of other programs.
    others += ["notes.txt.old-2026-11-23", "b.old-2026-11-23", ".n.tmp-2026-11-23"]
    for name in [f".a.bin.tmp{OWNER}", "b", *others]:
        (tmp_path / name).touch()
    folder_of(tmp_path / f".c.tmp{OWNER}", "half")
    (tmp_path / f".d.tmp{OWNER}").symlink_to(tmp_path)
    lock_folder(tmp_path)
    assert names(tmp_path) == sorted([".lock", "b", *others])


def test_what_another_process_of_this_machine_is_writing_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(process: int, number: int) -> None:
        assert number == 0
        if process == 1:
            raise PermissionError
        if process not in (7, os.getpid()):
            raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    host = socket.gethostname()
    owners = [f"7-{host}", f"1-{host}", f"8-{host}", "7-elsewhere", f"7-{host}-2"]
    for owner in [*owners, f"{os.getpid()}-{host}", f"7-{host}.1", f"8-{host}.1"]:
        (tmp_path / f".a.tmp-hooktrain-{owner}").touch()
    sweep(tmp_path)
    left = [f".a.tmp-hooktrain-{owner}" for owner in (f"1-{host}", f"7-{host}")]
    assert names(tmp_path) == [*left, f"{left[1]}.1"]


def test_what_a_killed_process_has_left_is_swept_before_its_parent_waits_for_it(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    (tmp_path / f".a.tmp-hooktrain-{process.pid}-{socket.gethostname()}").touch()
    sweep(tmp_path)
    assert names(tmp_path) == []
    process.wait()


def test_a_folder_that_was_moved_aside_is_put_back_unless_its_place_is_taken(
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


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like NFS, which keeps a deleted file that is still open under another name."""
    unlink = os.unlink

    def keep_open(path: str, *, dir_fd: int | None = None) -> None:
        if path == "file":
            os.rename(path, ".nfs01", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        elif path == ".nfs01":
            raise OSError(errno.EBUSY, "busy", path)
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", keep_open)


@pytest.mark.usefixtures("nfs")
def test_a_folder_with_a_file_that_is_kept_open_is_replaced_as_often_as_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    for content in "1234":
        with replacing(path) as temporary:
            folder_of(temporary, content)
        assert (path / "file").read_text() == content
        assert [name for name in names(tmp_path) if not name.startswith(".")] == ["a"]
    for _ in range(2):
        folder_of(tmp_path / "b", "old")
        with pytest.raises(OSError, match=r"\.b\.tmp"):
            delete(tmp_path / "b")
    folder_of(tmp_path / f"a.old{OWNER}", "of a killed run")
    sweep(tmp_path)
    sweep(tmp_path)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["a"]
    assert "Cannot remove" in caplog.text


def test_a_folder_whose_successor_does_not_get_its_name_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "injected")

    path = folder_of(tmp_path / "a", "old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="injected"), replacing(path) as temporary:
        folder_of(temporary, "new")
    assert names(tmp_path) == ["a"]
    assert (path / "file").read_text() == "old"


def test_a_folder_is_replaced_while_older_ones_cannot_even_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".old-" in Path(source).name:
            raise OSError(errno.EBUSY, "busy")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        for content in "1234":
            with replacing(tmp_path / "a") as temporary:
                folder_of(temporary, content)
    sweep(tmp_path)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "4"


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


HOLD = """
import os, signal, sys
from hooktrain.utils.file_io import lock_folder
lock_folder(sys.argv[1])
begun, begin = os.pipe()
child = os.fork()
if child == 0:
    os.write(begin, b"1")
    signal.pause()
os.read(begun, 1)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_until_that_process_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            with pytest.raises(RuntimeError, match=f"-{other.pid}-"):
                lock_folder(tmp_path)
            (tmp_path / ".lock").write_text("")  # as right after the other has locked
            with pytest.raises(RuntimeError, match="host: unknown"):
                lock_folder(tmp_path)
            other.kill()
            other.wait()
            lock_folder(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_is_missing_is_not_locked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/missing/"):
        lock_folder(tmp_path / "missing")
    assert names(tmp_path) == []


def test_a_folder_that_was_not_locked_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_lock(tmp_path)  # as a single save of a Checkpointer does
    assert names(tmp_path) == []
    assert caplog.messages == []


FORKED = """
import os, sys
from hooktrain.utils.file_io import lock_folder
lock_folder(sys.argv[1])
if os.fork() == 0:
    lock_folder(sys.argv[1])
os.wait()
"""


def test_a_forked_child_does_not_have_the_lock_of_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    assert (
        b"in use by another run" in subprocess.run(command, capture_output=True).stderr
    )


def test_the_threads_of_a_process_share_its_lock(tmp_path: Path) -> None:
    take = "import sys; from hooktrain.utils.file_io import *; lock_folder(sys.argv[1])"
    command = [sys.executable, "-c", take, str(tmp_path)]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lock_folder, tmp_path).result()
        lock_folder(tmp_path)
        assert b"in use" in subprocess.run(command, capture_output=True).stderr
        unlock_folder(tmp_path)
        assert subprocess.run(command, capture_output=True).stderr == b""


def test_the_same_process_may_lock_again_until_it_unlocks(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    lock_folder(tmp_path / "out")
    lock_folder(str(tmp_path / "link"))
    take = "import sys; from hooktrain.utils.file_io import *; lock_folder(sys.argv[1])"
    command = [sys.executable, "-c", take, str(tmp_path / "link")]
    assert b"in use" in subprocess.run(command, capture_output=True).stderr
    unlock_folder(tmp_path / "out")
    assert subprocess.run(command, capture_output=True).stderr == b""


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_on_a_file_system_without_locks_nothing_is_swept(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(getattr(errno, name), "injected")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    left = tmp_path / f".a.bin.tmp{OWNER}"
    left.touch()
    lock_folder(tmp_path)
    assert f"Cannot lock {tmp_path}" in caplog.text
    assert left.exists()
