import copy
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
    cfg.train.ddp.bucket = 5
    assert cfg["train"]["ddp"]["bucket"] == 5
    cfg.update({"b": {"x": 1}}, c=[{"y": 2}])
    cfg.setdefault("e", {})["w"] = 4
    assert cfg.setdefault("b", 9) == {"x": 1}
    assert (cfg.b.x, cfg.c[0].y, cfg.e.w) == (1, 2, 4)
    del cfg.train.ddp
    assert "ddp" not in cfg.train
    assert ConfigDict(a=({"x": 1}, [{"y": 2}])).a[1][0].y == 2


def test_a_missing_key_suggests_the_nearest() -> None:
    cfg = train_config()
    with pytest.raises(AttributeError, match="'max_iter'"):
        _ = cfg.train.max_itr
    with pytest.raises(KeyError, match="'max_iter'"):
        cfg["train"]["max_itr"]
    assert not hasattr(cfg.train, "max_itr")
    assert cfg.train.get("max_itr", 7) == 7


def test_the_callers_dicts_and_lists_are_not_touched() -> None:
    model, ordered = object(), OrderedDict(a={"b": [1]})
    source = {"a": {"b": [model, {"c": 2}]}, "ordered": ordered}
    cfg = ConfigDict(source)
    assert cfg.a.b[0] is model
    assert cfg.copy().ordered is ordered
    cfg.a.b[1].c = 5
    cfg.a.b.append(3)
    assert source == {"a": {"b": [model, {"c": 2}]}, "ordered": ordered}
    assert (type(source["a"]), type(ordered["a"])) == (dict, dict)


# references


def test_a_reference_has_the_value_of_what_it_names() -> None:
    cfg = train_config()
    assert cfg.lr == {"length": 100, "warmup": 100, "dir": "out/run/x"}
    assert cfg.hooks == [{"period": 100}, "run", 3]


def test_a_reference_may_name_anything_anywhere() -> None:
    cfg = ConfigDict(a={"x": "${n}"}, b="${a}", c="${b.x}", d="${l.1.y}", n=1)
    cfg.update(l=[0, {"y": 5}], t=("${n}", {"y": "${n}"}), f="${n}-${n}-${c}")
    resolve(cfg)
    assert cfg.b is cfg.a
    assert (cfg.c, cfg.d, cfg.f) == (1, 5, "1-1-1")
    assert cfg.t == [1, {"y": 1}]


def test_a_relative_reference_climbs_one_level_a_dot() -> None:
    inner = {"x": 2, "r": ["${..x}", "${...x}", "${....x}"]}
    cfg = ConfigDict(x=0, a={"x": 1, "b": inner})
    assert resolve(cfg).a.b.r == [2, 1, 0]


def test_to_resolve_again_follows_what_was_changed() -> None:
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


@pytest.mark.parametrize(
    "make_copy",
    [
        copy.copy,
        copy.deepcopy,
        ConfigDict.copy,
        lambda cfg: pickle.loads(pickle.dumps(cfg)),
    ],
)
def test_a_copy_is_independent_with_its_references(make_copy: Any) -> None:
    cfg = train_config()
    new = make_copy(cfg)
    assert type(new) is type(new.train) is ConfigDict
    assert new == cfg
    new.train.name = "other"
    new.hooks.append(4)
    assert resolve(new).lr.dir == "out/other/x"
    assert cfg == train_config()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("${train.max_itr}", "'max_iter'"),
        ("a/${.zz}", "no 'zz'"),
        ("${train.max_iter.x}", "no 'x'"),
        ("${list.4}", "no '4'"),
    ],
)
def test_a_reference_that_names_nothing_says_which_key_holds_it(
    reference: str, message: str
) -> None:
    cfg = ConfigDict(train={"max_iter": 3}, list=[1], holder={"key": reference})
    with pytest.raises(ValueError, match=r"^holder\.key") as error:
        resolve(cfg)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "items", [{"a": "${b.c}", "b": {"c": "x${d.0}"}, "d": ["${a}"]}, {"f": "${f}"}]
)
def test_a_circle_of_references_is_an_error(items: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="circular"):
        resolve(ConfigDict(items))
