"""A server that speaks S3, for the tests of a store; they are skipped where moto is missing."""

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TOOL = str(Path(__file__).parent.parent / "tools" / "crash_store.py")


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start the server; gives the environment by which s3fs finds it."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    tool = runpy.run_path(TOOL)
    with tool["s3_server"]() as port:
        yield tool["environment"](port)
    s3fs.S3FileSystem.clear_instance_cache()  # they would ask this server again
