"""Random rules give each parameter the learning rate and weight decay that MMEngine gives it."""

import copy
import sys
import types
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from paramwise_toys import DeformConv2d, Net, Settings, Tied, ours, settings
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.optim.optimizer.default_constructor as mmengine

KEYS = ["backbone", "backbone.block", "block", "norm", ".norm", "norm.weight", "head", "head.0"]
KEYS += [
    "bias",
    ".bias",
    ".scale",
    "weight",
    "conv",
    "offset",
    "deform",
    "embed",
    "branch",
    "a",
    "",
]
KEYS += ["frozen", "no such part"]
MULT = st.sampled_from([0, 0.0, 0.1, 1, 1.0, 0.3, 2.5])
SETTINGS = st.fixed_dictionaries(
    {}, optional={"lr_mult": MULT, "decay_mult": MULT, "momentum": st.just(0.5), "lr": MULT}
)
DECAYS = [f"{part}_decay_mult" for part in ("bias", "norm", "dwconv", "flat")]
RULES = {
    "custom_keys": st.dictionaries(st.sampled_from(KEYS), SETTINGS, max_size=4),
    "bias_lr_mult": MULT,
    "dcn_offset_lr_mult": MULT,
}
CONFIGS = st.fixed_dictionaries({}, optional=RULES | dict.fromkeys(DECAYS, MULT))


@pytest.fixture(autouse=True)
def _deformable_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """MMEngine finds these in mmcv, which is not installed; nor is it to log each parameter."""
    mmcv, ops = types.ModuleType("mmcv"), types.ModuleType("mmcv.ops")
    ops.DeformConv2d = ops.ModulatedDeformConv2d = DeformConv2d  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmcv", mmcv)
    monkeypatch.setitem(sys.modules, "mmcv.ops", ops)
    monkeypatch.setattr(mmengine, "mmcv_full_available", lambda: True)
    monkeypatch.setattr(mmengine, "print_log", lambda *args, **kwargs: None)


def theirs(model: nn.Module, paramwise_cfg: Any) -> Settings:
    optimizer = {"type": "SGD", "lr": 1.0, "weight_decay": 10.0}
    constructor = mmengine.DefaultOptimWrapperConstructor(
        {"type": "OptimWrapper", "optimizer": optimizer}, copy.deepcopy(paramwise_cfg)
    )
    return settings(model, constructor(model).optimizer.param_groups)


# The fixture's changes hold for all examples.
random_rules = examples(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@random_rules
@given(CONFIGS)
def test_settings_are_those_of_mmengine(cfg: dict[str, Any]) -> None:
    model = Net()
    expected = theirs(model, cfg)
    assert ours(model, cfg) == expected
    assert ("frozen.weight" in expected) == (not cfg)  # it is left out where there are rules


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
    assert not refusal or "one parameter, and the rules differ" in refusal
    assert not refusal or cfg["custom_keys"]  # the other rules look at the layer, not at the name


def test_the_rules_make_a_difference_to_every_kind_of_parameter() -> None:
    rules = {rule: 0.1 * k for k, rule in enumerate([*DECAYS, "bias_lr_mult"], start=1)}
    expected = theirs(Net(), {**rules, "dcn_offset_lr_mult": 0.7})
    assert len({*expected.values()}) == 6
