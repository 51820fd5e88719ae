import logging
from typing import Any

import pytest
import torch
from paramwise_toys import Net, Tied, ours
from torch import nn

from hooktrain.solver.optim_wrapper_constructor import DefaultOptimWrapperConstructor

BASE = (1.0, 10.0)


def groups(model: nn.Module, paramwise_cfg: Any, **options: Any) -> list[dict[str, Any]]:
    cfg = {"optimizer": {"type": "SGD", "lr": 1.0, **options}}
    wrapper = DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model)
    return wrapper.optimizer.param_groups


def changed(paramwise_cfg: Any) -> dict[str, tuple[float, float]]:
    """The parameters of Net whose settings are not the optimizer's."""
    return {name: s for name, s in ours(Net(), paramwise_cfg).items() if s != BASE}


def test_biases_of_norms_and_in_deformable_convolutions_keep_their_learning_rate() -> None:
    doubled = ["bias", "backbone.stem", "backbone.block.depthwise", "deform", "head.1"]
    names = [f"{n}.bias" if n != "bias" else n for n in doubled]
    assert changed({"bias_lr_mult": 2.0}) == dict.fromkeys(names, (2.0, 10.0))


def test_biases_in_deformable_convolutions_keep_their_weight_decay() -> None:
    kept = {"deform.conv_offset.bias", "deform.other.bias", "deform.conv_offset_norm.bias"}
    every = {n for n, _ in Net().named_parameters() if n.endswith("bias")} - {"frozen.bias"}
    assert changed({"bias_decay_mult": 0.0}) == dict.fromkeys(every - kept, (1.0, 0.0))


def test_every_kind_of_norm_has_the_weight_decay_of_norms() -> None:
    class OwnNorm(nn.modules.batchnorm._BatchNorm):
        pass

    norms = [nn.BatchNorm1d(2), nn.InstanceNorm3d(2, affine=True), nn.GroupNorm(1, 2)]
    model = nn.Sequential(*norms, nn.LayerNorm(2), nn.RMSNorm(2), OwnNorm(2), nn.Linear(2, 2))
    found = ours(model, {"norm_decay_mult": 0.5})
    assert [name for name, s in found.items() if s == BASE] == ["6.weight", "6.bias"]
    assert {s for name, s in found.items() if name[0] != "6"} == {(1.0, 5.0)}


def test_depthwise_convolutions_have_their_own_weight_decay() -> None:
    assert changed({"dwconv_decay_mult": 0.5}) == {
        "backbone.stem.weight": (1.0, 5.0),
        "backbone.stem.bias": (1.0, 5.0),
        "backbone.block.depthwise.weight": (1.0, 5.0),
        "backbone.block.depthwise.bias": (1.0, 5.0),
    }


def test_the_order_of_the_weight_decays_is_norm_bias_dwconv_flat() -> None:
    rules = {"norm": 0.1, "bias": 0.2, "dwconv": 0.3, "flat": 0.4}
    found = ours(Net(), {f"{rule}_decay_mult": mult for rule, mult in rules.items()})
    decays = {name: decay for name, (_, decay) in found.items()}
    assert decays["backbone.norm.bias"] == 1.0
    assert decays["backbone.stem.bias"] == 2.0
    assert decays["backbone.stem.weight"] == 3.0
    assert decays["scale"] == 4.0
    assert decays["bias"] == 2.0  # two-dimensional, but a bias by its name
    assert decays["head.1.weight"] == 10.0


def test_the_offsets_of_deformable_convolutions_have_their_own_learning_rate() -> None:
    assert changed({"dcn_offset_lr_mult": 0.1, "bias_lr_mult": 1.0}) == {
        "deform.conv_offset.weight": (0.1, 10.0),
        "deform.conv_offset.bias": (0.1, 10.0),
    }


def test_the_longest_custom_key_counts_and_other_rules_do_not() -> None:
    keys = {"head": {"lr_mult": 2.0}, "head.1": {"decay_mult": 3.0}}
    found = ours(Net(), {"custom_keys": keys, "bias_decay_mult": 0.0, "norm_decay_mult": 0.0})
    assert found["head.0.weight"] == (2.0, 10.0)
    assert found["head.1.bias"] == (1.0, 30.0)
    assert found["backbone.norm.weight"] == (1.0, 0.0)


def test_of_custom_keys_of_one_length_the_alphabetically_first_counts() -> None:
    keys = {"stem": {"lr_mult": 2.0}, "bone": {"lr_mult": 3.0}}
    assert ours(Net(), {"custom_keys": keys})["backbone.stem.bias"] == (3.0, 10.0)


def test_a_dot_before_a_name_also_finds_the_parameters_of_the_model_itself() -> None:
    found = changed({"custom_keys": {".bias": {"lr_mult": 0.0}}})
    assert {"bias", "head.1.bias"} <= set(found)
    assert all(name.endswith("bias") for name in found)


def test_other_settings_of_a_custom_key_are_options_of_the_group() -> None:
    keys = {"head": {"momentum": 0.5, "anything": "x", "lr_mult": 2.0}}
    last = groups(Net(), {"custom_keys": keys})[-1]
    assert last["param_names"] == ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"]
    assert (last["lr"], last["momentum"], last["anything"]) == (2.0, 0.5, "x")
    assert "lr_mult" not in last


def test_parameters_of_equal_settings_are_one_group_in_the_order_of_the_model() -> None:
    found = groups(Net(), {"norm_decay_mult": 1.0, "bias_decay_mult": 0.0}, weight_decay=1.0)
    assert [g["weight_decay"] for g in found] == [0.0, 1.0]
    assert found[1]["param_names"][:3] == ["scale", "backbone.stem.weight", "backbone.norm.weight"]
    model = Net()
    keys = {"head": {"lr_mult": 1, "decay_mult": 1}}
    assert len(groups(model, {"custom_keys": keys}, weight_decay=1.0)) == 1


def test_frozen_parameters_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = ours(Net(), {"bias_lr_mult": 1.0})
    assert not {"frozen.weight", "frozen.bias"} & set(found)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert record.message == (
        "2 parameters have requires_grad=False and are not optimized: frozen.weight, frozen.bias"
    )


def test_a_parameter_with_two_names_is_optimized_once() -> None:
    (group,) = groups(Tied(), {"bias_lr_mult": 1.0})
    assert group["param_names"] == [n for n, _ in Tied().named_parameters()]


def test_rules_that_differ_for_two_names_of_a_parameter_are_an_error() -> None:
    cfg: dict[str, Any] = {"custom_keys": {"head": {"lr_mult": 0.5}}}
    message = (
        r"'embed.weight' and 'head.weight' are one parameter, and the rules differ: "
        r"{'lr': 1.0} and {'lr': 0.5}; with bypass_duplicate=True the first counts"
    )
    with pytest.raises(ValueError, match=message):
        groups(Tied(), cfg)


def test_bypass_duplicate_takes_the_first_name_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = {"custom_keys": {"head": {"lr_mult": 0.5}}, "bypass_duplicate": True}
    found = ours(Tied(), cfg)
    assert found["embed.weight"] == BASE
    assert found["head.bias"] == (0.5, 10.0)
    assert "rules skip them: head.weight, branch.norm.weight, branch.norm.bias" in caplog.text


def test_a_custom_key_that_matches_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ours(Net(), {"custom_keys": {"backbone.blok": {"lr_mult": 0.5}, "frozen": {}}})
    warnings = [r.message for r in caplog.records if "custom_keys" in r.message]
    assert warnings == [
        "custom_keys: 'backbone.blok' is in no parameter's name; did you mean 'backbone.block'?"
    ]


def test_the_groups_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ours(nn.Linear(1, 1), {"bias_lr_mult": 2.0})
    assert [r.message for r in caplog.records] == [
        "parameters with {'lr': 1.0, 'weight_decay': 10.0}: weight",
        "parameters with {'lr': 2.0, 'weight_decay': 10.0}: bias",
    ]


def test_a_learning_rate_may_be_a_tensor() -> None:
    found = groups(nn.Linear(1, 1), {"bias_lr_mult": 2.0}, lr=torch.tensor(0.25))
    assert [float(g["lr"]) for g in found] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ([], TypeError, "paramwise_cfg must be None or a dict"),
        ({"custom_keys": ["a"]}, TypeError, r"custom_keys must be a dict of dicts, .*\['a'\]"),
        ({"custom_keys": {"a": 0.1}}, TypeError, "but got 'a': 0.1"),
        ({"norm_decay_mul": 0.0}, ValueError, "no rule 'norm_decay_mul'; did you mean 'norm_dec"),
        ({"bias_lr_mult": "2"}, TypeError, "bias_lr_mult must be a number, but got '2'"),
        ({"bias_lr_mult": -1.0}, ValueError, "bias_lr_mult must be finite and not negative"),
        ({"bypass_duplicate": 1}, TypeError, "bypass_duplicate must be a bool, but got 1"),
        (
            {"custom_keys": {"a": {"lr_mult": None, "decay_mult": True}}},
            TypeError,
            r"custom_keys\['a'\].decay_mult must be a number, but got True",
        ),
        (
            {"custom_keys": {"a": {"lr_mul": 0.1}}},
            ValueError,
            r"custom_keys\['a'\] cannot set 'lr_mul'; did you mean 'lr_mult'",
        ),
        (
            {"custom_keys": {"a": {"momentun": 0.1}}},
            ValueError,
            r"cannot set 'momentun'; did you mean 'momentum'",
        ),
        ({"custom_keys": {"a": {"params": []}}}, ValueError, r"cannot set 'params'$"),
    ],
)
def test_rules_that_make_no_sense_are_refused(cfg: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ours(nn.Linear(1, 1), cfg)


DECAYS = ["bias_decay_mult", "norm_decay_mult", "dwconv_decay_mult", "flat_decay_mult"]


@pytest.mark.parametrize(
    "rule", [{d: 0.0} for d in DECAYS] + [{"custom_keys": {"a": {"decay_mult": 1}}}]
)
def test_a_weight_decay_to_multiply_must_be_configured(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"_mult multiplies weight_decay: the optimizer's must be"):
        groups(nn.Linear(1, 1), rule)


def test_a_learning_rate_to_multiply_must_be_configured() -> None:
    with pytest.raises(ValueError, match="bias_lr_mult multiplies lr: the optimizer's must be"):
        DefaultOptimWrapperConstructor({"optimizer": {"type": "Adam"}}, {"bias_lr_mult": 2.0})
    keys = {"bias": {"betas": (0.5, 0.9)}}
    wrapper = DefaultOptimWrapperConstructor(
        {"optimizer": {"type": "Adam"}}, {"custom_keys": keys}
    )(nn.Linear(1, 1))
    assert [g["lr"] for g in wrapper.optimizer.param_groups] == [1e-3, 1e-3]
