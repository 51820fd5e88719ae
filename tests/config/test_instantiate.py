import logging
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch

from hooktrain.config import ConfigDict, LazyCall, instantiate


class Recorder:
    """Remembers what it was called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def scaled(value: float, *, factor: float = 1.0) -> float:
    if factor == 0:
        raise FileNotFoundError(2, "no such factor", "zero.txt")
    return value * factor


def takes_wrong_types() -> None:
    raise TypeError("inside the target")


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_a_target_is_called_with_positional_and_keyword_arguments() -> None:
    cfg = LazyCall(torch.nn.Linear)(3, out_features=2, bias=False)
    layer = instantiate(cfg)
    assert isinstance(layer, torch.nn.Linear)
    assert (layer.in_features, layer.out_features, layer.bias) == (3, 2, None)


def test_children_are_built_before_their_parents_at_any_depth() -> None:
    cfg = LazyCall(Recorder)(
        LazyCall(scaled)(1.0, factor=2.0),
        plain={"inner": [LazyCall(scaled)(3.0), (LazyCall(scaled)(4.0), "x")]},
    )
    built = instantiate(cfg)
    assert built.args == (2.0,)
    assert built.kwargs == {"plain": {"inner": [3.0, (4.0, "x")]}}


def test_targets_inside_plain_dicts_and_lists_are_built_too() -> None:
    plain = {
        "a": {"_target_": scaled, "value": 5.0},
        "b": [{"_target_": "builtins.len", "_args_": ["xy"]}],
    }
    assert instantiate(plain) == {"a": 5.0, "b": [2]}
    assert instantiate([LazyCall(scaled)(1.0)]) == [1.0]
    assert instantiate(ConfigDict(train={"x": LazyCall(scaled)(2.0)}))["train"]["x"] == 2.0
    assert plain["a"] == {"_target_": scaled, "value": 5.0}


def test_a_target_meets_plain_python_types_only() -> None:
    built = instantiate(LazyCall(Recorder)([{"x": ({},)}], d={"y": []}))
    (args,) = built.args
    values = [
        args,
        args[0],
        args[0]["x"],
        args[0]["x"][0],
        built.kwargs["d"],
        built.kwargs["d"]["y"],
    ]
    assert [type(v) for v in values] == [list, dict, tuple, dict, dict, list]


def test_what_is_already_built_passes_through() -> None:
    model, ordered = torch.nn.Linear(1, 1), OrderedDict(a=1)
    assert instantiate(model) is model
    assert instantiate(ordered) is ordered
    assert instantiate("text") == "text"
    assert instantiate(None) is None
    built = instantiate(LazyCall(Recorder)(model=model))
    assert built.kwargs["model"] is model
    assert instantiate(built) is built


def test_references_are_resolved() -> None:
    cfg = ConfigDict(
        width=4,
        model=LazyCall(torch.nn.Linear)("${width}", out_features="${._args_.0}"),
        kind=torch.nn.ReLU,
        head=LazyCall("${kind}")(inplace=True),
    )
    assert instantiate(cfg.model).out_features == 4
    assert instantiate(cfg.model).in_features == 4
    assert isinstance(instantiate(cfg.head), torch.nn.ReLU)


def test_a_target_may_be_a_name_or_itself_lazy() -> None:
    assert isinstance(instantiate(LazyCall("torch.nn.ReLU")()), torch.nn.ReLU)
    make = LazyCall("functools.partial")(scaled, factor=3.0)
    assert instantiate(LazyCall(make)(2.0)) == 6.0


@pytest.mark.parametrize("target", [3, None, ["torch.nn.ReLU"], {"a": 1}])
def test_a_lazy_call_of_something_that_cannot_be_called_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="the target of a LazyCall must be a callable"):
        LazyCall(target)


def test_a_lazy_call_refuses_arguments_with_its_own_keys() -> None:
    with pytest.raises(TypeError, match="'_target_' is what LazyCall itself writes"):
        LazyCall(dict)(_target_=3)


def test_an_unknown_argument_names_the_key_and_the_nearest_parameter() -> None:
    cfg = ConfigDict(model={"head": LazyCall(torch.nn.Linear)(3, out_feature=4)})
    with pytest.raises(TypeError, match="unexpected keyword argument 'out_feature'") as error:
        instantiate(cfg)
    assert notes(error.value) == [
        "while instantiating model.head (torch.nn.modules.linear.Linear)"
        "; did you mean 'out_features'?"
    ]


def test_a_missing_argument_names_the_key_and_the_parameter() -> None:
    cfg = ConfigDict(layers=[1, LazyCall(torch.nn.Linear)(3)])
    with pytest.raises(TypeError, match=r"'out_features'\nwhile instantiating layers\.1 "):
        instantiate(cfg)


def test_the_path_is_from_the_root_even_if_a_part_is_instantiated() -> None:
    cfg = ConfigDict(model={"head": LazyCall(torch.nn.Linear)(3)})
    with pytest.raises(TypeError, match=r"instantiating model\.head "):
        instantiate(cfg.model)
    with pytest.raises(TypeError, match="instantiating the config "):
        instantiate(LazyCall(torch.nn.Linear)(3))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before 3.11")
def test_an_error_of_a_target_keeps_its_type_and_notes_the_key() -> None:
    cfg = ConfigDict(a=[{"b": LazyCall(scaled)(3.0, factor=0)}], c=LazyCall(takes_wrong_types)())
    with pytest.raises(FileNotFoundError, match="no such factor") as error:
        instantiate(cfg)
    assert error.value.filename == "zero.txt"
    assert notes(error.value) == [f"while instantiating a.0.b ({__name__}.scaled)"]
    with pytest.raises(TypeError, match="inside the target") as other:
        instantiate(cfg.c)
    assert other.value.args == ("inside the target",)
    assert notes(other.value) == [f"while instantiating c ({__name__}.takes_wrong_types)"]


def test_without_notes_the_key_of_an_error_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    cfg = ConfigDict(a=LazyCall(scaled)(3.0, factor=0))
    with (
        caplog.at_level(logging.ERROR, "hooktrain.utils.registry"),
        pytest.raises(FileNotFoundError, match="no such factor"),
    ):
        instantiate(cfg)
    assert f"while instantiating a ({__name__}.scaled): " in caplog.text


def test_a_target_that_cannot_be_located_names_the_key() -> None:
    cfg = ConfigDict(optimizer={"_target_": "torch.optim.SDG"})
    with pytest.raises(ImportError, match=r"optimizer\._target_: .*did you mean 'SGD'"):
        instantiate(cfg)


def test_a_target_that_is_not_callable_names_the_key() -> None:
    with pytest.raises(TypeError, match=r"x\._target_ must be callable or its name, got 3"):
        instantiate(ConfigDict(x={"_target_": 3}))
    with pytest.raises(TypeError, match=r"x\._args_ must be a list of arguments, got 'ab'"):
        instantiate(ConfigDict(x={"_target_": dict, "_args_": "ab"}))


def test_a_builtin_without_a_signature_reports_its_own_error() -> None:
    with pytest.raises(TypeError, match="'int' object is not iterable") as error:
        instantiate(ConfigDict(x=LazyCall(dict.fromkeys)(3)))
    if sys.version_info >= (3, 11):
        assert notes(error.value) == ["while instantiating x (None.dict.fromkeys)"]


def test_references_that_lead_back_into_themselves_are_an_error() -> None:
    cfg = ConfigDict(a={"b": "${c}"}, c={"d": "${a}"})
    with pytest.raises(ValueError, match=r"a\.b\.d: a reference leads back to a config"):
        instantiate(cfg)


def test_a_part_that_two_keys_refer_to_is_built_for_each() -> None:
    cfg = ConfigDict(a=LazyCall(Recorder)(), b="${a}", c="${a}")
    built = instantiate(cfg)
    assert len({id(x) for x in built.values()}) == 3
