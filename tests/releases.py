"""What older releases of torch lack."""

import pytest
import torch

# Their collectives over gloo are not recorded, and their threads have no names.
needs_records = pytest.mark.skipif(torch.__version__ < "2.11", reason="torch < 2.11")


def without_gloo(printed: str) -> str:
    """The output of a program without the lines that gloo prints before torch 2.11."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo]"))
