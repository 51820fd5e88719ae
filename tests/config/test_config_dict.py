import json
from collections import OrderedDict
from typing import Any

import pytest

from hooktrain.config import ConfigDict


def train_config() -> ConfigDict:
    return ConfigDict(
        train={"max_iter": 100, "name": "run", "ddp": {"bucket": 25}},
        lr={"length": "${train.max_iter}", "warmup": "${.length}", "dir": "out/${train.name}/x"},
        hooks=[{"period": "${train.max_iter}"}, "${..train.name}", 3],
    )


def test_items_are_attributes_at_any_depth() -> None:
    cfg = train_config()
    assert cfg.train.ddp.bucket == 25
    assert cfg.hooks[0].period == 100
    cfg.train.ddp.bucket = 5
    assert cfg["train"]["ddp"]["bucket"] == 5
    del cfg.train.ddp
    assert "ddp" not in cfg.train


def test_dicts_inside_tuples_and_lists_have_attributes() -> None:
    cfg = ConfigDict(a=({"x": 1}, [{"y": "${b}"}]), b=2)
    assert isinstance(cfg.a, tuple)
    assert cfg.a[0].x == 1
    assert cfg.a[1][0].y == 2


def test_a_missing_key_names_its_full_path_and_the_nearest_key() -> None:
    cfg = train_config()
    message = "the config has no 'train.max_itr'; did you mean 'max_iter'?"
    with pytest.raises(AttributeError) as by_attribute:
        _ = cfg.train.max_itr
    with pytest.raises(KeyError) as by_item:
        cfg["train"]["max_itr"]
    assert str(by_attribute.value) == message
    assert by_item.value.args == (message,)
    with pytest.raises(AttributeError, match=r"has no 'hooks.0.perid'"):
        _ = cfg.hooks[0].perid
    with pytest.raises(KeyError, match=r"has no 'train.nam'"):
        del cfg.train["nam"]
    with pytest.raises(AttributeError, match=r"has no 'train.nam'"):
        del cfg.train.nam
    assert not hasattr(cfg.train, "max_itr")
    assert cfg.train.get("max_itr", 7) == 7


def test_the_path_of_a_dict_in_a_tuple_is_named() -> None:
    cfg = ConfigDict(a={"b": (1, ({"x": 1},))})
    with pytest.raises(AttributeError, match=r"has no 'a.b.1.0.y'"):
        _ = cfg.a.b[1][0].y


def test_a_key_that_is_a_method_of_dict_is_reached_as_an_item_only() -> None:
    cfg = ConfigDict({"items": 3})
    assert cfg["items"] == 3
    with pytest.raises(AttributeError, match=r"write cfg\['values'\] = "):
        cfg.values = 3  # type: ignore[assignment,method-assign]
    assert dict(cfg.items()) == {"items": 3}


def test_tab_completion_offers_the_keys() -> None:
    assert "max_iter" in dir(train_config().train)


def test_the_callers_dicts_and_lists_are_not_touched() -> None:
    source = {"a": {"b": [1, {"c": 2}]}}
    cfg = ConfigDict(source)
    cfg.a.b[1].c = 5
    cfg.a.b.append(3)
    assert source == {"a": {"b": [1, {"c": 2}]}}
    assert type(source["a"]) is dict


def test_other_values_are_kept_as_they_are() -> None:
    model, ordered = object(), OrderedDict(a={"b": 1})
    cfg = ConfigDict(params={"model": model}, ordered=ordered)
    assert cfg.params.model is model
    assert cfg.ordered is ordered
    assert type(cfg.ordered["a"]) is dict
    assert ConfigDict(cfg).params.model is model


def test_update_or_and_setdefault_convert_what_they_store() -> None:
    cfg = ConfigDict(a=1)
    cfg.update({"b": {"x": 1}}, c=[{"y": 2}])
    cfg |= {"d": {"z": 3}}
    cfg.setdefault("e", {})["w"] = 4
    assert cfg.setdefault("a", 9) == 1
    assert (cfg.b.x, cfg.c[0].y, cfg.d.z, cfg.e.w) == (1, 2, 3, 4)
    merged = cfg | {"a": {"v": 5}}
    assert merged.a.v == 5
    assert cfg.a == 1


def test_lists_convert_what_they_store() -> None:
    cfg = ConfigDict(a=[], n=7)
    cfg.a.append({"x": 1})
    cfg.a.insert(0, {"x": 0})
    cfg.a += [{"x": "${n}"}]
    cfg.a.extend([{"x": 3}])
    cfg.a[1] = {"x": 11}
    assert [item.x for item in cfg.a] == [0, 11, 7, 3]
    cfg.a[:2] = [{"x": 4}]
    assert [item.x for item in reversed(cfg.a)] == [3, 7, 4]
    assert cfg.a.pop().x == 3
    assert isinstance(cfg.a, list)
    assert cfg.a == [{"x": 4}, {"x": "${n}"}]


def test_a_reference_has_the_value_and_type_of_what_it_names() -> None:
    cfg = train_config()
    assert cfg.lr.length == 100
    assert cfg.lr.warmup == 100
    assert cfg.lr.dir == "out/run/x"
    assert cfg.hooks[1] == "run"
    cfg.train.max_iter = 7
    assert cfg.lr.warmup == 7
    assert cfg.hooks[0]["period"] == 7


def test_a_reference_to_a_dict_is_that_dict() -> None:
    cfg = ConfigDict(a={"x": 1}, b="${a}", c="${b.x}", d="${l.1.y}", l=[0, {"y": 5}], t=(1, 2))
    assert cfg.b is cfg.a
    assert (cfg.c, cfg.d) == (1, 5)
    cfg.e = "${t.1}"
    assert cfg.e == 2


def test_every_way_of_reading_resolves() -> None:
    cfg = ConfigDict(a=1, b="${a}", c=["${a}", "x${a}"], d=("${a}", ["${..a}"]))
    plain = {"a": 1, "b": 1, "c": [1, "x1"], "d": (1, [1])}

    def received(**kwargs: Any) -> dict[str, Any]:
        return kwargs

    assert cfg.b == cfg["b"] == cfg.get("b") == 1
    assert dict(cfg.items())["b"] == 1
    assert list(cfg.values())[1] == 1
    assert dict(cfg)["b"] == received(**cfg)["b"] == {**cfg}["b"] == 1
    assert list(cfg.c) == [*cfg.c] == cfg.c[:] == cfg.c.__add__([]) == [1, "x1"]
    assert cfg.d[0] == 1
    assert json.loads(json.dumps(cfg)) == {**plain, "d": [1, [1]]}
    assert cfg.copy().pop("b") == 1


def test_relative_references_climb_one_level_a_dot() -> None:
    cfg = ConfigDict(x=0, a={"x": 1, "b": {"x": 2, "r": ["${..x}", "${...x}", "${....x}"]}})
    assert list(cfg.a.b.r) == [2, 1, 0]


def test_a_tuple_is_no_level_of_its_own() -> None:
    cfg = ConfigDict(x=0, a={"x": 1, "t": ("${.x}", {"y": "${..x}"})})
    assert cfg.a.t[0] == 1
    assert cfg.a.t[1].y == 1


def test_a_backslash_makes_a_reference_plain_text() -> None:
    assert ConfigDict(a=r"\${HOME}/x").a == "${HOME}/x"
    assert ConfigDict(a="cost: $5 {x}").a == "cost: $5 {x}"
