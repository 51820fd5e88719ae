"""Parameter groups: what is refused, names, expanding and reducing."""

import copy
from typing import Any

import pytest
import torch
from build_toys import NAMES, Net, options
from torch import nn

from hooktrain.solver.build import (
    expand_param_groups,
    get_default_optimizer_params,
    reduce_param_groups,
)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("head.wieght", "'head.wieght' matches no parameter.*did you mean 'head.weight'"),
        ("scales", "did you mean 'scale'"),
        ("bakbone.*", r"'bakbone.\*' matches no parameter"),
        ("head", "'head' matches no parameter"),
    ],
)
def test_an_override_that_matches_nothing_is_an_error(rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_default_optimizer_params(Net(), overrides={rule: {"lr": 1.0}})


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"bias_lr_factor": 2.0}, ValueError, "bias_lr_factor needs base_lr"),
        ({"lr_factor_func": len}, ValueError, "lr_factor_func needs base_lr"),
        (
            {"weight_decay_bias": 0.0, "overrides": {"bias": {"lr": 1.0}}},
            ValueError,
            "biases are set twice",
        ),
        ({"overrides": {"bias": 0.1}}, TypeError, r"overrides\['bias'\] must be a mapping.*0.1"),
        ({"model": [1]}, TypeError, r"model must be a torch.nn.Module: \[1\]"),
    ],
)
def test_a_wrong_argument_is_refused(
    kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        get_default_optimizer_params(**({"model": Net()} | kwargs))


def test_frozen_parameters_are_left_out_and_may_still_be_named_in_overrides() -> None:
    model = Net()
    model.backbone.requires_grad_(False)
    found = options(model, base_lr=1.0, overrides={"backbone.*": {"lr": 0.1}})
    assert list(found) == ["scale", "head.weight", "head.bias"]


def test_a_shared_parameter_comes_once_and_answers_to_each_of_its_names() -> None:
    model = Net()
    model.head.weight = model.backbone.stem.weight
    (group,) = get_default_optimizer_params(model)
    assert group["param_names"] == [name for name in NAMES if name != "head.weight"]
    found = options(model, overrides={"head.weight": {"lr": 1.0}})
    assert found["backbone.stem.weight"] == {"lr": 1.0}
    assert found["backbone.block.weight"] == {}


def test_wrappers_do_not_show_in_names() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.DataParallel(nn.Linear(1, 1))
            self.right = nn.Linear(1, 1)
            self.module = nn.BatchNorm1d(1)

    names = ["left.weight", "left.bias", "right.weight", "right.bias"]
    names += ["module.weight", "module.bias"]
    for model in (Pair(), nn.DataParallel(Pair()), torch.compile(Pair(), backend="eager")):
        found = options(model, weight_decay_norm=0.0, overrides={"left.weight": {"lr": 1.0}})
        assert sorted(found) == sorted(names)
        assert found["left.weight"] == {"lr": 1.0}
        assert found["module.bias"] == {"weight_decay": 0.0}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_torch_keeps_the_names_in_the_state_of_its_optimizers(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    def build() -> torch.optim.Optimizer:
        return optimizer(get_default_optimizer_params(Net(), weight_decay_norm=0.0), lr=0.1)  # type: ignore[call-arg]

    saved = build().state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(NAMES)
    for group in saved["param_groups"]:
        del group["param_names"]  # as in the files of detectron2
    loaded = build()
    loaded.load_state_dict(saved)
    assert [n for g in loaded.param_groups for n in g["param_names"]] == names


def test_training_with_groups_equals_training_with_all_parameters() -> None:
    x = torch.randn(8, 2)
    first, results = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1)), []
    for grouped in (False, True):
        model = copy.deepcopy(first)
        params = get_default_optimizer_params(model, base_lr=0.1, overrides={"2.*": {"lr": 0.1}})
        optimizer = torch.optim.SGD(params if grouped else model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((1,), float(k))) for k in range(count)]


def test_expanding_gives_each_parameter_its_latest_options() -> None:
    a, b = parameters(2)
    groups = [
        {"params": [a, b], "param_names": ["a", "b"], "lr": 1.0, "weight_decay": 4.0},
        {"params": a, "lr": 2.0},
        {"params": iter([a]), "momentum": 3.0},
    ]
    assert expand_param_groups(groups) == [
        {"params": [a], "param_names": ["a"], "lr": 2.0, "weight_decay": 4.0, "momentum": 3.0},
        {"params": [b], "param_names": ["b"], "lr": 1.0, "weight_decay": 4.0},
    ]
    assert groups[0].keys() == {"params", "param_names", "lr", "weight_decay"}


def test_reducing_joins_groups_of_equal_options_by_first_appearance() -> None:
    a, b, c, d = parameters(4)
    groups = [
        {"params": [a], "param_names": ["a"], "lr": 1.0, "betas": [0.9, 0.99]},
        {"params": [b], "param_names": ["b"], "lr": 2.0},
        {"betas": [0.9, 0.99], "params": [c, d], "param_names": ["c", "d"], "lr": 1.0},
    ]
    assert reduce_param_groups(groups) == [
        {"params": [a, c, d], "param_names": ["a", "c", "d"], "lr": 1.0, "betas": [0.9, 0.99]},
        {"params": [b], "param_names": ["b"], "lr": 2.0},
    ]
    assert groups[0]["params"] == [a]


def test_groups_work_without_names() -> None:
    a, b = parameters(2)
    groups = [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 1.0}]
    assert reduce_param_groups(groups) == [{"params": [a, b], "lr": 1.0}]
    named = {"params": [a], "param_names": ["a"], "lr": 1.0}
    assert reduce_param_groups([named, groups[1]]) == [named, groups[1]]


def test_a_group_without_parameters_or_with_too_few_names_is_refused() -> None:
    a, b = parameters(2)
    with pytest.raises(ValueError, match=r"needs 'params': it has \['lr'\]"):
        expand_param_groups([{"lr": 1.0}])
    with pytest.raises(ValueError, match=r"2 params have 1 param_names: \['a'\]"):
        reduce_param_groups([{"params": [a, b], "param_names": ["a"]}])
