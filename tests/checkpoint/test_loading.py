"""A state into a model whose names or shapes differ, from files of several libraries."""

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.checkpoint import (
    Checkpointer,
    load_checkpoint,
    revise_names,
    take_prefix,
)
from hooktrain.checkpoint.loading import load_model_state


def test_what_differs_is_told_in_a_table(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(
        OrderedDict(a=nn.Linear(3, 2), b=nn.Linear(2, 5), c=nn.Linear(5, 1))
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {
        "a.weight": torch.ones(2, 3),
        "a.bias": torch.ones(2),
        "b.weight": torch.ones(7, 2),
        "b.bias": torch.ones(7),
        "head.weight": torch.ones(4, 4),
        "head.bias": torch.ones(4),
    }
    with caplog.at_level(logging.WARNING):
        result = load_model_state(model, state)
    assert result.incorrect_shapes == [
        ("b.weight", (7, 2), (5, 2)),
        ("b.bias", (7,), (5,)),
    ]
    assert result.missing_keys == ["c.weight", "c.bias"]
    assert result.unexpected_keys == ["head.weight", "head.bias"]
    (record,) = caplog.records
    assert [line.split() for line in record.getMessage().splitlines()[3:]] == [
        ["b.weight", "(7,", "2)", "(5,", "2)"],
        ["b.bias", "(7,)", "(5,)"],
        ["c.weight", "-", "(1,", "5)"],
        ["c.bias", "-", "(1,)"],
        ["head.weight", "(4,", "4)", "-"],
        ["head.bias", "(4,)", "-"],
    ]
    after = model.state_dict()
    assert torch.equal(after["a.weight"], torch.ones(2, 3))
    for name in ("b.weight", "b.bias", "c.weight", "c.bias"):
        assert torch.equal(after[name], before[name])
    assert len(state) == 6  # the caller's dict is as it was


class Versioned(nn.Linear):
    """Its first version called the weight ``kernel``."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, metadata, *args)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("strict", [False, True])
def test_the_version_in_the_metadata_reaches_the_module(strict: bool) -> None:
    new = nn.Sequential(Versioned(2, 1)).state_dict()
    old = OrderedDict([("0.kernel", torch.ones(1, 2)), ("0.bias", torch.ones(1))])
    old._metadata = OrderedDict([("0", {"version": 1})])  # type: ignore[attr-defined]
    for state in (new, old, revise_names(old, [("^0", "module.0")])):
        model = nn.Sequential(Versioned(2, 1))
        assert load_model_state(model, state, strict) == ([], [], [])
    assert torch.equal(model[0].weight, torch.ones(1, 2))


@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    [
        ("modules_list", False),
        ("modules_list", True),
        ("module2", True),
        ("module", False),
    ],
)
def test_a_model_whose_own_names_look_like_those_of_a_wrapped_one_is_loaded(
    name: str, is_wrapped: bool
) -> None:
    source, target = (nn.ModuleDict({name: nn.Linear(2, 1)}) for _ in range(2))
    state = (nn.DataParallel(source) if is_wrapped else source).state_dict()
    assert load_model_state(target, state, strict=True) == ([], [], [])
    assert torch.equal(target[name].weight, source[name].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(1, 3)}, r"weight +\(1, 3\) +\(1, 2\)"),
        ({"extra": torch.ones(1)}, r"extra +\(1,\) +-"),
    ],
)
def test_a_strict_load_raises_what_differs(
    change: dict[str, Any], message: str
) -> None:
    model = nn.Linear(2, 1)
    state = {**model.state_dict(), **change}
    with pytest.raises(RuntimeError, match=message):
        load_model_state(model, state, strict=True)


def test_an_uninitialised_parameter_takes_the_shape_of_the_file() -> None:
    model = nn.LazyLinear(2)
    result = load_model_state(
        model, {"weight": torch.ones(2, 7), "bias": torch.ones(2)}
    )
    assert result == ([], [], [])
    assert torch.equal(model.weight, torch.ones(2, 7))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_a_shared_tensor_under_another_name_is_not_missing() -> None:
    model = Tied()
    assert load_model_state(model, {"embedding.weight": torch.ones(4, 3)}) == (
        [],
        [],
        [],
    )
    assert torch.equal(model.head.weight, torch.ones(4, 3))
    with pytest.raises(ValueError, match="nothing in the state fits"):
        load_model_state(model, {})


def make() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))


def metadata(state: Any) -> dict[str, Any]:
    return dict(state._metadata)


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
    with pytest.raises(
        ValueError, match=r"begins with 'backbon\.'; did you mean 'backbone\.weight'"
    ):
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
    assert list(revise_names(state, revise).items()) == list(
        zip(expected, (1, 2), strict=True)
    )
    assert list(state) == ["a.weight", "ab.weight"]


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    "content",
    [
        lambda state: {"model": state, "iteration": 9},
        lambda state: {"state_dict": state, "meta": {"epoch": 2}},
        lambda state: state,
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {
            "state_dict": {f"module.{name}": value for name, value in state.items()}
        },
    ],
    ids=["model", "state_dict", "bare", "wrapped", "wrapped state_dict"],
)
def test_the_model_is_found_in_files_of_all_kinds(content: Any, tmp_path: Path) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    path = save(tmp_path / "a.pth", content(source.state_dict()))
    result = load_checkpoint(target, path, strict=True)
    assert torch.equal(target.weight, source.weight)
    expected = {"iteration": 9} if "iteration" in result else {"meta": {"epoch": 2}}
    rest = {key: item for key, item in result.items() if key != "model"}
    assert rest in ({}, expected)
    assert len(result["model"]) == 2
    other = nn.Linear(3, 2)
    Checkpointer(other).load(path)
    assert torch.equal(other.weight, source.weight)


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_what_a_module_keeps_beside_its_tensors_is_loaded(tmp_path: Path) -> None:
    source, target = Counting(2, 1), Counting(2, 1)
    source.seen = 5
    load_checkpoint(target, save(tmp_path / "a.pth", source.state_dict()), strict=True)
    assert target.seen == 5
    assert load_model_state(target, nn.Linear(2, 1).state_dict()).missing_keys == [
        "_extra_state"
    ]


def test_a_part_is_loaded_by_its_prefix_after_names_were_revised(
    tmp_path: Path,
) -> None:
    source, backbone = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {
        f"net.backbone.{name}": value for name, value in source.state_dict().items()
    }
    state["net.head.weight"] = torch.ones(1)
    path = save(tmp_path / "a.pth", {"state_dict": state})
    for revise, prefix in (((), "net.backbone."), ([(r"^net\.", "")], "backbone")):
        nn.init.zeros_(backbone.weight)
        result = load_checkpoint(
            backbone, path, strict=True, revise_keys=revise, prefix=prefix
        )
        assert torch.equal(backbone.weight, source.weight)
        assert list(result["model"]) == list(state)
    with pytest.raises(ValueError, match=r"nothing in the state fits .*prefix="):
        load_checkpoint(backbone, path)
    with pytest.raises(ValueError, match=r"'neck\.'"):
        load_checkpoint(backbone, path, prefix="neck")
