import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hooktrain.utils.names import did_you_mean, importable_name, locate


class Outer:
    class Inner:
        pass

    @classmethod
    def build(cls) -> "Outer":
        return cls()

    def method(self) -> None:
        pass


class Colour:
    pass


def test_a_typo_suggests_the_nearest_name() -> None:
    assert did_you_mean("max_itr", ["max_iter", "seed"]) == "; did you mean 'max_iter'?"
    assert did_you_mean("zzz", ["max_iter", "seed"]) == "; there is 'max_iter', 'seed'"
    assert did_you_mean("zzz", []) == ""
    assert did_you_mean("zzz", range(20)).endswith(", '11'")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package, located_pkg, whose modules are removed after the test."""
    folder = tmp_path / "located_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    # Undoing setitem and del removes the modules that the test imports.
    for name in ("located_pkg", "located_pkg.train", "located_pkg.broken"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        del sys.modules[name]
    return folder


def test_an_attribute_goes_before_a_module_of_the_same_name(package: Path) -> None:
    (package / "train.py").write_text("def train(): return 1\nclass Helper: x = 2\n")
    (package / "__init__.py").write_text(
        "from located_pkg.train import Helper, train\n"
    )
    (package / "broken.py").write_text("import no_such_dependency\n")
    assert locate("located_pkg.train")() == 1
    assert locate("located_pkg.Helper.x") == 2
    assert importable_name(locate("located_pkg.train")) == "located_pkg.train"
    with pytest.raises(ModuleNotFoundError, match="'no_such_dependency'"):
        locate("located_pkg.broken.Net")


@pytest.mark.parametrize(
    "name", ["torch.optim.SDG", "torch.nn.Conv2d.fd", "no_such.Net"]
)
def test_an_unknown_name_is_quoted(name: str) -> None:
    with pytest.raises(ImportError, match=repr(name)):
        locate(name)


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (torch.optim.SGD, "torch.optim.SGD"),
        (torch.nn.Conv2d, "torch.nn.Conv2d"),
        (torch.nn.functional.gelu, "torch._C._nn.gelu"),  # its own qualified name
        (
            torch.tanh,
            "torch.tanh",
        ),  # its qualified name is _VariableFunctionsClass.tanh
        (torch.float16, "torch.float16"),
        (dict, "builtins.dict"),
        (Outer.Inner, f"{__name__}.Outer.Inner"),
        (Outer.method, f"{__name__}.Outer.method"),
    ],
)
def test_the_dotted_name_leads_back(obj: Any, expected: str) -> None:
    assert importable_name(obj) == expected
    assert locate(expected) is obj


def local_function() -> Callable[[], None]:
    def local() -> None:
        pass

    return local


def test_what_cannot_be_imported_by_name_is_refused() -> None:
    class Colour:  # the module's Colour is another class
        __qualname__ = "Colour"

    for obj in (
        lambda: 0,
        local_function(),
        Outer(),
        Outer().method,
        3,
        "torch",
        Colour,
    ):
        with pytest.raises(ValueError, match="by name"):
            importable_name(obj)
    assert importable_name(Outer.build) == f"{__name__}.Outer.build"
    assert isinstance(locate(f"{__name__}.Outer.build")(), Outer)
