"""What checkpoint files may hold: types, faults of the disk, malicious content."""

import errno
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_toys import equal, small_state

from hooktrain.checkpoint.storage import (
    CorruptCheckpointError,
    load_file,
    save_file,
    verify_file,
)


class RunsCode:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("content", [b"", b"hello" * 100, b"PK\x03\x04hello", pickle.dumps({})])
def test_an_empty_or_foreign_file_is_corrupt(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(content)
    for read in (verify_file, load_file):
        with pytest.raises(CorruptCheckpointError, match=r"a\.pth"):
            read(tmp_path / "a.pth")


def test_a_zip_file_of_another_program_is_corrupt(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as file:
        file.writestr("word/document.xml", "<xml/>")
    with pytest.raises(CorruptCheckpointError, match=r"not of torch\.save"):
        verify_file(tmp_path / "a.pth")


def test_a_missing_file_is_not_called_corrupt(tmp_path: Path) -> None:
    for read in (verify_file, load_file):
        with pytest.raises(FileNotFoundError, match=r"none\.pth"):
            read(tmp_path / "none.pth")


def test_a_file_of_the_old_format_loads(tmp_path: Path) -> None:
    state, path = small_state(), tmp_path / "a.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert equal(load_file(path), state)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorruptCheckpointError, match=r"a\.pth"):
        load_file(path)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(new_format: bool, tmp_path: Path) -> None:
    path, trace = tmp_path / "a.pth", tmp_path / "the code ran"
    torch.save({"model": RunsCode(trace)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CorruptCheckpointError, match=r"refused.*mkdir.*Nothing was run"):
        load_file(path)
    path.write_bytes(pickle.dumps(RunsCode(trace)))
    with pytest.raises(CorruptCheckpointError):
        load_file(path)
    assert not trace.exists()


def test_no_environment_variable_makes_loading_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"model": RunsCode(tmp_path / "the code ran")}, tmp_path / "a.pth")
    with pytest.raises(CorruptCheckpointError, match="refused"):
        load_file(tmp_path / "a.pth")
    assert not (tmp_path / "the code ran").exists()


class FailingFile(io.BytesIO):
    def __init__(self, failing_write: int) -> None:
        super().__init__()
        self.left = failing_write

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "the disk failed")
        return super().write(data)


def test_a_failure_of_any_write_comes_out_as_the_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = FailingFile(-1)
    torch.save(small_state(), counting)
    writes = -1 - counting.left
    assert writes > 20
    save_file({"old": 1}, tmp_path / "a.pth")
    real_open = open
    for n in range(1, writes + 1):

        def open_failing(path: Any, mode: str = "r", *args: Any, n: int = n, **kwargs: Any) -> Any:
            file = real_open(path, mode, *args, **kwargs)
            if mode == "wb":
                failing = FailingFile(n)
                real_write = file.write

                def write(data: Any) -> int:
                    failing.write(data)
                    return real_write(data)

                return WithWrite(file, write)
            return file

        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", open_failing)
            with pytest.raises(OSError, match="the disk failed"):
                save_file(small_state(), tmp_path / "a.pth")
        assert load_file(tmp_path / "a.pth") == {"old": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["a.pth"]


class WithWrite:
    """An open file with another ``write``."""

    def __init__(self, file: Any, write: Any) -> None:
        self.file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "WithWrite":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
