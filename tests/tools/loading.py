"""Loads a script of tools/ as a module, to call its functions or to change them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
