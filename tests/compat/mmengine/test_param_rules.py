"""MMEngine's rules for parameters, compared with MMEngine's."""

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings as examples, strategies as st
from torch import nn

from group_toys import Net, Tied
from hooktrain.compat.mmengine import (
    DefaultOptimWrapperConstructor,
    build_optim_wrapper,
)
from hooktrain.config import ConfigDict

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.optim.optimizer.default_constructor as mmengine


Settings = dict[str, tuple[float, float]]


def settings(model: nn.Module, groups: list[dict[str, Any]]) -> Settings:
    """``(lr, weight_decay)`` of each parameter that is in the groups, by its first name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def groups_of(model: nn.Module, paramwise_cfg: Any, **options: Any) -> Any:
    """The parameter groups of SGD with the learning rate 1 and these options."""
    cfg = {"optimizer": {"type": "SGD", "lr": 1.0, **options}}
    wrapper = DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model)
    return wrapper.optimizer.param_groups


def ours(model: nn.Module, paramwise_cfg: Any) -> Settings:
    return settings(model, groups_of(model, paramwise_cfg, weight_decay=10.0))


DECAYS = [f"{part}_decay_mult" for part in ("bias", "norm", "dwconv", "flat")]


def test_parameters_of_equal_settings_are_one_group_in_the_order_of_the_model() -> None:
    model = Net()
    rules: dict[str, Any] = {"norm_decay_mult": 1.0, "bias_decay_mult": 0.0}
    without, others = groups_of(model, rules, weight_decay=1.0)
    assert (without["weight_decay"], others["weight_decay"]) == (0.0, 1.0)
    assert others["params"][0] is model.scale
    assert others["params"][1] is model.backbone.stem.weight
    rules = {"custom_keys": {"head": {"lr_mult": 1, "decay_mult": 1}}}
    assert len(groups_of(Net(), rules, weight_decay=1.0)) == 1


def test_a_custom_key_may_have_any_option_of_a_group() -> None:
    model = Net()
    keys = {"head": {"momentum": 0.5, "anything": "x", "lr_mult": 2.0}}
    *_, last = groups_of(model, {"custom_keys": keys})
    assert last["params"] == [model.head.weight, model.head.bias]
    assert (last["lr"], last["momentum"], last["anything"]) == (2.0, 0.5, "x")
    assert "lr_mult" not in last


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"norm_decay_mul": 0.0}, "no rule 'norm_decay_mul'; did you mean 'norm_dec"),
        (
            {"flat_decay_mult": 0.0},
            "decay_mult of 'bias' multiplies weight_decay: set it",
        ),
        ({"bias_lr_mult": 2.0}, "lr_mult of 'bias' multiplies lr: set it"),
    ],
)
def test_rules_that_make_no_sense_or_multiply_nothing_are_refused(
    rules: Any, message: str
) -> None:
    constructor = DefaultOptimWrapperConstructor({"optimizer": {"type": "Adam"}}, rules)
    with pytest.raises(ValueError, match=message):
        constructor(nn.Linear(1, 1))


def test_a_configuration_has_rules_once_the_module_is_imported(tmp_path: Any) -> None:
    rules = {"custom_keys": {"bias": {"tags": ["a", {"b": 1}]}}}
    cfg = ConfigDict(
        optimizer={"type": "Adafactor", "eps": [1e-30, 1e-3]}, paramwise_cfg=rules
    )
    wrapper: Any = build_optim_wrapper(nn.Linear(1, 1), cfg)
    torch.save(wrapper.state_dict(), tmp_path / "state.pth")
    groups = torch.load(tmp_path / "state.pth", weights_only=True)["param_groups"]
    assert (groups[1]["eps"], groups[1]["tags"]) == ([1e-30, 1e-3], ["a", {"b": 1}])


def test_the_configurations_serve_several_models() -> None:
    cfg = {"optimizer": {"type": "SGD", "lr": 0.1, "weight_decay": 1.0}}
    rules = {"custom_keys": {"bias": {"lr_mult": 2.0}}, "norm_decay_mult": 0.0}
    before = copy.deepcopy((cfg, rules))
    constructor = DefaultOptimWrapperConstructor(cfg, rules)
    first, second = constructor(nn.Linear(1, 1)), constructor(nn.Linear(2, 2))
    assert (cfg, rules) == before
    assert first.get_lr() == second.get_lr() == {"lr": [0.1, 0.2]}
    assert first.optimizer is not second.optimizer


class ByLayer(DefaultOptimWrapperConstructor):
    def add_params(self, params: Any, module: nn.Module, **kwargs: Any) -> None:
        for layer, parameter in enumerate(module.parameters()):
            scale = self.paramwise_cfg["decay_rate"] ** layer
            params.append({"params": [parameter], "lr": self.base_lr * scale})


class Decaying(DefaultOptimWrapperConstructor):
    def add_params(self, params: Any, module: nn.Module, **kwargs: Any) -> None:
        super().add_params(params, module, **kwargs)
        params[0]["lr"] *= self.paramwise_cfg["decay_rate"]


@pytest.mark.parametrize(("kind", "rates"), [(ByLayer, [1, 0.5]), (Decaying, [0.5, 2])])
def test_a_subclass_may_have_rules_of_its_own(kind: Any, rates: list[float]) -> None:
    rules = {"decay_rate": 0.5, "bias_lr_mult": 2.0}
    constructor = kind({"optimizer": {"type": "SGD", "lr": 1.0}}, rules)
    assert constructor(nn.Linear(1, 1)).get_lr()["lr"] == rates


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


KEYS = ["backbone", "norm", ".norm", "norm.weight", "head", "head.weight", "bias", ""]
KEYS += [".bias", ".scale", "weight", "conv", "embed", "branch", "a", "stem", "no part"]
MULT = st.sampled_from([0, 0.0, 0.1, 1, 1.0, 0.3, 2.5])
OPTIONS = {"lr_mult": MULT, "decay_mult": MULT, "momentum": st.just(0.5), "lr": MULT}
SETTINGS = st.fixed_dictionaries({}, optional=OPTIONS)
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


def test_a_misspelt_multiplier_is_refused_and_an_unmatched_key_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="'lr_mult'"):
        ours(Net(), {"custom_keys": {"a": {"lr_mul": 0.1}}})
    ours(Net(), {"custom_keys": {"encoder.nowhere": {"lr_mult": 0.1}}})
    assert "'encoder.nowhere'" in caplog.text


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
    assert ours(model, cfg) == expected
