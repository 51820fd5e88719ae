from typing import Any

import pytest
import torch

from hooktrain.config import ConfigDict, LazyCall, apply_overrides


def config() -> ConfigDict:
    return ConfigDict(
        train={"max_iter": 1, "name": "run", "amp": {"enabled": False}},
        hooks=[{"period": 1}, {"period": 2}, 3],
        size=(1, 2),
        table={0: "zero"},
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1=2", "1=2"),
        (" a b ", " a b "),
        ("it's", "it's"),
        ("1e-3", 0.001),
        (" 3 ", 3),
        ("7#exp", "7#exp"),
        ("'#fff'", "#fff"),
        ("true", True),
        ("FALSE", False),
        ("NONE", None),
        ("null", None),
        ('"a b"', "a b"),
        ("1,2", (1, 2)),
    ],
)
def test_a_value_is_a_python_literal_or_else_a_text(text: str, expected: Any) -> None:
    cfg = apply_overrides(config(), [f"train.name={text}"])
    assert cfg.train.name == expected
    assert type(cfg.train.name) is type(expected)


def test_overrides_apply_in_order_to_the_config_itself() -> None:
    cfg = config()
    changes = ["train.max_iter=2", "train.max_iter=3", "train.amp={'dtype': 'bf16'}"]
    assert apply_overrides(cfg, [*changes, "table.0=null"]) is cfg
    assert cfg.train.max_iter == 3
    assert cfg.train.amp == {"dtype": "bf16"}
    assert cfg.table == {0: None}


def test_plus_adds_keys() -> None:
    changes = ["+a.b.c=1", "+train.seed=3", "+train.name=x"]
    cfg = apply_overrides(config(), changes)
    assert (cfg.a.b.c, cfg.train.seed, cfg.train.name) == (1, 3, "x")


def test_a_list_is_written_whole() -> None:
    cfg = apply_overrides(config(), ["hooks=[{'period': 3}]"])
    assert cfg.hooks == [{"period": 3}]
    assert cfg.hooks[0].period == 3


def test_list_items_and_arguments_are_set_by_their_index() -> None:
    cfg = apply_overrides(config(), ["hooks.0.period=7", "hooks.2='x'"])
    assert cfg.hooks == [{"period": 7}, {"period": 2}, "x"]
    cfg = ConfigDict(model=LazyCall(torch.nn.Linear)(3, out_features=2))
    apply_overrides(cfg, ["model._args_.0=5", "model._target_=torch.nn.Bilinear"])
    target = "torch.nn.Bilinear"
    assert cfg.model == {"_target_": target, "_args_": [5], "out_features": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_itr=3", "'max_iter'"),
        ("hooks.first=3", "'0', '1', '2'"),
        ("+hooks.3=3", "no '3'"),
        ("train.max_iter.x=3", "no 'x'"),
        ("size.0=3", "no '0'"),
        ("writers=[]", "a + before the key adds it"),
    ],
)
def test_a_wrong_key_suggests_the_nearest(override: str, message: str) -> None:
    cfg = config()
    with pytest.raises(KeyError) as error:
        apply_overrides(cfg, [override])
    assert repr(override) in error.value.args[0]
    assert message in error.value.args[0]
    assert cfg == config()


@pytest.mark.parametrize(
    "override", ["train", "=3", "a..b=3", "+train", "~train.amp", ""]
)
def test_an_override_of_another_form_is_refused(override: str) -> None:
    with pytest.raises(ValueError, match="key=value") as err:
        apply_overrides(config(), [override])
    assert repr(override) in str(err.value)
    assert "--resume takes no path" in str(err.value)


def test_a_class_in_the_place_of_a_call_is_refused_with_its_key() -> None:
    cfg = ConfigDict(optimizer={"_target_": "torch.optim.SGD"})
    with pytest.raises(ValueError, match=r"optimizer\._target_=torch\.optim\.Adam"):
        apply_overrides(cfg, ["optimizer=torch.optim.AdamW"])


@pytest.mark.parametrize(
    "override",
    ["train.amp.enabled=treu", "train.max_iter=1O0", "hooks=[a, b]", "train.amp=yes"],
)
def test_a_text_in_the_place_of_something_else_is_refused(override: str) -> None:
    with pytest.raises(ValueError, match="quotes") as err:
        apply_overrides(config(), [override])
    assert repr(override) in str(err.value)


def test_a_misspelt_period_is_refused_with_an_example() -> None:
    cfg = ConfigDict(train={"eval_period": 5000})
    with pytest.raises(ValueError, match="'1 epoch'"):
        apply_overrides(cfg, ["train.eval_period=2epochs"])


@pytest.mark.parametrize("period", ["2 epochs", "10 minutes"])
def test_a_period_may_be_a_text_in_the_place_of_a_number(period: str) -> None:
    cfg = ConfigDict(train={"eval_period": 5000})
    apply_overrides(cfg, [f"train.eval_period={period}"])
    assert cfg.train.eval_period == period
