from collections.abc import Callable
from typing import Any

import pytest
import torch

from hooktrain.compat.registry import Registry


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


def some_function() -> None:
    pass


@pytest.fixture
def registry() -> Registry:
    registry = Registry("things")
    registry.register(Recorder)
    registry.register(Strict)
    return registry


def test_objects_register_under_their_own_names() -> None:
    registry = Registry("things")

    @registry.register()
    class Net:
        pass

    assert registry.register(some_function) is some_function
    assert dict(registry) == {"Net": Net, "some_function": some_function}


def test_a_taken_name_is_refused_unless_forced(registry: Registry) -> None:
    message = r"'things' already has .*Strict.* 'Strict'.*Derived.*force=True"
    with pytest.raises(ValueError, match=message):
        registry.register_module("Strict", module=Derived)
    assert registry.get("Strict") is Strict
    registry.register_module("Strict", force=True, module=Derived)
    assert registry.get("Strict") is Derived


def test_register_module_takes_names_as_a_decorator_or_with_the_module() -> None:
    registry = Registry("things")
    assert registry.register_module()(Strict) is Strict
    registry.register_module(["Other", "other"])(Recorder)
    assert registry.register_module("Renamed", module=Derived) is Derived
    with pytest.raises(ValueError, match=r"already has .* as 'Strict'"):
        registry.register_module(["Derived", "Strict"], module=Derived)
    with pytest.raises(TypeError, match=r"write @REGISTRY.register_module\(\) above"):
        registry.register_module(Strict)
    assert list(registry) == [
        ("Strict", Strict),
        ("Other", Recorder),
        ("other", Recorder),
        ("Renamed", Derived),
    ]


@pytest.mark.parametrize(
    "kind", [torch.nn.Linear, "torch.nn.Linear", "Linear", "function"]
)
def test_type_may_be_a_name_a_class_a_function_or_a_dotted_name(
    registry: Registry, kind: str | Callable[..., Any]
) -> None:
    registry.register(torch.nn.Linear)
    registry.register_module("function")(lambda **sizes: torch.nn.Linear(**sizes))
    built = registry.build({"type": kind, "in_features": 2, "out_features": 3})
    assert tuple(built.weight.shape) == (3, 2)


def test_defaults_are_for_keys_that_the_configuration_lacks(registry: Registry) -> None:
    cfg = {"a": 1, "inner": {"type": "x"}}
    for _ in range(2):
        built = registry.build(cfg, type="Recorder", a=2, b=3, cfg=4)
        assert built.kwargs == {"a": 1, "inner": {"type": "x"}, "b": 3, "cfg": 4}
        assert cfg == {"a": 1, "inner": {"type": "x"}}
    assert type(registry.build({"type": Recorder}, type="Strict")) is Recorder


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        (["Strict"], TypeError, "'list' object is not a mapping"),
        ("Strict", TypeError, "'str' object is not a mapping"),
        (
            {"kind": 1},
            KeyError,
            "the registry 'things' needs a dict with 'type', got {'kind': 1}",
        ),
        ({"type": "Recoder"}, KeyError, "no 'Recoder' in .* 'things'; .*'Recorder'"),
        ({"type": "torch.nn.Liner"}, ImportError, r"'torch\.nn\.Liner'"),
    ],
)
def test_a_config_without_a_known_type_is_refused(
    registry: Registry, cfg: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        registry.build(cfg)


@pytest.mark.parametrize("arguments", [{"width": 1, "dept": 2}, {"depth": 2}])
@pytest.mark.parametrize("kind", ["Strict", "Derived"])
def test_of_wrong_arguments_the_note_has_the_keys(
    registry: Registry,
    kind: str,
    arguments: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry.register(Derived)
    with pytest.raises(TypeError, match=r"'dept'|'width'") as error:
        registry.build({"type": kind, **arguments})
    what = f"{kind} of the registry 'things' with the keys {[*arguments]}"
    # On Python 3.10 errors take no notes, and the log has them.
    notes = getattr(error.value, "__notes__", caplog.messages)
    assert notes == [f"while instantiating {what}"]
