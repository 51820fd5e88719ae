"""Files whose writes fail, a disk that is full, and a pickle that runs code."""

import builtins
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hooktrain.utils import file_io


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


def fail_at_write(patch: pytest.MonkeyPatch, n: int, error: OSError) -> None:
    """Of each file that is written all at once, let the n-th write fail."""

    def faulty_open(*args: Any, **kwargs: Any) -> Faulty:
        return Faulty(builtins.open(*args, **kwargs), n, error)

    patch.setattr(file_io, "open", faulty_open, raising=False)


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file can be longer than so many bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


class RunsCode:
    """Pickles as a call that makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
