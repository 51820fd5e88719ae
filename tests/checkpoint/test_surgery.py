import logging
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hooktrain.checkpoint.surgery import load_model_state


def test_an_equal_model_loads_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    result = load_model_state(target, source.state_dict())
    assert result == ([], [], [])
    assert torch.equal(target.weight, source.weight)
    assert caplog.records == []


def test_each_kind_of_difference_is_told_in_one_table(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 2), b=nn.Linear(2, 5), c=nn.Linear(5, 1)))
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
    assert result.incorrect_shapes == [("b.weight", (7, 2), (5, 2)), ("b.bias", (7,), (5,))]
    assert result.missing_keys == ["c.weight", "c.bias"]
    assert result.unexpected_keys == ["head.weight", "head.bias"]
    shapes, missing, unexpected = (record.getMessage() for record in caplog.records)
    assert [line.split() for line in shapes.splitlines()[3:]] == [
        ["b.weight", "(7,", "2)", "(5,", "2)"],
        ["b.bias", "(7,)", "(5,)"],
    ]
    assert "c.weight" in missing
    assert "(1, 5)" in missing
    assert "c.bias" in missing
    assert "head.weight" in unexpected
    assert "(4, 4)" in unexpected
    after = model.state_dict()
    assert torch.equal(after["a.weight"], torch.ones(2, 3))
    for name in ("b.weight", "b.bias", "c.weight", "c.bias"):
        assert torch.equal(after[name], before[name])
    assert len(state) == 6  # the caller's dict is as it was


def test_the_prefix_of_a_wrapped_model_is_taken_off() -> None:
    source, target = (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)) for _ in range(2))
    assert load_model_state(target, nn.DataParallel(source).state_dict()) == ([], [], [])
    assert torch.equal(target[1].weight, source[1].weight)


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
    for state, revise in ((new, ()), (old, ()), (old, [("^0", "module.0")])):
        model = nn.Sequential(Versioned(2, 1))
        assert load_model_state(model, state, strict, revise) == ([], [], [])
    assert torch.equal(model[0].weight, torch.ones(1, 2))


@pytest.mark.parametrize("strict", [False, True])
def test_the_counter_of_batch_norm_is_never_missing(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    del state["0.num_batches_tracked"]
    assert load_model_state(nn.Sequential(nn.BatchNorm1d(2)), state, strict) == ([], [], [])
    assert caplog.records == []


def test_a_module_whose_name_begins_like_that_of_a_wrapper_is_loaded() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"modules_list": nn.Linear(2, 1), "module2": nn.Linear(2, 1)})

    source, target = make(), make()
    for state in (source.state_dict(), nn.DataParallel(source).state_dict()):
        assert load_model_state(target, state, strict=True) == ([], [], [])
        assert torch.equal(target["modules_list"].weight, source["modules_list"].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.bias": None}, "of the model are not in the checkpoint"),
        ({"c.bias": torch.ones(1)}, "of the checkpoint are not in the model"),
        ({"a.bias": torch.ones(7)}, "have another shape in the model"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_strict_load_changes_all_or_nothing(
    change: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2)))
    model(torch.randn(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    good = {name: torch.full_like(value, 5) for name, value in before.items()}
    bad = {name: value for name, value in {**good, **change}.items() if value is not None}
    with pytest.raises(RuntimeError, match=rf"(?s)strict=True.*{message}.*bias"):
        load_model_state(model, bad, strict=True)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert pointers == [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    assert load_model_state(model, good, strict=True) == ([], [], [])
    assert all(torch.equal(value, good[name]) for name, value in model.state_dict().items())
    assert caplog.records == []


def test_names_are_revised_before_they_are_compared() -> None:
    source, target = nn.Linear(3, 2), nn.ModuleDict({"fc": nn.Linear(3, 2)})
    state = {f"net.{name}": value for name, value in source.state_dict().items()}
    revise = [(r"^net\.", ""), (r"^", "fc.")]
    assert load_model_state(target, state, strict=True, revise_keys=revise) == ([], [], [])
    assert torch.equal(target["fc"].weight, source.weight)
    assert list(state) == ["net.weight", "net.bias"]


def test_a_model_whose_own_names_have_the_prefix_loads() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    source, target = Wrapper(), Wrapper()
    assert load_model_state(target, source.state_dict()) == ([], [], [])
    assert torch.equal(target.module.weight, source.module.weight)


def test_an_uninitialised_parameter_takes_the_shape_of_the_file() -> None:
    model = nn.LazyLinear(2)
    result = load_model_state(model, {"weight": torch.ones(2, 7), "bias": torch.ones(2)})
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
    assert load_model_state(model, {"embedding.weight": torch.ones(4, 3)}) == ([], [], [])
    assert torch.equal(model.head.weight, torch.ones(4, 3))
    assert load_model_state(model, {}).missing_keys == ["embedding.weight", "head.weight"]


def test_a_shared_tensor_whose_other_name_has_the_wrong_shape_is_missing() -> None:
    result = load_model_state(Tied(), {"embedding.weight": torch.ones(5, 3)})
    assert result.missing_keys == ["head.weight"]
    assert result.incorrect_shapes == [("embedding.weight", (5, 3), (4, 3))]


def test_a_name_that_is_in_no_file_does_not_count_as_loaded() -> None:
    model = nn.Module()
    model.register_buffer("saved", torch.zeros(2))
    model.register_buffer("cache", model.saved, persistent=False)
    assert load_model_state(model, {}).missing_keys == ["saved"]


def test_numpy_arrays_become_tensors() -> None:
    model = nn.Linear(2, 1)
    weight = np.array([[1.5, 2.5]], dtype=np.float32)
    weight.flags.writeable = False
    state = {"weight": weight, "bias": np.zeros(1, dtype=np.float32)}
    assert load_model_state(model, state) == ([], [], [])
    assert model.weight.tolist() == [[1.5, 2.5]]
    assert isinstance(state["weight"], np.ndarray)


@pytest.mark.parametrize("value", [1.0, None, [1, 2], "x"])
def test_another_value_is_refused_by_name_and_nothing_is_loaded(value: Any) -> None:
    model = nn.Linear(2, 1)
    before = model.bias.clone()
    with pytest.raises(ValueError, match=f"'weight' of type {type(value).__name__}"):
        load_model_state(model, {"bias": torch.ones(1), "weight": value})
    assert torch.equal(model.bias, before)


def test_what_a_module_keeps_beside_its_tensors_is_loaded() -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    source, target = Counting(2, 1), Counting(2, 1)
    source.seen = 5
    assert load_model_state(target, source.state_dict()) == ([], [], [])
    assert target.seen == 5
    assert load_model_state(target, nn.Linear(2, 1).state_dict()).missing_keys == ["_extra_state"]
