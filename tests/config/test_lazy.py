import builtins
import math
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from config_toys import write

from hooktrain.config import ConfigDict, LazyCall, LazyConfig, instantiate, resolve

# LazyCall and instantiate


class Recorder:
    """Remembers what it was called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def scaled(value: float, *, factor: float = 1.0) -> float:
    if factor == 0:
        raise FileNotFoundError(2, "no such factor", "zero.txt")
    return value * factor


def takes_wrong_types() -> None:
    raise TypeError("inside the target")


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_a_target_is_called_with_positional_and_keyword_arguments() -> None:
    cfg = LazyCall(torch.nn.Linear)(3, out_features=2, bias=False)
    layer = instantiate(cfg)
    assert isinstance(layer, torch.nn.Linear)
    assert (layer.in_features, layer.out_features, layer.bias) == (3, 2, None)


def test_children_are_built_before_their_parents_at_any_depth() -> None:
    cfg = LazyCall(Recorder)(
        LazyCall(scaled)(1.0, factor=2.0),
        plain={"inner": [LazyCall(scaled)(3.0), (LazyCall(scaled)(4.0), "x")]},
    )
    built = instantiate(cfg)
    assert built.args == (2.0,)
    assert built.kwargs == {"plain": {"inner": [3.0, (4.0, "x")]}}


def test_targets_inside_plain_dicts_and_lists_are_built_too() -> None:
    plain = {
        "a": {"_target_": scaled, "value": 5.0},
        "b": [{"_target_": "builtins.len", "_args_": ["xy"]}],
    }
    assert instantiate(plain) == {"a": 5.0, "b": [2]}
    assert instantiate([LazyCall(scaled)(1.0)]) == [1.0]
    assert instantiate(ConfigDict(train={"x": LazyCall(scaled)(2.0)}))["train"]["x"] == 2.0
    assert plain["a"] == {"_target_": scaled, "value": 5.0}


def test_a_target_meets_plain_python_types_only() -> None:
    built = instantiate(LazyCall(Recorder)([{"x": ({},)}], d={"y": []}))
    (args,) = built.args
    values = [
        args,
        args[0],
        args[0]["x"],
        args[0]["x"][0],
        built.kwargs["d"],
        built.kwargs["d"]["y"],
    ]
    assert [type(v) for v in values] == [list, dict, tuple, dict, dict, list]


def test_what_is_already_built_passes_through() -> None:
    model, ordered = torch.nn.Linear(1, 1), OrderedDict(a=1)
    assert instantiate(model) is model
    assert instantiate(ordered) is ordered
    assert instantiate("text") == "text"
    assert instantiate(None) is None
    built = instantiate(LazyCall(Recorder)(model=model))
    assert built.kwargs["model"] is model
    assert instantiate(built) is built


def test_references_are_resolved() -> None:
    cfg = ConfigDict(
        width=4,
        model=LazyCall(torch.nn.Linear)("${width}", out_features="${._args_.0}"),
        kind=torch.nn.ReLU,
        head=LazyCall("${kind}")(inplace=True),
    )
    resolve(cfg)
    assert instantiate(cfg.model).out_features == 4
    assert instantiate(cfg.model).in_features == 4
    assert isinstance(instantiate(cfg.head), torch.nn.ReLU)


def test_a_target_may_be_a_name_or_itself_lazy() -> None:
    assert isinstance(instantiate(LazyCall("torch.nn.ReLU")()), torch.nn.ReLU)
    make = LazyCall("functools.partial")(scaled, factor=3.0)
    assert instantiate(LazyCall(make)(2.0)) == 6.0


@pytest.mark.parametrize("target", [3, None, ["torch.nn.ReLU"]])
def test_a_lazy_call_of_something_that_cannot_be_called_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="LazyCall needs a callable, its name or a config"):
        LazyCall(target)


def test_a_lazy_call_refuses_arguments_with_its_own_keys() -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument '_target_'"):
        LazyCall(dict)(_target_=3)


def test_an_unknown_argument_names_the_key_and_the_nearest_parameter() -> None:
    cfg = ConfigDict(model={"head": LazyCall(torch.nn.Linear)(3, out_feature=4)})
    with pytest.raises(TypeError, match="unexpected keyword argument 'out_feature'") as error:
        instantiate(cfg)
    assert notes(error.value) == [
        "while instantiating Linear (model.head); did you mean 'out_features'?"
    ]


def test_a_missing_argument_names_the_key_and_the_parameter() -> None:
    cfg = ConfigDict(layers=[1, LazyCall(torch.nn.Linear)(3)])
    with pytest.raises(
        TypeError, match=r"'out_features'\nwhile instantiating Linear \(layers\.1\)"
    ):
        instantiate(cfg)


def test_a_part_is_named_by_its_path_in_what_is_instantiated() -> None:
    cfg = ConfigDict(model={"head": LazyCall(torch.nn.Linear)(3)})
    with pytest.raises(TypeError, match=r"instantiating Linear \(model\.head\)"):
        instantiate(cfg)
    with pytest.raises(TypeError, match=r"instantiating Linear \(the config\)"):
        instantiate(cfg.model.head)


def test_an_error_of_a_target_keeps_its_type_and_notes_the_key() -> None:
    cfg = ConfigDict(a=[{"b": LazyCall(scaled)(3.0, factor=0)}], c=LazyCall(takes_wrong_types)())
    with pytest.raises(FileNotFoundError, match="no such factor") as error:
        instantiate(cfg)
    assert error.value.filename == "zero.txt"
    assert notes(error.value) == ["while instantiating scaled (a.0.b)"]
    with pytest.raises(TypeError, match="inside the target") as other:
        instantiate(cfg.c)
    assert notes(other.value) == ["while instantiating takes_wrong_types (the config)"]


def test_a_target_that_cannot_be_located_names_the_key() -> None:
    cfg = ConfigDict(optimizer={"_target_": "torch.optim.SDG"})
    with pytest.raises(ImportError, match="did you mean 'SGD'") as error:
        instantiate(cfg)
    assert notes(error.value) == ["while instantiating torch.optim.SDG (optimizer)"]


def test_a_target_that_is_not_callable_names_the_key() -> None:
    with pytest.raises(TypeError, match=r"not callable\nwhile instantiating 3 \(x\)"):
        instantiate(ConfigDict(x={"_target_": 3}))


def test_a_builtin_without_a_signature_reports_its_own_error() -> None:
    with pytest.raises(TypeError, match="'int' object is not iterable") as error:
        instantiate(ConfigDict(x=LazyCall(dict.fromkeys)(3)))
    assert notes(error.value) == ["while instantiating dict.fromkeys (x)"]


def test_a_part_that_two_keys_refer_to_is_built_for_each() -> None:
    cfg = resolve(ConfigDict(a=LazyCall(Recorder)(), b="${a}", c="${a}"))
    built = instantiate(cfg)
    assert len({id(x) for x in built.values()}) == 3


# LazyConfig.load


def test_a_config_is_the_public_dicts_and_lists_of_a_file(tmp_path: Path) -> None:
    text = (
        "import math\nfrom hooktrain.config import LazyCall as L\n"
        "limit = 3\ntrain = dict(max_iter=limit, pi=math.pi)\nhooks = [dict(period=2)]\n"
        "model = L('torch.nn.ReLU')()\n_private = {}\ndef f(): pass\n"
    )
    cfg = LazyConfig.load(write(tmp_path, main=text) / "main.py")
    assert cfg == {
        "train": {"max_iter": 3, "pi": math.pi},
        "hooks": [{"period": 2}],
        "model": {"_target_": "torch.nn.ReLU"},
    }
    assert type(cfg) is ConfigDict
    assert cfg.hooks[0].period == 2


def test_all_names_what_belongs_to_the_config(tmp_path: Path) -> None:
    write(tmp_path, main="__all__ = ['seed', 'a']\nseed = 3\na = {}\nb = {}\n")
    assert LazyConfig.load(tmp_path / "main.py") == {"seed": 3, "a": {}}
    write(tmp_path, main="__all__ = ['seeds']\nseed = 3\n")
    with pytest.raises(KeyError, match=r"main\.py' has no 'seeds'; did you mean 'seed'"):
        LazyConfig.load(tmp_path / "main.py")


def test_keys_choose_objects(tmp_path: Path) -> None:
    text = (
        "n = 5\ntrain = dict(n='${other.n}')\nother = dict(n=1)\n_hidden = dict(x=1)\n"
        "hooks = ['${train.n}']\n"
    )
    file = write(tmp_path, main=text) / "main.py"
    train, n, hidden = LazyConfig.load(str(file), keys=("train", "n", "_hidden"))
    assert (train.n, n, hidden.x) == (1, 5, 1)
    assert LazyConfig.load(file, "n") == 5
    assert LazyConfig.load(file, ["n"]) == (5,)
    assert LazyConfig.load(file, "hooks")[0] == 1
    with pytest.raises(KeyError, match=r"main\.py' has no 'trian'; did you mean 'train'"):
        LazyConfig.load(file, "trian")


def test_relative_imports_are_files_and_need_no_init(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="y = dict(v='base')\n",
        common__train="train = dict(max_iter=1, inner=dict(z=0))\n",
        common__data__sets="from ...base import y\nfrom ..train import train as t\nsets = [t, y]\n",
        runs__main=(
            "from . import side, other as o\nfrom .side import s as s2\n"
            "from ..common.train import train\nfrom ..common.data.sets import sets\n"
            "from ..common.data import sets as sets_file\n"
            "from ..common import train as train_file\n"
            "from .many import *\nfrom .. import base\n"
            "train.max_iter = 7\ntrain.inner.z = 8\n"
            "got = [side.s.v, o.v, s2.v, sets[1].v, sets_file.sets[0].max_iter,"
            " train_file.train.max_iter, m1.v, base.y.v]\n"
        ),
        runs__side="s = dict(v='side')\n",
        runs__other="v = 'other'\n",
        runs__many="m1 = dict(v='m1')\n_m2 = 5\n",
    )
    cfg = LazyConfig.load(tmp_path / "runs" / "main.py")
    assert cfg.got == ["side", "other", "side", "base", 1, 1, "m1", "base"]
    assert cfg.train == {"max_iter": 7, "inner": {"z": 8}}
    assert set(cfg) == {"got", "train", "sets", "s2", "m1"}


def test_loads_share_nothing(tmp_path: Path) -> None:
    write(
        tmp_path,
        common="shared = dict(n=0, l=[])\n",
        a="from .common import shared\nshared.n += 1\nshared.l.append(1)\n",
        b="from .common import shared\nfrom .a import shared as changed\n",
    )
    for _ in range(2):
        assert LazyConfig.load(tmp_path / "a.py").shared == {"n": 1, "l": [1]}
        cfg = LazyConfig.load(tmp_path / "b.py")
        assert cfg.shared.n == 0
        assert cfg.changed.n == 1
        cfg.shared.n = 5


def test_absolute_imports_are_pythons_own(tmp_path: Path) -> None:
    write(tmp_path, main="import torch.nn as nn\nfrom collections import OrderedDict\na = [nn]\n")
    assert LazyConfig.load(tmp_path / "main.py").a[0] is torch.nn
    write(tmp_path, main="import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        LazyConfig.load(tmp_path / "main.py")


def test_a_file_may_define_dataclasses_and_is_no_module_afterwards(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int = 5\na = dict(v=A())\n"
    )
    before = set(sys.modules)
    assert LazyConfig.load(write(tmp_path, main=text) / "main.py").a.v.x == 5
    write(tmp_path, main="1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        LazyConfig.load(tmp_path / "main.py")
    assert not [name for name in set(sys.modules) - before if "main" in name]


def test_a_relative_import_may_stand_in_a_function(tmp_path: Path) -> None:
    write(
        tmp_path, side="x = dict(v=1)\n", main="def f():\n    from .side import x\n    return x\n"
    )
    assert LazyConfig.load(tmp_path / "main.py", "f")() == {"v": 1}


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("from .nothing import x", "nothing.py"),
        ("from ..nothing.there import x", "../nothing/there.py"),
        ("from . import nothing", "nothing.py"),
        ("from .folder import nothing", "folder/nothing.py"),
        ("from .folder import *", "folder/*.py"),
    ],
)
def test_a_relative_import_of_nothing_names_the_missing_file(
    tmp_path: Path, statement: str, missing: str
) -> None:
    write(tmp_path, runs__main=statement + "\n", runs__folder__x="")
    path = os.path.normpath(tmp_path / "runs" / missing)
    with pytest.raises(FileNotFoundError) as error:
        LazyConfig.load(tmp_path / "runs" / "main.py")
    assert error.value.filename == path


def test_a_name_that_an_imported_file_lacks_is_an_import_error(tmp_path: Path) -> None:
    write(tmp_path, side="x = {}\n", main="from .side import y\n")
    with pytest.raises(ImportError, match=r"cannot import name 'y' from .*side\.py"):
        LazyConfig.load(tmp_path / "main.py")


def test_files_that_import_each_other_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, a="from .b import x\n", b="from .a import x\n")
    with pytest.raises(ImportError, match=r"in a circle, .*a\.py among them"):
        LazyConfig.load(tmp_path / "a.py")


def test_a_config_that_raises_leaves_pythons_import_alone(tmp_path: Path) -> None:
    original = builtins.__import__
    write(tmp_path, side="1 / 0\n", main="from .side import x\n")
    with pytest.raises(ZeroDivisionError):
        LazyConfig.load(tmp_path / "main.py")
    assert builtins.__import__ is original
    write(
        tmp_path,
        main="import builtins\nseen = [builtins.__import__]\nfrom .ok import x\n",
        ok="x = {}\n",
    )
    assert LazyConfig.load(tmp_path / "main.py").seen[0] is original


def test_a_syntax_error_names_the_file_and_line(tmp_path: Path) -> None:
    write(tmp_path, side="x = 1\ny = = 2\n", main="from .side import x\n")
    with pytest.raises(SyntaxError) as error:
        LazyConfig.load(tmp_path / "main.py")
    assert error.value.filename == str(tmp_path / "side.py")
    assert error.value.lineno == 2


def test_only_python_files_that_exist_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a \.py file, got 'config\.yaml'"):
        LazyConfig.load("config.yaml")
    with pytest.raises(FileNotFoundError, match=r"absent\.py'"):
        LazyConfig.load(tmp_path / "absent.py")


def test_load_rel_counts_from_the_file_of_the_caller(tmp_path: Path) -> None:
    write(
        tmp_path,
        common__base="x = dict(v=4)\n",
        runs__main=(
            "from hooktrain.config import LazyConfig\n"
            "x = LazyConfig.load_rel('../common/base.py', 'x')\n"
        ),
    )
    assert LazyConfig.load(tmp_path / "runs" / "main.py").x.v == 4
    with pytest.raises(FileNotFoundError, match=r"tests/config/nothing\.py"):
        LazyConfig.load_rel("nothing.py")
