"""The names that are imported from hooktrain itself."""

import ast
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import hooktrain
from hooktrain import api
from hooktrain.engine.trainers import SimpleTrainer

TREE = ast.parse(Path(api.__file__).read_text(encoding="utf-8"))
IMPORTS = [node for node in TREE.body if isinstance(node, ast.ImportFrom)]
NAMES = [alias.name for node in IMPORTS for alias in node.names]


def modules_after(code: str) -> set[str]:
    """The modules that a new interpreter has imported after some code."""
    code += "; import sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_each_name_is_that_of_its_own_module() -> None:
    for node in IMPORTS:
        home = import_module(str(node.module))
        for alias in node.names:
            assert getattr(hooktrain, alias.name) is getattr(home, alias.name)
    assert len(NAMES) > 20
    assert set(NAMES) <= set(dir(hooktrain))
    assert hooktrain.SimpleTrainer is SimpleTrainer


def test_type_checkers_take_each_name_for_one_that_may_be_imported() -> None:
    assert [a.asname for node in IMPORTS for a in node.names] == NAMES


def test_a_star_imports_them_all_and_nothing_else() -> None:
    here: dict[str, object] = {}
    exec("from hooktrain import *", here)
    assert here.keys() - {"__builtins__"} == set(NAMES)


def test_no_name_hides_a_package() -> None:
    packages = {info.name for info in pkgutil.iter_modules(hooktrain.__path__)}
    assert packages.isdisjoint(NAMES)
    for name in packages - {"__main__"}:
        assert isinstance(import_module(f"hooktrain.{name}"), ModuleType)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'SimpleTraner'"):
        hooktrain.SimpleTraner  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="'__wrapped__'"):
        hooktrain.__wrapped__  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_is_loaded_before_a_name_is_asked_for() -> None:
    found = modules_after("import hooktrain; hooktrain.__version__")
    assert [name for name in found if name.startswith("hooktrain")] == ["hooktrain"]
    assert "torch" not in found
    found = modules_after("from hooktrain import utils")
    assert "torch" not in found
    assert "hooktrain.api" not in found
    assert "torch" in modules_after("from hooktrain import SimpleTrainer")
