import copy
from collections.abc import Callable

import pytest
import torch
from build_toys import NAMES, Net, options
from torch import nn

from hooktrain.solver.build import (
    get_default_optimizer_params,
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
