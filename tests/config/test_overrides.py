import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hooktrain.config import ConfigDict, LazyCall, LazyConfig, apply_overrides


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
        ("", ""),
        (" a b ", " a b "),
        ("it's", "it's"),
        ("2020-01-01", "2020-01-01"),
        ("1-2", "1-2"),
        ("1e-3", 0.001),
        (" 3 ", 3),
        ("7#exp", "7#exp"),
        ("'#fff'", "#fff"),
        ("true", True),
        ("FALSE", False),
        ("NONE", None),
        ("null", None),
        ("inf", math.inf),
        ("-Inf", -math.inf),
        ("'off'", "off"),
        ("offline", "offline"),
        ('"a b"', "a b"),
        ("1,2", (1, 2)),
    ],
)
def test_a_value_is_a_python_literal_or_else_a_string(text: str, expected: Any) -> None:
    cfg = apply_overrides(config(), [f"train.name={text}"])
    assert cfg.train.name == expected
    assert type(cfg.train.name) is type(expected) or isinstance(
        cfg.train.name, type(expected)
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_iter=1e4", 10_000),
        ("max_iter=1.5", 1.5),
        ("max_iter=2.0", 2.0),
        ("amp.enabled=yes", True),
        ("amp.enabled=Off", False),
        ("amp.enabled={'dtype': 1}", {"dtype": 1}),
        ("lr=1e4", 10_000.0),
    ],
)
def test_a_value_is_understood_as_what_it_replaces(
    override: str, expected: Any
) -> None:
    cfg = ConfigDict(max_iter=1, lr=0.1, amp={"enabled": not expected})
    name = override.partition("=")[0]
    value = apply_overrides(cfg, [override])
    for part in name.split("."):
        value = value[part]
    assert value == expected
    assert type(value) is (ConfigDict if isinstance(expected, dict) else type(expected))


def test_a_word_in_the_place_of_a_bool_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'train.amp.enabled=treu' replaces False: write true or"
    ):
        apply_overrides(config(), ["train.amp.enabled=treu"])


def test_the_config_itself_is_changed_in_order_and_returned() -> None:
    cfg = config()
    changes = ["train.max_iter=2", "train.max_iter=3", "train.amp={'dtype': 'bf16'}"]
    assert (
        LazyConfig.apply_overrides(cfg, [*changes, "train.name=NaN", "table.0=null"])
        is cfg
    )
    assert cfg.train.max_iter == 3
    assert cfg.train.amp.dtype == "bf16"
    assert "enabled" not in cfg.train.amp
    assert math.isnan(cfg.train.name)
    assert cfg.table == {0: None}


def test_a_reference_may_be_set() -> None:
    cfg = apply_overrides(
        config(), ["hooks.0.period=${train.max_iter}", "train.max_iter=9"]
    )
    assert cfg.hooks[0].period == 9
    assert apply_overrides(cfg, ["train.max_iter=4"]).hooks[0].period == 4


def test_plus_adds_keys_and_the_dicts_on_the_way() -> None:
    cfg = apply_overrides(
        config(), ["+a.b.c=1", "+train.seed=3", "+train.name=x", "+hooks.3=y"]
    )
    assert cfg.a.b.c == 1
    assert (cfg.train.seed, cfg.train.name, cfg.hooks[3]) == (3, "x", "y")


def test_list_items_and_arguments_of_calls_are_set_and_deleted_by_their_index() -> None:
    cfg = apply_overrides(
        config(), ["hooks.0.period=7", "hooks.2='x'", "hooks.-2.period=8"]
    )
    assert cfg.hooks == [{"period": 7}, {"period": 8}, "x"]
    apply_overrides(cfg, ["~train.amp", "~hooks.0", "~size", "~table"])
    assert cfg == {
        "train": {"max_iter": 1, "name": "run"},
        "hooks": [{"period": 8}, "x"],
    }
    cfg = ConfigDict(model=LazyCall(torch.nn.Linear)(3, out_features=2))
    apply_overrides(cfg, ["model._args_.0=5", "model._target_=torch.nn.Bilinear"])
    assert cfg.model == {
        "_target_": "torch.nn.Bilinear",
        "_args_": [5],
        "out_features": 2,
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.max_itr=3",
            "no 'train.max_itr'; did you mean 'max_iter'? (to add it, write '+tr",
        ),
        ("~train.nam", "no 'train.nam'; did you mean 'name'?"),
        ("hooks.9.period=3", "no 'hooks.9'; there is '0', '1', '2'"),
        ("hooks.first=3", "no 'hooks.first'; there is '0', '1', '2'"),
        ("+hooks.9=3", "no 'hooks.9'; there is '0', '1', '2'"),
        ("train.max_iter.x=3", "no 'train.max_iter.x'; there is nothing"),
        ("size.0=3", "no 'size.0'; there is nothing"),
    ],
)
def test_a_wrong_key_quotes_the_override_and_suggests_the_nearest(
    override: str, message: str
) -> None:
    cfg = config()
    with pytest.raises(KeyError) as error:
        apply_overrides(cfg, [override])
    assert error.value.args[0].startswith(f"the override {override!r}: ")
    assert message in error.value.args[0]
    assert cfg == config()


@pytest.mark.parametrize(
    "override",
    ["train", "train.max_iter", "=3", "a..b=3", ".a=3", "+train", "~", "~train=3", ""],
)
def test_an_override_of_another_form_is_refused(override: str) -> None:
    with pytest.raises(
        ValueError, match="is none of 'key=value', '\\+key=value' or '~key'"
    ) as err:
        apply_overrides(config(), [override])
    assert repr(override) in str(err.value)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2",
        "[a, b]",
        "{a: 1}",
        "'x",
        '"',
        "(1",
        "{[]: 1}",
        "[7]#exp",
        "no",
        "Off",
        "YES",
        "on",
    ],
)
def test_what_may_be_a_text_or_not_is_refused(text: str) -> None:
    override = f"train.name={text}"
    with pytest.raises(ValueError, match="looks like a value") as error:
        apply_overrides(config(), [override])
    assert repr(override) in str(error.value)


# Without references, which would be resolved.
TEXTS = st.text().filter(lambda text: "${" not in text)
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
LITERALS = st.recursive(
    SCALARS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100, database=None)
@given(LITERALS)
def test_the_repr_of_any_value_is_read_back(value: Any) -> None:
    raw = apply_overrides(ConfigDict(a=None), [f"a={value!r}"])["a"]
    assert raw == value
    assert repr(raw) == repr(value)


@settings(deadline=None, max_examples=100, database=None)
@given(st.from_regex(r"[a-zA-Z/][^\n$]*", fullmatch=True))
def test_a_text_that_is_no_literal_arrives_unchanged(text: str) -> None:
    words = {"true", "false", "null", "none", "inf", "nan", "yes", "no", "on", "off"}
    if text.strip().lower() not in words and not {"'", '"'} & set(
        text
    ):  # b'x' and r'x' are literals
        assert apply_overrides(ConfigDict(a=""), [f"a={text}"]) == {"a": text}
