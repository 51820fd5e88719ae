from collections import OrderedDict
from typing import Any

import pytest
from torch import nn

from hooktrain.checkpoint import revise_names, take_prefix
from hooktrain.checkpoint.state_names import strip_prefix


def make() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))


def metadata(state: Any) -> dict[str, Any]:
    return dict(state._metadata)


def test_the_prefix_of_a_wrapped_model_is_taken_off_with_its_metadata() -> None:
    wrapped = nn.DataParallel(make()).state_dict()
    assert all(name.startswith("module.") for name in wrapped)
    stripped = strip_prefix(wrapped, "module.")
    assert list(stripped) == list(make().state_dict())
    assert metadata(stripped) == metadata(make().state_dict())
    assert "module.0.weight" in wrapped


def test_a_prefix_that_not_every_name_has_stays() -> None:
    state = {"module.a": 1, "b": 2}
    assert strip_prefix(state, "module.") == state
    assert strip_prefix({}, "module.") == {}
    part = make().state_dict()
    part["extra"] = part["0.weight"]
    assert metadata(strip_prefix(part, "0.")) == metadata(part)


@pytest.mark.parametrize("prefix", ["backbone", "backbone."])
def test_the_part_of_a_module_has_the_names_of_the_module_itself(prefix: str) -> None:
    model = nn.ModuleDict(
        OrderedDict(backbone=make(), backbone2=nn.Linear(1, 1), head=nn.Linear(2, 1))
    )
    whole = model.state_dict()
    part = take_prefix(whole, prefix)
    assert list(part) == list(make().state_dict())
    assert metadata(part) == metadata(make().state_dict())
    assert part["1.weight"] is whole["backbone.1.weight"]
    assert "backbone.1.weight" in whole


def test_a_prefix_that_no_name_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"begins with 'backbon\.'; did you mean 'backbone'\?"):
        take_prefix({"backbone.weight": 1, "head.weight": 2}, "backbon")
    with pytest.raises(ValueError, match=r"begins with 'x\.'"):
        take_prefix({}, "x")


@pytest.mark.parametrize(
    ("revise", "expected"),
    [
        ([], ["a.weight", "ab.weight"]),
        ([(r"^a\.", "b.")], ["b.weight", "ab.weight"]),
        ([(r"^", "net.")], ["net.a.weight", "net.ab.weight"]),
        ([(r"weight$", "kernel"), (r"^(\w+)\.kernel", r"\1.w")], ["a.w", "ab.w"]),
    ],
)
def test_names_are_revised_one_rule_after_the_other(
    revise: list[tuple[str, str]], expected: list[str]
) -> None:
    state = {"a.weight": 1, "ab.weight": 2}
    assert list(revise_names(state, revise).items()) == list(zip(expected, (1, 2), strict=True))
    assert list(state) == ["a.weight", "ab.weight"]


def test_versions_of_modules_are_revised_along() -> None:
    whole = nn.ModuleDict({"net": make()}).state_dict()
    assert metadata(revise_names(make().state_dict(), [(r"^", "net.")])).keys() == {
        *("net", "net.0", "net.1")
    }
    assert metadata(revise_names(whole, [(r"^net\.", "")])) == metadata(make().state_dict())
    assert not hasattr(revise_names({"a": 1}, []), "_metadata")


def test_a_wrong_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match=r"revise_keys: \('\(', ''\) is no pattern .*: missing \)"):
        revise_names({"a": 1}, [("(", "")])
    with pytest.raises(ValueError, match=r"revise_keys: .* invalid group reference 1"):
        revise_names({"a": 1}, [("a", r"\1")])


def test_two_names_must_not_become_the_same() -> None:
    with pytest.raises(ValueError, match="'a' and 'b' would both be named 'c'"):
        revise_names({"a": 1, "b": 2}, [("a|b", "c")])
