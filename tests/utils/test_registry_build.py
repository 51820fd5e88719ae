import copy
import sys
from typing import Any

import pytest
import torch

from hooktrain.config import ConfigDict
from hooktrain.utils.registry import Registry


class Recorder:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs


class Strict:
    def __init__(self, width: int, depth: int = 1) -> None:
        if not isinstance(width, int):
            raise TypeError("deep inside")
        if width < 0:
            raise FileNotFoundError(2, "no such width", "w.txt")


@pytest.fixture
def registry() -> Registry:
    registry = Registry("things")
    registry.register(Recorder)
    registry.register(Strict)
    return registry


def test_type_is_a_name_and_the_other_items_are_arguments(registry: Registry) -> None:
    built = registry.build({"type": "Recorder", "a": 1, "b": [2]})
    assert type(built) is Recorder
    assert built.kwargs == {"a": 1, "b": [2]}


@pytest.mark.parametrize("kind", [torch.nn.Linear, "torch.nn.Linear"])
def test_type_may_be_a_class_or_a_dotted_name(registry: Registry, kind: Any) -> None:
    built = registry.build({"type": kind, "in_features": 2, "out_features": 3})
    assert tuple(built.weight.shape) == (3, 2)


def test_type_may_be_a_function(registry: Registry) -> None:
    registry.register(lambda a: a + 1, name="plus_one")
    assert registry.build({"type": "plus_one", "a": 2}) == 3


def test_a_registered_name_with_dots_is_not_imported(registry: Registry) -> None:
    registry.register(Recorder, name="torch.nn.Linear")
    assert type(registry.build({"type": "torch.nn.Linear"})) is Recorder


def test_defaults_are_for_keys_that_the_configuration_lacks(registry: Registry) -> None:
    built = registry.build({"a": 1}, type="Recorder", a=2, b=3, cfg=4)
    assert built.kwargs == {"a": 1, "b": 3, "cfg": 4}
    assert type(registry.build({"type": Recorder}, type="Strict")) is Recorder


def test_the_configuration_is_not_changed_and_builds_again(registry: Registry) -> None:
    cfg = {"type": "Recorder", "inner": {"type": "x"}, "numbers": [1]}
    before = copy.deepcopy(cfg)
    first = registry.build(cfg, more=1)
    assert cfg == before
    assert registry.build(cfg, more=1).kwargs == first.kwargs


def test_a_config_dict_builds_with_its_references_resolved(registry: Registry) -> None:
    cfg = ConfigDict(width=3, thing={"type": "Recorder", "width": "${width}"})
    assert registry.build(cfg.thing).kwargs == {"width": 3}
    assert cfg.thing == {"type": "Recorder", "width": "${width}"}


@pytest.mark.parametrize("cfg", [None, "Recorder", [("type", "Recorder")], Recorder])
def test_what_is_no_dict_is_refused(registry: Registry, cfg: Any) -> None:
    with pytest.raises(TypeError, match="for the registry 'things' must be a dict with 'type'"):
        registry.build(cfg)


def test_a_missing_type_names_the_registry(registry: Registry) -> None:
    with pytest.raises(KeyError, match=r"the registry 'things' needs 'type', got {'kind': 1}"):
        registry.build({"kind": 1})


def test_an_unknown_type_suggests_the_nearest(registry: Registry) -> None:
    with pytest.raises(KeyError, match=r"'Recoder' in the registry 'things'; .*'Recorder'"):
        registry.build({"type": "Recoder"})
    with pytest.raises(ImportError, match=r"'torch.nn' has no 'Liner'; did you mean 'Linear'"):
        registry.build({"type": "torch.nn.Liner"})


@pytest.mark.parametrize("kind", [3, None, "torch.nn"])
def test_a_type_that_cannot_be_called_is_refused(registry: Registry, kind: Any) -> None:
    with pytest.raises(TypeError, match=f"'type' for the registry 'things' must .*got {kind!r}"):
        registry.build({"type": kind})


def test_an_unknown_argument_names_the_class_the_keys_and_the_nearest(registry: Registry) -> None:
    with pytest.raises(TypeError) as error:
        registry.build({"type": "Strict", "width": 1, "dept": 2})
    message = str(error.value)
    assert message.startswith(
        "cannot instantiate Strict of the registry 'things' with the keys ['width', 'dept']: "
    )
    assert "did you mean 'depth'?" in message
    assert isinstance(error.value.__cause__, TypeError)


def test_a_missing_argument_is_named(registry: Registry) -> None:
    with pytest.raises(TypeError, match=r"Strict of .* with the keys \['depth'\]: .*'width'"):
        registry.build({"type": "Strict", "depth": 2})


def test_an_error_from_inside_of_a_constructor_is_not_hidden(registry: Registry) -> None:
    with pytest.raises(FileNotFoundError, match="no such width") as error:
        registry.build({"type": "Strict", "width": -1})
    assert error.value.filename == "w.txt"
    with pytest.raises(TypeError, match="deep inside") as inner:
        registry.build({"type": "Strict", "width": "x"})
    assert inner.value.args == ("deep inside",)
    if sys.version_info >= (3, 11):
        note = "while instantiating Strict of the registry 'things' with the keys ['width']"
        assert error.value.__notes__ == inner.value.__notes__ == [note]
