"""Shared by test_file_io.py and test_file_io_faults.py."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from hooktrain.utils import file_io
from hooktrain.utils.file_io import atomic_write


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def write(path: Path, *parts: bytes, then: BaseException | None = None) -> None:
    with atomic_write(path) as file:
        for part in parts:
            file.write(part)
        if then is not None:
            raise then


class Faulty:
    """A file whose n-th write fails; all else is left to the real one."""

    def __init__(self, file: Any, fails_at: int, error: OSError) -> None:
        self._file, self._left, self._error = file, fails_at, error

    def __enter__(self) -> "Faulty":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._file.write(data)


def fail_at_write(monkeypatch: pytest.MonkeyPatch, n: int, error: OSError) -> None:
    def faulty_open(*args: Any, **kwargs: Any) -> Faulty:
        return Faulty(builtins.open(*args, **kwargs), n, error)

    monkeypatch.setattr(file_io, "open", faulty_open, raising=False)
