"""Loads a script of tools/ as a module, to call its functions or to change them."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from processes import CONTEXT

TOOLS = Path(__file__).parent.parent.parent / "tools"


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(TOOLS) not in sys.path:  # it may import what stands beside it
        sys.path.append(str(TOOLS))
    spec.loader.exec_module(module)
    return module


@contextmanager
def crash_tool(name: str, *others: str) -> Iterator[Any]:
    """A tool that disturbs runs, under its own name, with processes of the tests' fork server.

    Args:
        name: the name of the tool.
        others: further modules of tools/ that start processes for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        for each in (name, *others):
            patch.setattr(importlib.import_module(each), "CONTEXT", CONTEXT)
        yield importlib.import_module(name)
