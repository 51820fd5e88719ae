"""References between the keys of a configuration."""

import copy
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
