"""Which parameters an optimizer gets, with which settings: detectron2's and MMEngine's rules."""

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings as examples, strategies as st
from torch import nn

from hooktrain.solver import (
    DefaultOptimWrapperConstructor,
    expand_param_groups,
    get_default_optimizer_params,
    reduce_param_groups,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.optim.optimizer.default_constructor as mmengine


# detectron2's get_default_optimizer_params


BASE = (1.0, 10.0)  # SGD's learning rate and weight decay in ours()


class Net(nn.Module):
    """The parameters are, in this order,

    bias, scale, backbone.{stem,norm,depthwise,group_norm,instance_norm}.{weight,bias},
    backbone.pointwise.weight, head.{weight,bias}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, 2))
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Module()
        self.backbone.stem = nn.Conv2d(1, 4, 3)  # one channel: it is depthwise too
        self.backbone.norm = nn.BatchNorm2d(4)
        self.backbone.depthwise = nn.Conv2d(4, 8, 3, groups=4)
        self.backbone.group_norm = nn.GroupNorm(2, 4)
        self.backbone.instance_norm = nn.InstanceNorm2d(4, affine=True)
        self.backbone.pointwise = nn.Conv2d(8, 4, 1, bias=False)
        self.head = nn.Linear(4, 4)


def half_frozen() -> Net:
    model = Net()
    model.head.requires_grad_(False)
    return model


NAMES = [name for name, _ in Net().named_parameters()]


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options of each parameter."""
    rest = [
        {k: v for k, v in g.items() if k not in ("params", "param_names")}
        for g in groups
    ]
    return {n: o for g, o in zip(groups, rest, strict=True) for n in g["param_names"]}


def options(model: nn.Module, **kwargs: Any) -> dict[str, dict[str, Any]]:
    return by_name(get_default_optimizer_params(model, **kwargs))


@pytest.mark.parametrize(
    ("rules", "groups"),
    [({}, 1), ({"base_lr": 1.0, "weight_decay_norm": 0.0, "bias_lr_factor": 2.0}, 4)],
)
def test_names_stand_beside_their_parameters_in_few_groups(
    rules: dict[str, float], groups: int
) -> None:
    model = Net()
    found = get_default_optimizer_params(model, **rules)  # type: ignore[arg-type]
    pairs = [p for g in found for p in zip(g["param_names"], g["params"], strict=True)]
    named = dict(model.named_parameters())
    assert sorted(name for name, _ in pairs) == sorted(NAMES)
    assert all(named[name] is parameter for name, parameter in pairs)
    assert len(found) == groups


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
    mmengines = ours(model, {"norm_decay_mult": 0.5})
    for name in found:
        assert found[name] == {"weight_decay": 0.1 if name[0] == "7" else 0.0}
        assert mmengines[name] == (BASE if name[0] == "7" else (1.0, 5.0))
    assert {"0.weight", "5.weight", "7.bias"} <= set(found)


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
    assert (
        found["backbone.norm.bias"]
        == found["head.bias"]
        == {"lr": 1.0, "weight_decay": 0.3}
    )


def test_the_factor_of_the_rate_depends_on_the_full_name_and_multiplies_that_of_biases() -> (
    None
):
    asked = []

    def factor(name: str) -> float:
        asked.append(name)
        return 0.1 if name.startswith("backbone.") else 1.0

    found = options(Net(), base_lr=2.0, lr_factor_func=factor, bias_lr_factor=3.0)
    assert asked == NAMES
    assert asked[0] == "bias"
    assert found["backbone.stem.weight"] == {"lr": 0.2}
    assert found["head.weight"] == found["scale"] == {"lr": 2.0}
    assert found["backbone.stem.bias"] == {"lr": pytest.approx(0.6)}


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
        ({"bias_lr_factor": 2.0}, "and bias_lr_factor need base_lr"),
        ({"lr_factor_func": len}, "lr_factor_func and .* need base_lr"),
        (
            {"weight_decay_bias": 0.0, "overrides": {"bias": {"lr": 1.0}}},
            "biases are set twice",
        ),
        (
            {"overrides": {"head.wieght": {}}},
            "is no parameter.*did you mean 'head.weight'",
        ),
        ({"overrides": {"scales": {}}}, "did you mean 'scale'"),
        ({"overrides": {"head": {}}}, "'head' is no parameter"),
    ],
)
def test_a_wrong_argument_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_default_optimizer_params(Net(), **kwargs)


def test_frozen_parameters_are_left_out_and_shared_ones_answer_to_each_of_their_names() -> (
    None
):
    found = options(half_frozen(), base_lr=1.0, overrides={"head.weight": {"lr": 0.1}})
    assert list(found) == NAMES[:-2]
    shared = options(Tied(), overrides={"head.weight": {"lr": 1.0}})
    assert shared["embed.weight"] == {"lr": 1.0}
    assert shared["norm.weight"] == {}
    assert set(shared) == {name for name, _ in Tied().named_parameters()}


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


def test_expanding_gives_each_parameter_its_latest_options() -> None:
    a, b = nn.ParameterList([*torch.eye(2)])
    groups = [
        {"params": [a, b], "param_names": ["a", "b"], "lr": 1.0, "weight_decay": 4.0},
        {"params": a, "lr": 2.0},
        {"params": iter([a]), "momentum": 3.0},
    ]
    assert expand_param_groups(groups) == [
        {
            "params": [a],
            "param_names": ["a"],
            "lr": 2.0,
            "weight_decay": 4.0,
            "momentum": 3.0,
        },
        {"params": [b], "param_names": ["b"], "lr": 1.0, "weight_decay": 4.0},
    ]
    assert groups[0].keys() == {"params", "param_names", "lr", "weight_decay"}


def test_reducing_joins_groups_of_equal_options_by_first_appearance() -> None:
    a, b, c, d = nn.ParameterList([*torch.eye(4)])
    groups = [
        {"params": [a], "param_names": ["a"], "lr": 1.0, "betas": [0.9, 0.99]},
        {"params": [b], "param_names": ["b"], "lr": 2.0},
        {"betas": [0.9, 0.99], "params": [c, d], "param_names": ["c", "d"], "lr": 1.0},
    ]
    assert reduce_param_groups(groups) == [
        {
            "params": [a, c, d],
            "param_names": ["a", "c", "d"],
            "lr": 1.0,
            "betas": [0.9, 0.99],
        },
        {"params": [b], "param_names": ["b"], "lr": 2.0},
    ]
    assert groups[0]["params"] == [a]
    nameless = [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 1.0}]
    assert reduce_param_groups(nameless) == [{"params": [a, b], "lr": 1.0}]
    named = {"params": [a], "param_names": ["a"], "lr": 1.0}
    assert reduce_param_groups([named, nameless[1]]) == [named, nameless[1]]


# MMEngine's paramwise_cfg


Settings = dict[str, tuple[float, float]]


class Tied(nn.Module):
    """``embed.weight`` is also ``head.weight``, and the module ``norm`` is also ``branch.norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)
        self.branch = nn.Module()
        self.branch.norm = self.norm
        self.branch.conv = nn.Conv2d(3, 3, 1, groups=3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embed.weight


def settings(model: nn.Module, groups: list[dict[str, Any]]) -> Settings:
    """``(lr, weight_decay)`` of each parameter that is in the groups, by its first name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def ours(model: nn.Module, paramwise_cfg: Any, **options: Any) -> Settings:
    """The settings with SGD's learning rate 1 and weight decay 10, unless told otherwise."""
    cfg = {"optimizer": {"type": "SGD", "lr": 1.0, "weight_decay": 10.0, **options}}
    wrapper = DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model)
    return settings(model, wrapper.optimizer.param_groups)


def paramwise(
    model: nn.Module, paramwise_cfg: Any, **options: Any
) -> list[dict[str, Any]]:
    cfg = {"optimizer": {"type": "SGD", "lr": 1.0, **options}}
    wrapper = DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model)
    return wrapper.optimizer.param_groups


DECAYS = [f"{part}_decay_mult" for part in ("bias", "norm", "dwconv", "flat")]


def test_parameters_of_equal_settings_are_one_group_in_the_order_of_the_model() -> None:
    found = paramwise(
        Net(), {"norm_decay_mult": 1.0, "bias_decay_mult": 0.0}, weight_decay=1.0
    )
    assert [g["weight_decay"] for g in found] == [0.0, 1.0]
    assert found[1]["param_names"][:3] == [
        "scale",
        "backbone.stem.weight",
        "backbone.norm.weight",
    ]
    keys = {"head": {"lr_mult": 1, "decay_mult": 1}}
    assert len(paramwise(Net(), {"custom_keys": keys}, weight_decay=1.0)) == 1
    keys = {
        "head": {"momentum": 0.5, "anything": "x", "lr_mult": 2.0}
    }  # are options of a group
    last = paramwise(Net(), {"custom_keys": keys})[-1]
    assert last["param_names"] == ["head.weight", "head.bias"]
    assert (last["lr"], last["momentum"], last["anything"]) == (2.0, 0.5, "x")
    assert "lr_mult" not in last


def test_groups_are_logged_and_frozen_parameters_and_keys_without_a_match_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = {"backbone.blok": {"lr_mult": 0.5}, "head": {}}
    with caplog.at_level(logging.INFO):
        found = ours(half_frozen(), {"bias_lr_mult": 2.0, "custom_keys": keys})
    assert list(found) != NAMES[:-2] == sorted(found, key=NAMES.index)
    assert [r.message for r in caplog.records][:2] == [
        "2 parameters are frozen and not optimized: ['head.weight', 'head.bias']",
        "custom_keys: 'backbone.blok' is in no parameter's name; did you mean 'backbone'?",
    ]
    assert (
        "{'lr': 2.0, 'weight_decay': 10.0}: parameters ['bias', 'backbone.stem"
        in caplog.text
    )


def test_rules_that_differ_for_two_names_of_a_parameter_are_an_error() -> None:
    cfg: dict[str, Any] = {"custom_keys": {"head": {"lr_mult": 0.5}}}
    message = r"\['embed.weight', 'head.weight'\]: {'lr': 1.0}, \[{'lr': 0.5}\]; see bypass_dup"
    with pytest.raises(ValueError, match=message):
        paramwise(Tied(), cfg)


def test_a_learning_rate_may_be_a_tensor_or_torchs_default() -> None:
    found = paramwise(nn.Linear(1, 1), {"bias_lr_mult": 2.0}, lr=torch.tensor(0.25))
    assert [float(g["lr"]) for g in found] == [0.25, 0.5]
    rules = {"custom_keys": {"bias": {"betas": (0.5, 0.9)}}}
    wrapper = DefaultOptimWrapperConstructor({"optimizer": {"type": "Adam"}}, rules)
    assert wrapper(nn.Linear(1, 1)).get_lr()["lr"] == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"norm_decay_mul": 0.0}, "no rule 'norm_decay_mul'; did you mean 'norm_dec"),
        ({"dcn_offset_lr_mult": 0.1}, "no rule 'dcn_offset_lr_mult'"),
        (
            {"bias_lr_mult": -1.0},
            "bias_lr_mult must be finite and not negative, but got -1.0",
        ),
        (
            {"custom_keys": {"a": {"decay_mult": float("nan")}}},
            r"keys\['a'\].decay_mult .* nan",
        ),
        ({"custom_keys": {"a": {"lr_mul": 0.1}}}, "'lr_mul' should be 'lr_mult'"),
        (
            {"custom_keys": {"a": {"decay_mult": 1}}},
            "_mult multiplies weight_decay: the optimiz",
        ),
        (
            {"norm_decay_mult": 0.0},
            "_mult multiplies weight_decay: the optimizer's must be",
        ),
        (
            {"bias_lr_mult": 2.0},
            "_mult multiplies lr: the optimizer's must be configured",
        ),
    ],
)
def test_rules_that_make_no_sense_or_multiply_nothing_are_refused(
    rules: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DefaultOptimWrapperConstructor({"optimizer": {"type": "Adam"}}, rules)(
            nn.Linear(1, 1)
        )


# The same as MMEngine, for random rules


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """MMEngine logs each parameter."""
    monkeypatch.setattr(mmengine, "print_log", lambda *args, **kwargs: None)


def theirs(model: nn.Module, paramwise_cfg: Any) -> Settings:
    optimizer = {"type": "SGD", "lr": 1.0, "weight_decay": 10.0}
    constructor = mmengine.DefaultOptimWrapperConstructor(
        {"type": "OptimWrapper", "optimizer": optimizer}, copy.deepcopy(paramwise_cfg)
    )
    return settings(model, constructor(model).optimizer.param_groups)


KEYS = [
    "backbone",
    "norm",
    ".norm",
    "norm.weight",
    "head",
    "head.weight",
    "bias",
    ".bias",
]
KEYS += [".scale", "weight", "conv", "embed", "branch", "a", "", "stem", "no such part"]
MULT = st.sampled_from([0, 0.0, 0.1, 1, 1.0, 0.3, 2.5])
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "lr_mult": MULT,
        "decay_mult": MULT,
        "momentum": st.just(0.5),
        "lr": MULT,
    },
)
RULES = {
    "custom_keys": st.dictionaries(st.sampled_from(KEYS), SETTINGS, max_size=4),
    "bias_lr_mult": MULT,
}
CONFIGS = st.fixed_dictionaries({}, optional=RULES | dict.fromkeys(DECAYS, MULT))
random_rules = examples(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@random_rules
@given(CONFIGS)
def test_settings_are_those_of_mmengine(cfg: dict[str, Any]) -> None:
    model = Net()
    assert ours(model, cfg) == theirs(model, cfg)


@random_rules
@given(CONFIGS)
def test_of_parameters_with_several_names_the_first_counts_as_in_mmengine(
    cfg: dict[str, Any],
) -> None:
    model, bypassing = Tied(), {**cfg, "bypass_duplicate": True}
    expected = theirs(model, bypassing)
    assert ours(model, bypassing) == expected
    found, refusal = expected, ""
    try:
        found = ours(model, {**cfg, "bypass_duplicate": False})
    except ValueError as error:
        refusal = str(error)
    assert found == expected
    assert not refusal or "rules differ for" in refusal
    assert (
        not refusal or cfg["custom_keys"]
    )  # the other rules look at the layer, not at the name
