import subprocess
import sys
from pathlib import Path

import pytest

from hooktrain.utils.folder_lock import lock_folder

HOLD = """
import sys
from hooktrain.utils.folder_lock import lock_folder
lock_folder(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_by_another_run_is_refused_until_that_is_gone(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(RuntimeError, match=rf"in use by another run \(process {other.pid}\)"):
            lock_folder(tmp_path)
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    lock_folder(tmp_path)


def test_the_same_process_may_lock_again(tmp_path: Path) -> None:
    lock_folder(tmp_path)
    lock_folder(str(tmp_path))


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path / "missing")
