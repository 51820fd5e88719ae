import builtins
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hooktrain.config import ConfigDict, LazyCall, LazyConfig, instantiate, resolve
from toys import write_configs as write

# LazyCall and instantiate


class Recorder:
    """Records the arguments of its call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


def test_a_target_is_called_with_positional_and_keyword_arguments() -> None:
    width = {"width": 3, "kind": torch.nn.Linear}
    partial = LazyCall("functools.partial")(torch.nn.Linear, bias=False)
    for cfg in (
        LazyCall(torch.nn.Linear)(3, out_features=2, bias=False),
        LazyCall("torch.nn.Linear")(3, out_features=2, bias=False),
        LazyCall(partial)(3, out_features=2),
        resolve(ConfigDict(width, x=LazyCall("${kind}")("${width}", 2, bias=False))).x,
    ):
        layer = instantiate(cfg)
        assert isinstance(layer, torch.nn.Linear)
        assert (layer.in_features, layer.out_features, layer.bias) == (3, 2, None)


def test_children_are_built_before_their_parents() -> None:
    part = LazyCall(math.fsum)([1.0, 2.0])
    whole = LazyCall(Recorder)(part, plain={"inner": [part, (part, {})]})
    built = instantiate(resolve(ConfigDict(a=whole, c="${a}")))
    assert built["a"].args == (3.0,)
    assert repr(built["a"].kwargs) == "{'plain': {'inner': [3.0, (3.0, {})]}}"
    assert type(built) is type(built["a"].kwargs["plain"]) is dict
    # A part that two keys refer to is built for each key.
    assert built["c"] is not built["a"]
    assert part == {"_target_": math.fsum, "_args_": [[1.0, 2.0]]}


UNKNOWN_ARGUMENT = {"model": {"head": LazyCall(torch.nn.Linear)(3, out_feature=4)}}


@pytest.mark.parametrize(
    ("cfg", "error", "where"),
    [
        (UNKNOWN_ARGUMENT, TypeError, "Linear (model.head)"),
        ([1, LazyCall(torch.nn.Linear)(3)], TypeError, "Linear (1)"),
        (LazyCall(torch.nn.Linear)(3), TypeError, "Linear (the config)"),
        ({"x": {"_target_": "torch.optim.SDG"}}, ImportError, "torch.optim.SDG (x)"),
        ({"x": {"_target_": 3}}, TypeError, "3 (x)"),
    ],
)
def test_an_error_notes_the_key(
    cfg: Any, error: type[Exception], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error) as caught:
        instantiate(cfg)
    # On Python 3.10 errors have no notes, and the note is logged.
    notes = getattr(caught.value, "__notes__", caplog.messages)
    assert notes[0].startswith(f"while instantiating {where}")


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
    )
    file = write(tmp_path, main=text) / "main.py"
    train, n, hidden = LazyConfig.load(str(file), keys=("train", "n", "_hidden"))
    assert (train.n, n, hidden.x) == (1, 5, 1)
    assert LazyConfig.load(file, "n") == 5
    with pytest.raises(KeyError, match="'train'"):
        LazyConfig.load(file, "trian")


def test_relative_imports_are_files(tmp_path: Path) -> None:
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


def test_references_are_resolved_after_the_whole_file_has_run(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="model = dict(num_classes=3, head=dict(out='${..num_classes}'))\n",
        main="from .base import model\nmodel.num_classes = 5\n",
        failing="from .base import model\nmodel.modl\n",
    )
    with pytest.raises(AttributeError, match="'modl'"):
        LazyConfig.load(tmp_path / "failing.py")
    assert LazyConfig.load(tmp_path / "base.py").model.head.out == 3
    assert LazyConfig.load(tmp_path / "main.py").model.head.out == 5


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
        assert (cfg.shared.n, cfg.changed.n) == (0, 1)
        cfg.shared.n = 5


def test_a_file_may_define_dataclasses(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int = 5\na = dict(v=A())\n"
    )
    before = set(sys.modules)
    assert LazyConfig.load(write(tmp_path, main=text) / "main.py").a.v.x == 5
    assert not [name for name in set(sys.modules) - before if "main" in name]


def test_pythons_own_import_is_left_alone(tmp_path: Path) -> None:
    original = builtins.__import__
    later = "def f():\n    from .side import x\n    return builtins.__import__, x\n"
    write(
        tmp_path,
        bad="1 / 0\n",
        side="x = dict(v=1)\n",
        failing="from .bad import x\n",
        main=f"import builtins\nfrom .side import x\n{later}",
    )
    with pytest.raises(ZeroDivisionError):
        LazyConfig.load(tmp_path / "failing.py")
    assert builtins.__import__ is original
    assert LazyConfig.load(tmp_path / "main.py", "f")() == (original, {"v": 1})
