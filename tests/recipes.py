"""The recipes by which code for other frameworks changes its imports, and packages of theirs."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
PEERS = ("detectron2", "fvcore", "iopath", "omegaconf")


def after_recipe(framework: str, text: str) -> str:
    """Some Python code after `tools/from_<framework>.sed`."""
    command = ["sed", "-E", "-f", str(TOOLS / f"from_{framework}.sed")]
    done = subprocess.run(
        command, input=text, stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if packages were not installed, until the test is over."""
    imported = [name for name in sys.modules if name.split(".")[0] in packages]
    for name in (*packages, *imported):
        monkeypatch.setitem(sys.modules, name, None)


@contextmanager
def installed(folder: Path, package: str, files: Mapping[str, str]) -> Iterator[None]:
    """Write a package into a folder. Inside of this it can be imported."""
    for name, text in files.items():
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
