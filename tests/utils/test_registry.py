from typing import Any

import pytest

import hooktrain.utils.registry as registry_module
from hooktrain.utils import names
from hooktrain.utils.registry import Registry


class Outer:
    pass


class Colour:
    pass


def some_function() -> None:
    pass


def test_a_class_and_a_function_register_under_their_own_names() -> None:
    registry = Registry("things")

    @registry.register()
    class Net:
        pass

    assert registry.register(some_function) is some_function
    assert registry.get("Net") is Net
    assert registry.get("some_function") is some_function


def test_the_decorator_also_works_without_parentheses() -> None:
    registry = Registry("things")

    @registry.register
    class Net:
        pass

    assert registry.get("Net") is Net


def test_a_name_can_be_given_for_an_object_that_has_none() -> None:
    registry = Registry("things")
    registry.register(3, name="three")
    registry.register(name="other")(some_function)
    assert registry.get("three") == 3
    assert registry.get("other") is some_function
    assert "some_function" not in registry


def test_an_object_without_a_name_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"or None for an object with a __name__; got None for 'Net'"
    ):
        Registry("things").register("Net")


def test_a_taken_name_is_refused_and_both_objects_are_named() -> None:
    registry = Registry("things")
    registry.register(Outer, name="x")
    with pytest.raises(ValueError, match=r"'things' already has .*Outer.* 'x'.*Colour.*force=True"):
        registry.register(Colour, name="x")
    assert registry.get("x") is Outer


def test_force_replaces_what_is_registered() -> None:
    registry = Registry("things")
    registry.register(Outer, name="x")
    registry.register(Colour, name="x", force=True)
    assert registry.get("x") is Colour
    assert len(registry) == 1


def test_none_cannot_be_registered() -> None:
    registry = Registry("things")
    with pytest.raises(TypeError, match="None cannot be registered in the registry 'things'"):
        registry.register(None, name="x")
    assert "x" not in registry


def test_an_unknown_name_suggests_the_nearest() -> None:
    registry = Registry("backbone")
    registry.register(Outer, name="ResNet50")
    with pytest.raises(
        KeyError,
        match="no object named 'ResNet5' in the registry 'backbone'; did you mean 'ResNet50'",
    ):
        registry.get("ResNet5")


def test_a_registry_is_a_table_of_names_and_objects() -> None:
    registry = Registry("things")
    registry.register(1, name="one")
    registry.register(2, name="two")
    assert list(registry) == [("one", 1), ("two", 2)]
    assert len(registry) == 2
    assert "one" in registry
    assert "three" not in registry
    lines = repr(registry).splitlines()
    assert lines[0] == "Registry of things:"
    assert "│ one    │        1 │" in lines


def test_several_names_are_aliases_and_none_is_registered_if_one_is_taken() -> None:
    registry = Registry("things")
    registry.register(Outer, name=["outer", "Outer"])
    assert registry.get("outer") is registry.get("Outer") is Outer
    with pytest.raises(ValueError, match=r"already has .* under the name 'Outer'"):
        registry.register(Colour, name=["Colour", "Outer"])
    assert list(registry) == [("outer", Outer), ("Outer", Outer)]


@pytest.mark.parametrize("name", [[], ["a", 3], 3])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(TypeError, match="name must be a string or several"):
        Registry("things").register_module(name=name, module=Outer)


def test_register_module_is_a_decorator_or_takes_the_module() -> None:
    registry = Registry("things")

    @registry.register_module()
    class Net:
        pass

    @registry.register_module(["Other", "other"])
    class AnotherNet:
        pass

    assert registry.register_module(module=Outer) is Outer
    assert registry.register_module("Renamed", module=Colour) is Colour
    assert dict(registry) == {
        "Net": Net,
        "Other": AnotherNet,
        "other": AnotherNet,
        "Outer": Outer,
        "Renamed": Colour,
    }
    assert registry.register_module("Net", force=True)(Outer) is Outer
    assert registry.get("Net") is Outer


def test_register_module_without_parentheses_says_how_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"written with parentheses, @REGISTRY.register_module\(\)"):

        @Registry("things").register_module
        class Net:
            pass


def test_the_names_that_detectron2_has_here_can_be_imported() -> None:
    assert registry_module.locate is names.locate
    assert set(names.__all__) | {"Registry"} == set(registry_module.__all__)
