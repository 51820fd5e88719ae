import copy
import json
import pickle
from collections import OrderedDict
from typing import Any

import pytest

from hooktrain.config import ConfigDict, resolve
from hooktrain.config.config_dict import restore_references

WRITTEN = {
    "train": {"max_iter": 100, "name": "run", "ddp": {"bucket": 25}},
    "lr": {
        "length": "${train.max_iter}",
        "warmup": "${.length}",
        "dir": "out/${train.name}/x",
    },
    "hooks": [{"period": "${train.max_iter}"}, "${..train.name}", 3],
}


def train_config() -> ConfigDict:
    return resolve(ConfigDict(WRITTEN))


def test_items_are_attributes_at_any_depth() -> None:
    cfg = train_config()
    assert cfg.train.ddp.bucket == 25
    assert cfg.hooks[0].period == 100
    cfg.train.ddp.bucket = 5
    assert cfg["train"]["ddp"]["bucket"] == 5
    cfg.update({"b": {"x": 1}}, c=[{"y": 2}])
    cfg.setdefault("e", {})["w"] = 4
    assert cfg.setdefault("b", 9) == {"x": 1}
    assert (cfg.b.x, cfg.c[0].y, cfg.e.w) == (1, 2, 4)
    # It is a dict for everybody.
    assert dict(**cfg.train) == {**cfg.train} == dict(cfg.train.items()) == cfg.train
    assert json.loads(json.dumps(cfg)) == cfg
    assert "ddp" in dir(cfg.train)
    del cfg.train.ddp
    assert "ddp" not in cfg.train
    assert ConfigDict(a=({"x": 1}, [{"y": 2}])).a[1][0].y == 2


def test_a_missing_key_suggests_the_nearest() -> None:
    cfg = train_config()
    message = "the config has no 'max_itr'; did you mean 'max_iter'?"
    with pytest.raises(AttributeError) as by_attribute:
        _ = cfg.train.max_itr
    with pytest.raises(KeyError) as by_item:
        cfg["train"]["max_itr"]
    assert str(by_attribute.value) == message
    assert by_item.value.args == (message,)
    with pytest.raises(KeyError, match="nam"):
        del cfg.train.nam
    assert not hasattr(cfg.train, "max_itr")
    assert cfg.train.get("max_itr", 7) == 7
    # A key that is a method of dict is read as an item only.
    cfg.values = 3  # type: ignore[assignment,method-assign]
    assert cfg["values"] == 3


def test_other_values_are_kept_and_the_callers_dicts_and_lists_are_not_touched() -> (
    None
):
    model, ordered = object(), OrderedDict(a={"b": [1]})
    source = {"a": {"b": [model, {"c": 2}]}, "ordered": ordered}
    cfg = ConfigDict(source)
    assert cfg.a.b[0] is model
    assert ConfigDict(cfg).ordered is cfg.copy().ordered is ordered
    cfg.a.b[1].c = 5
    cfg.a.b.append(3)
    assert source == {"a": {"b": [model, {"c": 2}]}, "ordered": ordered}
    assert (type(source["a"]), type(ordered["a"])) == (dict, dict)
    copy.deepcopy(cfg).ordered["a"]["b"].append(2)
    assert ordered["a"] == {"b": [1]}


def test_a_dict_that_is_put_into_two_places_is_copied_into_each() -> None:
    part = ConfigDict(x=[1])
    cfg = ConfigDict(a=part, b=part)
    cfg.b.x.append(2)
    assert (cfg.a.x, cfg.b.x, part.x) == ([1], [1, 2], [1])
    cfg.inner = cfg
    assert cfg == {"a": {"x": [1]}, "b": {"x": [1, 2]}, "inner": {**cfg.inner}}


# references


def test_a_reference_has_the_value_and_type_of_what_it_names() -> None:
    cfg = train_config()
    assert cfg.lr == {"length": 100, "warmup": 100, "dir": "out/run/x"}
    assert cfg.hooks == [{"period": 100}, "run", 3]


def test_a_reference_may_name_anything_and_stand_anywhere() -> None:
    cfg = ConfigDict(
        a={"x": "${n}"}, b="${a}", c="${b.x}", d="${l.-1.y}", e="${t.0}", n=1
    )
    cfg.update(l=[0, {"y": 5}], t=("${n}", ["${n}", {"y": "${....n}"}], "a"), u="${t}")
    cfg.f = "${n}-${n}-${c}"
    resolve(cfg)
    assert cfg.b is cfg.a
    assert (cfg.c, cfg.d, cfg.e, cfg.f) == (1, 5, 1, "1-1-1")
    assert cfg.t == cfg.u == (1, [1, {"y": 1}], "a")
    # Relative ones climb one level a dot.
    cfg = ConfigDict(
        x=0, a={"x": 1, "b": {"x": 2, "r": ["${..x}", "${...x}", "${....x}"]}}
    )
    assert resolve(cfg).a.b.r == [2, 1, 0]


def test_a_backslash_makes_a_reference_plain_text() -> None:
    cfg = resolve(ConfigDict(a=r"\${HOME}/x", b="cost: $5 {x}", c="${a}"))
    assert cfg == {"a": "${HOME}/x", "b": "cost: $5 {x}", "c": "${HOME}/x"}
    assert resolve(cfg).a == "${HOME}/x"


def test_to_resolve_again_follows_what_was_changed_and_keeps_what_replaced_a_reference() -> (
    None
):
    cfg = train_config()
    cfg.train.max_iter = 7
    cfg.lr.dir = "elsewhere"
    del cfg.hooks[0]
    assert cfg.lr.length == 100
    resolve(cfg)
    assert cfg.lr == {"length": 7, "warmup": 7, "dir": "elsewhere"}
    assert cfg.hooks == ["run", 3]


def test_references_are_put_back_as_they_were_written() -> None:
    assert restore_references(train_config()) == WRITTEN
    cfg = resolve(ConfigDict(t=("${n}", ("${n}",)), n=1))
    assert restore_references(cfg) == {"t": ("${n}", ("${n}",)), "n": 1}


@pytest.mark.parametrize(
    "make_copy",
    [
        copy.copy,
        copy.deepcopy,
        ConfigDict.copy,
        lambda cfg: pickle.loads(pickle.dumps(cfg)),
    ],
)
def test_a_copy_has_dicts_of_its_own_and_remembers_the_references(
    make_copy: Any,
) -> None:
    cfg = train_config()
    new = make_copy(cfg)
    assert type(new) is type(new.train) is ConfigDict
    assert new == cfg
    new.train.name = "other"
    new.hooks.append(4)
    assert resolve(new).lr.dir == "out/other/x"
    assert new.hooks[1] == "other"
    assert cfg == train_config()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("${train.max_itr}", "names nothing: no 'max_itr'; did you mean 'max_iter'"),
        ("${trian.max_iter}", "names nothing: no 'trian'; did you mean 'train'"),
        ("a/${.zz}", "names nothing: no 'zz'"),
        ("${train.max_iter.x}", "names nothing: no 'x'; there is nothing"),
        ("${list.4}", "names nothing: no '4'"),
        ("${....x}", "climbs above the root"),
        ("${train.max_iter", "has no closing brace"),
        ("a/${train}", "names a dict or list, which cannot be put into a text"),
        ("${}", "names nothing: no ''"),
    ],
)
def test_a_reference_that_names_nothing_says_which_key_holds_it(
    reference: str, message: str
) -> None:
    cfg = ConfigDict(train={"max_iter": 3}, list=[1], holder={"key": reference})
    with pytest.raises(ValueError, match=r"^holder\.key: the reference '\$\{") as error:
        resolve(cfg)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("items", "circle"),
    [
        ({"a": "${b.c}", "b": {"c": "x${d.0}"}, "d": ["${a}"]}, "a -> b.c -> d.0 -> a"),
        ({"f": "${f}"}, "f -> f"),
        ({"g": ("${g}",)}, "g.0 -> g.0"),
        ({"a": {"b": "${c}"}, "c": {"d": "${a}"}}, "a.b -> c.d -> a.b"),
    ],
)
def test_a_circle_of_references_is_spelled_out(
    items: dict[str, Any], circle: str
) -> None:
    with pytest.raises(ValueError, match="references go round in a circle") as error:
        resolve(ConfigDict(items))
    assert str(error.value).endswith(f": {circle}")
