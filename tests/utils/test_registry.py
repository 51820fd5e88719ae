import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils.names import did_you_mean, importable_name, locate
from hooktrain.utils.registry import Registry


class Outer:
    class Inner:
        pass

    @classmethod
    def build(cls) -> "Outer":
        return cls()

    def method(self) -> None:
        pass


class Colour(Enum):
    RED = 1


def some_function() -> None:
    pass


# did_you_mean


def test_a_typo_suggests_the_nearest_name_and_nonsense_lists_what_there_is() -> None:
    assert did_you_mean("max_itr", ["max_iter", "seed"]) == "; did you mean 'max_iter'?"
    assert did_you_mean("zzz", ["max_iter", "seed"]) == "; there is 'max_iter', 'seed'"
    assert did_you_mean("zzz", []) == "; there is nothing"
    assert did_you_mean("zzz", range(20)).endswith("'11', ...")


# locate


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.optim.SGD", torch.optim.SGD),
        ("torch.optim.sgd.SGD", torch.optim.SGD),
        ("torch.nn.Conv2d.forward", torch.nn.Conv2d.forward),
        ("torch.nn", torch.nn),
        ("builtins.dict", dict),
    ],
)
def test_locate_finds(name: str, expected: Any) -> None:
    assert locate(name) is expected


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package, located_pkg, that is forgotten after the test."""
    folder = tmp_path / "located_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    # setitem and delitem: the modules that the test imports vanish afterwards.
    for name in ("located_pkg", "located_pkg.train", "located_pkg.broken"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        del sys.modules[name]
    return folder


def test_locate_imports_modules_and_tells_a_function_from_a_module_of_the_same_name(
    package: Path,
) -> None:
    (package / "train.py").write_text("def train(): return 1\nclass Helper: x = 2\n")
    (package / "__init__.py").write_text("from located_pkg.train import train\n")
    (package / "broken.py").write_text("import no_such_dependency\n")
    assert locate("located_pkg.train")() == 1
    assert locate("located_pkg.train.Helper.x") == 2
    assert importable_name(locate("located_pkg.train")) == ("located_pkg", "train")
    assert importable_name(locate("located_pkg.train.Helper")) == (
        "located_pkg.train",
        "Helper",
    )
    with pytest.raises(
        ModuleNotFoundError, match="No module named 'no_such_dependency'"
    ):
        locate("located_pkg.broken.Net")


def test_an_unknown_module_or_attribute_names_what_exists_and_the_nearest() -> None:
    message = "cannot locate 'torch.optim.SDG': 'torch.optim' has no 'SDG'; did you mean 'SGD'?"
    with pytest.raises(ImportError) as error:
        locate("torch.optim.SDG")
    assert str(error.value) == message
    with pytest.raises(
        ImportError, match=r"'torch.nn.Conv2d' has no 'forwrd'.*'forward'"
    ):
        locate("torch.nn.Conv2d.forwrd")
    with pytest.raises(ImportError, match="No module named 'no_such_module'"):
        locate("no_such_module.Net")


# importable_name


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (torch.optim.SGD, "torch.optim.SGD"),
        (torch.nn.Conv2d, "torch.nn.Conv2d"),
        (torch.nn.functional.relu, "torch.nn.functional.relu"),
        (
            torch.nn.functional.gelu,
            "torch.nn.functional.gelu",
        ),  # calls itself torch._C._nn.gelu
        (torch.tanh, "torch.tanh"),  # calls itself torch._VariableFunctionsClass.tanh
        (torch.float16, "torch.float16"),
        (dict, "builtins.dict"),
        (Outer.Inner, f"{__name__}.Outer.Inner"),
        (Outer.method, f"{__name__}.Outer.method"),
        (Colour.RED, f"{__name__}.Colour.RED"),
        (some_function, f"{__name__}.some_function"),
    ],
)
def test_the_dotted_name_is_the_shortest_public_one_and_leads_back(
    obj: Any, expected: str
) -> None:
    assert ".".join(importable_name(obj)) == expected
    assert locate(expected) is obj


def local_function() -> Callable[[], None]:
    def local() -> None:
        pass

    return local


def test_what_cannot_be_imported_by_name_is_refused() -> None:
    class Colour:  # shadows nothing: the module's Colour is another class
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
        with pytest.raises(ValueError, match="cannot be imported by name"):
            importable_name(obj)
    assert importable_name(Outer.build) == (__name__, "Outer.build")
    assert isinstance(locate(f"{__name__}.Outer.build")(), Outer)


# Registry


def test_objects_register_under_their_own_names_or_one_that_is_given() -> None:
    registry = Registry("things")

    @registry.register()
    class Net:
        pass

    assert registry.register(some_function) is some_function
    registry.register(3, name="three")
    registry.register(name="other")(some_function)
    assert dict(registry) == {
        "Net": Net,
        "some_function": some_function,
        "three": 3,
        "other": some_function,
    }
    with pytest.raises(AttributeError, match="__name__"):
        registry.register("Net")


def test_a_taken_name_is_refused_unless_forced_and_both_objects_are_named() -> None:
    registry = Registry("things")
    registry.register(Outer, name="x")
    with pytest.raises(
        ValueError, match=r"'things' already has .*Outer.* 'x'.*Colour.*force=True"
    ):
        registry.register(Colour, name="x")
    assert registry.get("x") is Outer
    registry.register(Colour, name="x", force=True)
    assert dict(registry) == {"x": Colour}


def test_several_names_are_aliases_and_none_is_registered_if_one_is_taken() -> None:
    registry = Registry("things")
    registry.register(Outer, name=["outer", "Outer"])
    assert registry.get("outer") is registry.get("Outer") is Outer
    with pytest.raises(ValueError, match=r"already has .* under the name 'Outer'"):
        registry.register(Colour, name=["Colour", "Outer"])
    assert list(registry) == [("outer", Outer), ("Outer", Outer)]
    assert len(registry) == 2
    assert "Outer" in registry
    assert "Colour" not in registry
    lines = repr(registry).splitlines()
    assert lines[0] == "Registry of things:"
    assert lines[-2].startswith("│ Outer  │ ")


def test_register_module_is_a_decorator_or_takes_the_module() -> None:
    registry = Registry("things")
    assert registry.register_module()(Outer) is Outer
    registry.register_module(["Other", "other"])(Recorder)
    assert registry.register_module("Renamed", module=Colour) is Colour
    assert registry.register_module("Outer", force=True, module=Strict) is Strict
    expected = {
        "Outer": Strict,
        "Other": Recorder,
        "other": Recorder,
        "Renamed": Colour,
    }
    assert dict(registry) == expected
    with pytest.raises(TypeError, match=r"write @REGISTRY.register_module\(\) above"):
        registry.register_module(Outer)


# Registry.build


class Recorder:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs


class Strict:
    def __init__(self, width: int, depth: int = 1) -> None:
        if not isinstance(width, int):
            raise TypeError("deep inside")
        if width < 0:
            raise FileNotFoundError(2, "no such width", "w.txt")


class Derived(Strict):
    def __init__(self, colour: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)


@pytest.fixture
def registry() -> Registry:
    registry = Registry("things")
    registry.register(Recorder)
    registry.register(Strict)
    return registry


@pytest.mark.parametrize(
    "kind", [torch.nn.Linear, "torch.nn.Linear", "Linear", "function"]
)
def test_type_may_be_a_name_a_class_a_function_or_an_importable_name(
    registry: Registry, kind: Any
) -> None:
    registry.register(torch.nn.Linear)
    registry.register(lambda **sizes: torch.nn.Linear(**sizes), name="function")
    built = registry.build({"type": kind, "in_features": 2, "out_features": 3})
    assert tuple(built.weight.shape) == (3, 2)
    assert registry.find("mmengine.Linear") is torch.nn.Linear  # a scope, not a module
    registry.register(
        Recorder, name="torch.nn.Linear"
    )  # goes before what can be imported
    assert type(registry.build({"type": "torch.nn.Linear"})) is Recorder


def test_defaults_are_for_keys_that_the_configuration_lacks_and_it_stays_as_it_is(
    registry: Registry,
) -> None:
    cfg = {"a": 1, "inner": {"type": "x"}}
    for _ in range(2):
        built = registry.build(cfg, type="Recorder", a=2, b=3, cfg=4)
        assert built.kwargs == {"a": 1, "inner": {"type": "x"}, "b": 3, "cfg": 4}
        assert cfg == {"a": 1, "inner": {"type": "x"}}
    assert type(registry.build({"type": Recorder}, type="Strict")) is Recorder


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ({"kind": 1}, KeyError, "the registry 'things' needs 'type', got {'kind': 1}"),
        (
            {"type": "Recoder"},
            KeyError,
            r"'Recoder' in the registry 'things'; .*'Recorder'",
        ),
        (
            {"type": "torch.nn.Liner"},
            ImportError,
            "'torch.nn' has no 'Liner'; .* 'Linear'",
        ),
        ({"type": 3}, TypeError, "object is not callable"),
        ({"type": "torch.nn"}, TypeError, "object is not callable"),
    ],
)
def test_a_type_that_is_missing_or_unknown_or_cannot_be_called_is_refused(
    registry: Registry, cfg: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        registry.build(cfg)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [({"width": 1, "dept": 2}, "; did you mean 'depth'?"), ({"depth": 2}, "")],
)
@pytest.mark.parametrize("kind", ["Strict", "Derived"])
def test_wrong_arguments_name_the_class_the_keys_and_the_nearest_also_of_a_base_class(
    registry: Registry, kind: str, arguments: dict[str, int], hint: str
) -> None:
    registry.register(Derived)
    with pytest.raises(TypeError, match=r"'dept'|'width'") as error:
        registry.build({"type": kind, **arguments})
    what = f"while instantiating {kind} of the registry 'things' with the keys {[*arguments]}"
    assert error.value.__notes__ == [what + hint]


def test_an_error_from_inside_of_a_constructor_is_not_hidden(
    registry: Registry,
) -> None:
    with pytest.raises(FileNotFoundError, match="no such width") as error:
        registry.build({"type": "Strict", "width": -1})
    assert error.value.filename == "w.txt"
    with pytest.raises(TypeError, match="deep inside") as inner:
        registry.build({"type": "Strict", "width": "x"})
    assert inner.value.args == ("deep inside",)
    note = "while instantiating Strict of the registry 'things' with the keys ['width']"
    assert error.value.__notes__ == inner.value.__notes__ == [note]


def test_without_notes_the_object_of_an_error_is_logged(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    class OldError(Exception):
        add_note = property()

    @registry.register
    def fail() -> None:
        raise OldError

    with pytest.raises(OldError):
        registry.build({"type": "fail"})
    assert "while instantiating" in caplog.text
    assert "fail of the registry 'things'" in caplog.text


# unwrap_model


def test_the_model_inside_of_any_wrappers_is_found() -> None:
    model = nn.Sequential()
    model.module = nn.Linear(1, 1)  # a part of it, and no wrapper
    assert unwrap_model(model) is model
    assert unwrap_model(nn.DataParallel(model)) is model
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    assert unwrap_model(nn.DataParallel(compiled)) is model
