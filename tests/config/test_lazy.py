import builtins
import math
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from hooktrain.config import ConfigDict, LazyCall, LazyConfig, instantiate, resolve
from toys import write_configs as write

# LazyCall and instantiate


class Recorder:
    """Remembers what it was called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def scaled(value: float, *, factor: float = 1.0) -> float:
    if factor == 0:
        raise FileNotFoundError(2, "no such factor", "zero.txt")
    return value * factor


def test_a_target_is_called_with_positional_and_keyword_arguments() -> None:
    width = {"width": 3, "kind": torch.nn.Linear}
    for cfg in (
        LazyCall(torch.nn.Linear)(3, out_features=2, bias=False),
        LazyCall("torch.nn.Linear")(3, out_features=2, bias=False),
        LazyCall(LazyCall("functools.partial")(torch.nn.Linear, bias=False))(
            3, out_features=2
        ),
        resolve(ConfigDict(width, x=LazyCall("${kind}")("${width}", 2, bias=False))).x,
    ):
        layer = instantiate(cfg)
        assert isinstance(layer, torch.nn.Linear)
        assert (layer.in_features, layer.out_features, layer.bias) == (3, 2, None)


def test_children_are_built_before_their_parents() -> None:
    part = LazyCall(scaled)(1.0, factor=2.0)
    cfg = resolve(
        ConfigDict(
            a=LazyCall(Recorder)(
                part, plain={"inner": [part, (LazyCall(scaled)(4.0), {})]}
            ),
            b=[{"_target_": "builtins.len", "_args_": ["xy"]}],
            c="${a}",
        )
    )
    built = instantiate(cfg)
    assert built["a"].args == (2.0,)
    assert repr(built["a"].kwargs) == "{'plain': {'inner': [2.0, (4.0, {})]}}"
    for value in (
        built,
        built["a"].kwargs["plain"],
        built["a"].kwargs["plain"]["inner"][1][1],
    ):
        assert type(value) is dict
    assert built["b"] == [2]
    assert (
        built["c"] is not built["a"]
    )  # a part that two keys refer to is built for each
    assert instantiate({"x": part}) == {"x": 2.0}
    assert part == {"_target_": scaled, "_args_": [1.0], "factor": 2.0}


def test_what_is_already_built_passes_through() -> None:
    model = torch.nn.Linear(1, 1)
    for value in (model, OrderedDict(a=LazyCall(dict)()), "text", None):
        assert instantiate(value) is value
    assert instantiate(LazyCall(Recorder)(model=model)).kwargs["model"] is model


@pytest.mark.parametrize(
    ("cfg", "error", "message", "where"),
    [
        (
            {"model": {"head": LazyCall(torch.nn.Linear)(3, out_feature=4)}},
            TypeError,
            "unexpected keyword argument 'out_feature'",
            "Linear (model.head); did you mean 'out_features'?",
        ),
        ([1, LazyCall(torch.nn.Linear)(3)], TypeError, "'out_features'", "Linear (1)"),
        (
            LazyCall(torch.nn.Linear)(3),
            TypeError,
            "'out_features'",
            "Linear (the config)",
        ),
        (
            [{"b": LazyCall(scaled)(3.0, factor=0)}],
            FileNotFoundError,
            "no such factor: 'zero.txt'",
            "scaled (0.b)",
        ),
        (
            {"x": {"_target_": "torch.optim.SDG"}},
            ImportError,
            "did you mean 'SGD'",
            "torch.optim.SDG (x)",
        ),
        ({"x": {"_target_": 3}}, TypeError, "not callable", "3 (x)"),
    ],
)
def test_an_error_keeps_its_type_and_notes_the_key(
    cfg: Any, error: type[Exception], message: str, where: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        instantiate(cfg)
    assert getattr(caught.value, "__notes__", []) == [f"while instantiating {where}"]


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
    assert cfg.hooks[0].period == 2


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
    with pytest.raises(KeyError, match="no 'trian'; did you mean 'train'"):
        LazyConfig.load(file, "trian")


def test_relative_imports_are_files_and_need_no_init(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="y = dict(v='base')\n",
        common__train="train = dict(max_iter=1, inner=dict(z=0))\n",
        common__data__sets="from ...base import y\nfrom ..train import train as t\nsets = [t, y]\n",
        runs__main=(
            "from .side import s as s2\n"
            "from ..common.train import train\nfrom ..common.data.sets import sets\n"
            "from .many import *\n"
            "train.max_iter = 7\ntrain.inner.z = 8\n"
            "got = [s2.v, sets[1].v, m1.v]\n"
        ),
        runs__side="s = dict(v='side')\n",
        runs__many="m1 = dict(v='m1')\n_m2 = 5\n",
    )
    cfg = LazyConfig.load(tmp_path / "runs" / "main.py")
    assert cfg.got == ["side", "base", "m1"]
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


def test_a_file_may_define_dataclasses(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("from .nothing import x", "nothing.py"),
        ("from ..nothing.there import x", "../nothing/there.py"),
        ("from .folder import x", "folder.py"),
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


def test_pythons_own_import_is_left_alone(
    tmp_path: Path,
) -> None:
    original = builtins.__import__
    write(
        tmp_path, bad="1 / 0\n", side="x = dict(v=1)\n", failing="from .bad import x\n"
    )
    with pytest.raises(ZeroDivisionError):
        LazyConfig.load(tmp_path / "failing.py")
    assert builtins.__import__ is original
    later = "def f():\n    from .side import x\n    return builtins.__import__, x\n"
    write(tmp_path, main=f"import builtins\nfrom .side import x\n{later}")
    assert LazyConfig.load(tmp_path / "main.py", "f")() == (original, {"v": 1})


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(ValueError, match=r"config\.yaml' is neither a \.py file nor"):
        LazyConfig.load(tmp_path / "config.yaml")
    with pytest.raises(FileNotFoundError, match=r"absent\.py'"):
        LazyConfig.load(tmp_path / "absent.py")
    write(tmp_path, c="from .d import x\n", d="x = 1\ny = = 2\n")
    with pytest.raises(SyntaxError, match=r"d\.py, line 2"):
        LazyConfig.load(tmp_path / "c.py")


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
