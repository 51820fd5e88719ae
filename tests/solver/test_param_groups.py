"""Which parameters an optimizer gets, with which settings."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from group_toys import NAMES, Net, Tied, half_frozen
from hooktrain.solver import (
    expand_param_groups,
    get_default_optimizer_params,
    reduce_param_groups,
)
from hooktrain.solver.optim_state import parameter_names


def options(model: nn.Module, **kwargs: Any) -> dict[str, dict[str, Any]]:
    """The settings of each parameter, by its name."""
    names = parameter_names(model)
    found = {}
    for group in get_default_optimizer_params(model, **kwargs):
        settings = {key: value for key, value in group.items() if key != "params"}
        found.update({names[parameter]: settings for parameter in group["params"]})
    return found


@pytest.mark.parametrize(
    ("rules", "groups"),
    [({}, 1), ({"base_lr": 1.0, "weight_decay_norm": 0.0, "bias_lr_factor": 2.0}, 4)],
)
def test_parameters_of_equal_settings_share_a_group(
    rules: dict[str, float], groups: int
) -> None:
    model = Net()
    found = get_default_optimizer_params(model, **rules)  # type: ignore[arg-type]
    assert len(found) == groups
    parameters = [parameter for group in found for parameter in group["params"]]
    assert len(parameters) == len(NAMES)
    assert set(parameters) == set(model.parameters())


def test_every_kind_of_norm_has_the_weight_decay_of_norms() -> None:
    class OwnNorm(nn.modules.batchnorm._BatchNorm):
        pass

    norms = [nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm3d(2, affine=True)]
    model = nn.Sequential(
        *norms,
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.RMSNorm(2),
        OwnNorm(2),
        nn.Linear(2, 2),
    )
    found = options(model, weight_decay=0.1, weight_decay_norm=0.0)
    for name in found:
        assert found[name] == {"weight_decay": 0.1 if name[0] == "7" else 0.0}
    assert {"0.weight", "5.weight", "7.bias"} <= set(found)


def test_biases_have_their_own_rate() -> None:
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
    assert (
        found["backbone.norm.bias"]
        == found["head.bias"]
        == {"lr": 1.0, "weight_decay": 0.3}
    )


def test_the_factor_of_the_rate_depends_on_the_full_name() -> None:
    asked = []

    def factor(name: str) -> float:
        asked.append(name)
        return 0.1 if name.startswith("backbone.") else 1.0

    found = options(Net(), base_lr=2.0, lr_factor_func=factor, bias_lr_factor=3.0)
    assert asked == NAMES
    assert found["backbone.stem.weight"] == {"lr": 0.2}
    assert found["head.weight"] == found["scale"] == {"lr": 2.0}
    assert found["backbone.stem.bias"] == {"lr": 6.0}  # as in detectron2


def test_an_override_of_one_parameter_wins_over_that_of_all_of_its_last_name() -> None:
    rules = {"backbone.stem.bias": {"lr": 4.0}, "bias": {"lr": 1.0, "momentum": 0.5}}
    before = copy.deepcopy(rules)
    forwards = options(Net(), base_lr=9.0, overrides=rules)
    assert rules == before
    assert forwards == options(
        Net(), base_lr=9.0, overrides=dict(reversed(rules.items()))
    )
    assert forwards["head.weight"] == {"lr": 9.0}
    assert forwards["head.bias"] == {"lr": 1.0, "momentum": 0.5}
    assert forwards["backbone.stem.bias"] == {"lr": 4.0, "momentum": 0.5}
    # The full name of a parameter of the root is a last name of others.
    model = nn.Module()
    model.weight, model.head = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
    found = options(
        model, overrides={"weight": {"lr": 1.0}, "head.weight": {"lr": 2.0}}
    )
    assert (found["weight"], found["head.weight"]) == ({"lr": 1.0}, {"lr": 2.0})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bias_lr_factor": 2.0}, "base_lr"),
        ({"lr_factor_func": len}, "base_lr"),
        ({"weight_decay_bias": 0.0, "overrides": {"bias": {"lr": 1.0}}}, "twice"),
    ],
)
def test_a_wrong_argument_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_default_optimizer_params(Net(), **kwargs)


@pytest.mark.parametrize("name", ["head.wieght", "scales", "head"])
def test_an_override_of_nothing_is_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = {name: {"lr": 9.0}, "scale": {"lr": 0.5}}
    found = options(Net(), base_lr=0.1, overrides=rules)
    assert found["scale"] == {"lr": 0.5}
    assert found["head.weight"] == {"lr": 0.1}
    assert f"no parameter of the model: {{'{name}'}}" in caplog.text


def test_frozen_parameters_are_left_out() -> None:
    found = options(half_frozen(), base_lr=1.0, overrides={"head.weight": {"lr": 0.1}})
    assert list(found) == NAMES[:-2]


def test_a_shared_parameter_answers_to_its_first_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = {"embed.weight": {"lr": 1.0}, "head.weight": {"lr": 2.0}}
    shared = options(Tied(), overrides=rules)
    assert shared["embed.weight"] == {"lr": 1.0}
    assert shared["norm.weight"] == {}
    assert set(shared) == {name for name, _ in Tied().named_parameters()}
    assert "no parameter of the model: {'head.weight'}" in caplog.text


def test_wrappers_do_not_show_in_names() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.DataParallel(nn.Linear(1, 1))
            self.right = nn.Linear(1, 1)
            self.module = nn.BatchNorm1d(1)

    names = ["left.weight", "left.bias", "right.weight", "right.bias"]
    names += ["module.weight", "module.bias"]
    for model in (
        Pair(),
        nn.DataParallel(Pair()),
        torch.compile(Pair(), backend="eager"),
    ):
        found = options(
            model, weight_decay_norm=0.0, overrides={"left.weight": {"lr": 1.0}}
        )
        assert sorted(found) == sorted(names)
        assert found["left.weight"] == {"lr": 1.0}
        assert found["module.bias"] == {"weight_decay": 0.0}


# Expanding and reducing


def test_expanding_gives_each_parameter_its_latest_settings() -> None:
    a, b = nn.ParameterList([*torch.eye(2)])
    groups = [
        {"params": [a, b], "lr": 1.0, "weight_decay": 4.0},
        {"params": iter([a]), "lr": 2.0, "momentum": 3.0},
    ]
    assert expand_param_groups(groups) == [
        {"params": [a], "lr": 2.0, "weight_decay": 4.0, "momentum": 3.0},
        {"params": [b], "lr": 1.0, "weight_decay": 4.0},
    ]
    assert groups[0] == {"params": [a, b], "lr": 1.0, "weight_decay": 4.0}


def test_reducing_joins_groups_of_equal_settings_by_first_appearance() -> None:
    a, b, c, d = nn.ParameterList([*torch.eye(4)])
    groups = [
        {"params": [a], "lr": 1.0, "betas": [0.9, 0.99]},
        {"params": [b], "lr": 2.0},
        {"betas": [0.9, 0.99], "params": [c, d], "lr": 1.0},
    ]
    assert reduce_param_groups(groups) == [
        {"params": [a, c, d], "lr": 1.0, "betas": [0.9, 0.99]},
        {"params": [b], "lr": 2.0},
    ]
    assert groups[0]["params"] == [a]
