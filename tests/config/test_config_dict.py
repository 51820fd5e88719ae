import copy
import json
import pickle
from collections import OrderedDict
from typing import Any

import pytest

from hooktrain.config import ConfigDict, to_container


def train_config() -> ConfigDict:
    return ConfigDict(
        train={"max_iter": 100, "name": "run", "ddp": {"bucket": 25}},
        lr={"length": "${train.max_iter}", "warmup": "${.length}", "dir": "out/${train.name}/x"},
        hooks=[{"period": "${train.max_iter}"}, "${..train.name}", 3],
    )


# Access


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


# References


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


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("${train.max_itr}", "names nothing: no 'max_itr'; did you mean 'max_iter'"),
        ("${trian.max_iter}", "names nothing: no 'trian'; did you mean 'train'"),
        ("a/${.zz}", "names nothing: no 'zz'"),
        ("${train.max_iter.x}", "leads into 3 of type int, which has no 'x'"),
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
        _ = cfg.holder.key
    assert message in str(error.value)
    with pytest.raises(ValueError, match=r"holder\.key"):
        cfg.holder.get("key", "default")


@pytest.mark.parametrize(
    ("key", "circle"),
    [
        ("a", "a -> b.c -> d.0 -> a"),
        ("e", "e -> d.0 -> a -> b.c -> d.0"),
        ("f", "f -> f"),
        ("g", "g -> g"),
    ],
)
def test_a_circle_of_references_is_spelled_out(key: str, circle: str) -> None:
    cfg = ConfigDict(a="${b.c}", b={"c": "x${d.0}"}, d=["${a}"], e="${d.0}", f="${f}", g=("${g}",))
    with pytest.raises(ValueError, match="references go round in a circle") as error:
        cfg[key]
    assert str(error.value).endswith(f": {circle}")


def test_the_same_reference_twice_in_one_text_is_no_circle() -> None:
    assert ConfigDict(a="${b}-${b}-${c}", b="${c}", c=1).a == "1-1-1"


# Copies and parents


def test_a_dict_that_has_no_parent_is_taken_in_and_one_that_has_is_copied() -> None:
    free = ConfigDict(x=1)
    cfg = ConfigDict()
    cfg.a = free
    cfg.b = free
    assert cfg.a is free
    assert cfg.b is not free
    cfg.b.x = 2
    assert cfg.a.x == 1


def test_a_config_can_be_put_into_itself_as_a_copy() -> None:
    cfg = ConfigDict(x=1)
    cfg.inner = cfg
    assert cfg == {"x": 1, "inner": {"x": 1}}


def test_references_move_with_a_dict_that_is_copied_elsewhere() -> None:
    cfg = train_config()
    other = ConfigDict(train={"max_iter": 5, "name": "other"}, lr=cfg.lr)
    assert (other.lr.length, other.lr.dir) == (5, "out/other/x")
    assert cfg.lr.length == 100
    other.update(cfg)
    assert to_container(other) == to_container(cfg)


def test_deepcopy_copies_the_tree_and_its_values() -> None:
    cfg = train_config()
    cfg.train.extra = OrderedDict(a=[1])
    new = copy.deepcopy(cfg)
    new.train.max_iter = 1
    new.train.extra["a"].append(2)
    new.hooks.append(4)
    assert new.hooks[0].period == new.lr.warmup == 1
    assert cfg.hooks[0].period == cfg.lr.warmup == 100
    assert cfg.train.extra == {"a": [1]}
    assert len(cfg.hooks) == 3


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, ConfigDict.copy])
def test_a_copy_of_a_part_still_resolves_in_its_tree(make_copy: Any) -> None:
    cfg = train_config()
    part = make_copy(cfg.lr)
    part.extra = 1
    assert part.length == 100
    assert "extra" not in cfg.lr


def test_a_shallow_copy_shares_the_values_but_not_the_dicts() -> None:
    value = object()
    cfg = ConfigDict(a={"b": value}, c=[{"d": 1}])
    new = copy.copy(cfg)
    new.a.x = 1
    new.c[0].d = 2
    assert new.a.b is value
    assert cfg.c[0].d == 1
    assert "x" not in cfg.a
    assert cfg.c.copy() == copy.copy(cfg.c) == copy.deepcopy(cfg.c) == [{"d": 1}]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_references_and_what_they_name(protocol: int) -> None:
    cfg = train_config()
    cfg.t = ({"r": "${train.name}"},)
    new = pickle.loads(pickle.dumps(cfg, protocol))
    assert to_container(new) == to_container(cfg)
    new.train.max_iter = 3
    assert new.hooks[0].period == 3
    assert new.t[0].r == "run"
    part = pickle.loads(pickle.dumps(cfg.hooks, protocol))
    assert part[0].period == 100


def test_to_container_gives_plain_types_and_references_as_written() -> None:
    cfg = train_config()
    cfg.t = ({"r": "${train.name}"},)
    plain = to_container(cfg)
    assert plain == {
        "train": {"max_iter": 100, "name": "run", "ddp": {"bucket": 25}},
        "lr": {"length": "${train.max_iter}", "warmup": "${.length}", "dir": "out/${train.name}/x"},
        "hooks": [{"period": "${train.max_iter}"}, "${..train.name}", 3],
        "t": ({"r": "${train.name}"},),
    }
    nodes = [plain, plain["lr"], plain["hooks"], plain["hooks"][0], plain["t"], plain["t"][0]]
    assert [type(n) for n in nodes] == [dict, dict, list, dict, tuple, dict]


def test_a_config_prints_and_compares_as_written() -> None:
    cfg = ConfigDict(a=1, b="${a}")
    assert repr(cfg) == "{'a': 1, 'b': '${a}'}"
    assert cfg == {"a": 1, "b": "${a}"}
    assert cfg != ConfigDict(a=1, b=1)
