import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.solver.build import (
    expand_param_groups,
    get_default_optimizer_params,
    reduce_param_groups,
)

NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(2),
    lambda: nn.BatchNorm2d(2),
    lambda: nn.BatchNorm3d(2),
    lambda: nn.SyncBatchNorm(2),
    lambda: nn.GroupNorm(1, 2),
    lambda: nn.InstanceNorm1d(2, affine=True),
    lambda: nn.InstanceNorm2d(2, affine=True),
    lambda: nn.InstanceNorm3d(2, affine=True),
    lambda: nn.LayerNorm(2),
    lambda: nn.RMSNorm(2),
]


class Net(nn.Module):
    """Parameters: scale, backbone.{stem,norm,block}.{weight,bias}, head.{weight,bias}."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Sequential()
        self.backbone.add_module("stem", nn.Linear(2, 2))
        self.backbone.add_module("norm", nn.BatchNorm1d(2))
        self.backbone.add_module("block", nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)


NAMES = [name for name, _ in Net().named_parameters()]


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options of each parameter."""
    rest = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
    return {n: o for g, o in zip(groups, rest, strict=True) for n in g["param_names"]}


def options(model: nn.Module, **kwargs: Any) -> dict[str, dict[str, Any]]:
    return by_name(get_default_optimizer_params(model, **kwargs))


def test_without_options_all_parameters_are_one_group() -> None:
    model = Net()
    (group,) = get_default_optimizer_params(model)
    assert group.keys() == {"params", "param_names"}
    assert group["param_names"] == NAMES
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


def test_names_stand_beside_their_parameters_in_every_group() -> None:
    model = Net()
    groups = get_default_optimizer_params(
        model, base_lr=1.0, weight_decay_norm=0.0, bias_lr_factor=2.0
    )
    named = dict(model.named_parameters())
    pairs = [p for g in groups for p in zip(g["param_names"], g["params"], strict=True)]
    assert sorted(name for name, _ in pairs) == sorted(NAMES)
    assert all(named[name] is parameter for name, parameter in pairs)
    assert len(groups) == 4


def test_base_values_go_to_every_parameter() -> None:
    (group,) = get_default_optimizer_params(Net(), base_lr=0.1, weight_decay=0.01)
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm()).__name__)
def test_normalisation_layers_have_their_own_weight_decay(norm: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), norm())
    found = options(model, weight_decay=0.1, weight_decay_norm=0.0)
    expected = {name: {"weight_decay": 0.1 if name[0] == "0" else 0.0} for name in found}
    assert found == expected
    assert "1.weight" in found


def test_biases_have_their_own_rate_and_decay_those_of_norms_too() -> None:
    found = options(
        Net(),
        base_lr=0.5,
        weight_decay=0.1,
        weight_decay_norm=0.0,
        bias_lr_factor=2.0,
        weight_decay_bias=0.3,
    )
    assert found["backbone.stem.weight"] == {"lr": 0.5, "weight_decay": 0.1}
    assert found["backbone.norm.weight"] == {"lr": 0.5, "weight_decay": 0.0}
    assert found["backbone.norm.bias"] == found["head.bias"] == {"lr": 1.0, "weight_decay": 0.3}


def test_the_factor_of_the_rate_depends_on_the_full_name_of_a_parameter() -> None:
    asked = []

    def factor(name: str) -> float:
        asked.append(name)
        return 0.1 if name.startswith("backbone.") else 1.0

    found = options(Net(), base_lr=2.0, lr_factor_func=factor)
    assert asked == NAMES
    assert asked[0] == "scale"
    assert found["backbone.stem.weight"] == {"lr": 0.2}
    assert found["head.weight"] == found["scale"] == {"lr": 2.0}


def test_factors_of_place_and_of_biases_multiply() -> None:
    found = options(Net(), base_lr=8.0, lr_factor_func=lambda name: 0.5, bias_lr_factor=2.0)
    assert found["head.bias"] == {"lr": 8.0}
    assert found["head.weight"] == {"lr": 4.0}


def test_an_override_of_a_last_name_concerns_all_parameters_of_that_name() -> None:
    found = options(Net(), base_lr=1.0, overrides={"weight": {"lr": 0.5, "nesterov": True}})
    for name in NAMES:
        expected = {"lr": 0.5, "nesterov": True} if name.endswith(".weight") else {"lr": 1.0}
        assert found[name] == expected


def test_an_override_replaces_what_a_factor_gave() -> None:
    found = options(
        Net(), base_lr=1.0, lr_factor_func=lambda name: 0.1, overrides={"head.*": {"lr": 3.0}}
    )
    assert found["head.weight"] == {"lr": 3.0}
    assert found["scale"] == {"lr": 0.1}


def test_the_more_specific_override_wins_whatever_the_order() -> None:
    rules = {
        "head.weight": {"lr": 5.0},
        "backbone.stem.*": {"lr": 4.0},
        "backbone.*": {"lr": 3.0, "weight_decay": 0.5},
        "*": {"lr": 2.0},
        "bias": {"lr": 1.0, "momentum": 0.5},
    }
    forwards = options(Net(), overrides=rules)
    assert forwards == options(Net(), overrides=dict(reversed(rules.items())))
    assert forwards["scale"] == {"lr": 2.0}
    assert forwards["head.weight"] == {"lr": 5.0}
    assert forwards["head.bias"] == {"lr": 2.0, "momentum": 0.5}
    assert forwards["backbone.block.weight"] == {"lr": 3.0, "weight_decay": 0.5}
    assert forwards["backbone.stem.bias"] == {"lr": 4.0, "weight_decay": 0.5, "momentum": 0.5}


def test_the_later_of_two_equally_specific_overrides_wins() -> None:
    rules = {"head.*": {"lr": 1.0}, "*.bias": {"lr": 2.0}, "*d.bias": {"lr": 3.0}}
    assert options(Net(), overrides=rules)["head.bias"] == {"lr": 3.0}
    equal = {"he*": {"lr": 1.0}, "*as": {"lr": 2.0}}
    assert options(Net(), overrides=equal)["head.bias"] == {"lr": 2.0}


def test_a_parameter_of_the_root_does_not_lend_its_rank_to_others_of_that_name() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model.head = nn.Linear(1, 1)
    found = options(model, overrides={"weight": {"lr": 1.0}, "head.*": {"lr": 2.0}})
    assert found["weight"] == {"lr": 1.0}
    assert found["head.weight"] == {"lr": 2.0}


def test_the_overrides_of_the_caller_are_left_alone_and_serve_again() -> None:
    rules = {"weight": {"lr": 0.5}}
    before = copy.deepcopy(rules)
    first = options(Net(), base_lr=1.0, bias_lr_factor=2.0, overrides=rules)
    assert rules == before
    assert options(Net(), base_lr=1.0, bias_lr_factor=2.0, overrides=rules) == first


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
