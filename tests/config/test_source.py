"""Configurations saved as a file that loads again."""

import math
import os
import re
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_toys import write
from hypothesis import given, settings, strategies as st

from hooktrain.config import ConfigDict, LazyCall, LazyConfig, instantiate, resolve
from hooktrain.config.source import config_source


class Precision(Enum):
    HALF = "half"


class Backbone(torch.nn.Module):
    class Block:
        pass

    def __init__(self, width: int, norm: Any = torch.nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm(width)

    @classmethod
    def small(cls) -> "Backbone":
        return cls(2)


def round_trip(cfg: ConfigDict, file: Path) -> ConfigDict:
    LazyConfig.save(cfg, file)
    loaded = LazyConfig.load(file)
    assert isinstance(loaded, ConfigDict)
    return loaded


def test_a_training_config_survives_saving_with_its_references(tmp_path: Path) -> None:
    cfg = ConfigDict(
        model=LazyCall(Backbone)(width="${..train.width}", norm=torch.nn.BatchNorm2d),
        optimizer=LazyCall(torch.optim.AdamW)(lr="${train.lr}", betas=(0.9, 0.999)),
        lr_multiplier=LazyCall("torch.optim.lr_scheduler.LambdaLR")(lr_lambda=math.cos),
        train={"width": 4, "lr": 1e-3, "dtype": torch.bfloat16, "name": "lr ${.lr}"},
    )
    loaded = round_trip(resolve(cfg), tmp_path / "config.py")
    assert loaded == cfg
    assert list(loaded) == list(cfg)
    LazyConfig.apply_overrides(loaded, ["train.lr=0.5"])
    assert (loaded.optimizer.lr, loaded.train.name) == (0.5, "lr 0.5")
    assert isinstance(instantiate(loaded.model).norm, torch.nn.BatchNorm2d)
    assert os.listdir(tmp_path) == ["config.py"]


def test_a_saved_file_reads_like_one_written_by_hand(tmp_path: Path) -> None:
    cfg = ConfigDict(
        model=LazyCall(torch.nn.Linear)(8, out_features="${.x}"),
        train={"max_iter": 10, "name": "a" * 60, "path": "b" * 60},
    )
    LazyConfig.save(cfg, tmp_path / "config.py")
    assert (tmp_path / "config.py").read_text() == (
        "# Written by LazyConfig.save\n"
        "from hooktrain.config import LazyCall\n"
        "from torch.nn import Linear\n"
        "\n"
        "model = LazyCall(Linear)(8, out_features='${.x}')\n"
        "\n"
        "train = {\n"
        "    'max_iter': 10,\n"
        f"    'name': '{'a' * 60}',\n"
        f"    'path': '{'b' * 60}',\n"
        "}\n"
    )


def test_classes_functions_and_members_load_as_the_same_objects(tmp_path: Path) -> None:
    values = [Backbone, Backbone.Block, Precision.HALF, torch.tanh, torch.float16, len]
    loaded = round_trip(ConfigDict(found=values), tmp_path / "config.py").found
    assert all(x is y for x, y in zip(loaded, values, strict=True))
    bound = round_trip(
        ConfigDict(a={"small": Backbone.small}), tmp_path / "config.py"
    ).a.small
    assert bound == Backbone.small


@pytest.mark.parametrize(
    "cfg",
    [
        ConfigDict(),
        ConfigDict(seed=3, train={}),
        ConfigDict(  # the names in the file do not clash
            LazyCall={"a": LazyCall(torch.nn.Linear)(1, 2)},
            Linear=[torch.nn.Linear, torch.ao.nn.quantized.Linear, math.inf],
            inf={"class": 1, "x-y": [2], 3: 4, None: 5, (1, "a"): 6},
        ),
        ConfigDict(_private={"a": 1}, public=[]),
        resolve(ConfigDict(a="${b}", b=[1])),
        ConfigDict({"a": {"_target_": "f", "º": 1}}),
        LazyCall(torch.nn.Linear)(3, out_features=4),
        ConfigDict(a={"_target_": "x", "_args_": []}, b={"_target_": "x", "a b": 1}),
        ConfigDict(b={"_args_": [1]}, c={"_target_": "x", "_args_": None}),
        ConfigDict(a=LazyCall(LazyCall("f.g")(1))(2, x=LazyCall("a.b")())),
        ConfigDict(
            a=[
                (),
                (1,),
                (1, 2),
                ((3,),),
                [[]],
                {},
                None,
                True,
                -0.5,
                -math.inf,
                b"\x00x",
            ]
        ),
        ConfigDict(a=["\\", "'\"", "\n\r\t\x00\x85\u2028", "é😀", "\ud800", "{}", "#"]),
        ConfigDict(a=["x" * 200, {"y" * 50: ("z" * 60,)}, [["w" * 90]]]),
    ],
)
def test_configs_of_any_shape_survive_saving(cfg: ConfigDict, tmp_path: Path) -> None:
    loaded = round_trip(cfg, tmp_path / "config.py")
    assert loaded == cfg
    assert repr(loaded) == repr(cfg)
    assert list(loaded) == list(cfg)


# Without references, which would be resolved.
TEXTS = st.text().filter(lambda text: "${" not in text)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
NAMES = st.from_regex(r"[a-z]_?[a-z]{8}", fullmatch=True)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=60, database=None)
@given(st.dictionaries(NAMES, VALUES, max_size=3))
def test_any_plain_config_survives_saving(
    tmp_path_factory: Any, items: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.py"
    file.write_text(
        config_source(ConfigDict(items)), encoding="utf-8"
    )  # save, but for the fsync
    loaded = LazyConfig.load(file)
    assert loaded == items
    assert repr(loaded) == repr(items)


def test_paths_devices_ranges_partials_and_numbers_of_numpy_survive_saving(
    tmp_path: Path,
) -> None:
    plain = [Path("a/b"), torch.device("cuda", 1), torch.device("cpu"), range(1, 9, 2)]
    numbers = [
        np.float64(0.1),
        np.int64(3),
        np.bool_(True),
        np.str_("x"),
        np.float32(math.inf),
    ]
    assert math.isnan(
        round_trip(ConfigDict(a=[np.float64("nan")]), tmp_path / "config.py").a[0]
    )
    cfg = ConfigDict(
        a=[*plain, *numbers], b={"sgd": partial(torch.optim.SGD, lr=np.float64(0.1))}
    )
    cfg.c = {"both": partial(divmod, plain, **{"a b": 1}), "neither": partial(Backbone)}
    loaded = round_trip(cfg, tmp_path / "config.py")
    assert loaded.a == cfg.a
    assert [type(v) for v in loaded.a[4:]] == [float, int, bool, str, float]
    assert repr((loaded.b, loaded.c)) == repr((cfg.b, cfg.c)).replace(
        "np.float64(0.1)", "0.1"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (lambda x: x, "<function <lambda>"),
        (torch.zeros(2), "tensor([0., 0.])"),
        (torch.nn.Linear(1, 1), "Linear(in_features=1"),
        (Path("x").exists, "<bound method Path.exists"),
        (np.longdouble(1), repr(np.longdouble(1))),
    ],
)
def test_what_cannot_be_saved_is_said_and_fails_when_it_is_made(
    value: Any, shown: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = ConfigDict(
        a=LazyCall(dict)(1, b=[0, {"x": value}]), c=LazyCall(min)(0, value)
    )
    cfg.update(d={"_target_": value}, e=[1])
    loaded = round_trip(cfg, tmp_path / "config.py")
    lacks = [record.getMessage().split(": ")[0] for record in caplog.records]
    assert lacks == [
        f"The saved config lacks {k}" for k in ("a.b.1.x", "c._args_.1", "d._target_")
    ]
    assert loaded.e == [1]
    for part in (loaded.a, loaded.c, loaded.d):
        with pytest.raises(ImportError, match=re.escape(f"NOT SAVED: {shown}")):
            instantiate(part)


def test_a_function_of_the_config_file_itself_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, main="def f(): pass\na = dict(f=f)\n")
    LazyConfig.save(LazyConfig.load(tmp_path / "main.py"), tmp_path / "config.py")
    assert "lacks a.f: <function f" in caplog.text


def test_a_save_that_fails_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.py"
    LazyConfig.save(ConfigDict(a={"x": 1}), path)
    with pytest.raises(ValueError, match=r"must be a \.py file, got 'config\.yaml'"):
        LazyConfig.save(ConfigDict(), "config.yaml")
    for key in (3, "a b", "class", "é", "__builtins__"):
        with pytest.raises(
            ValueError, match=f"a top-level key must be a name .*, got {key!r}"
        ):
            LazyConfig.save(ConfigDict({key: {}}), path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"no space to write .*config\.py"):
        LazyConfig.save(ConfigDict(a={"x": 2}), path)
    assert LazyConfig.load(path) == {"a": {"x": 1}}
    assert os.listdir(tmp_path) == ["config.py"]


def test_a_config_is_shown_as_one_line_a_key_with_calls_as_calls() -> None:
    cfg = ConfigDict(
        model=LazyCall(Backbone)(
            LazyCall("torch.nn.ReLU")(inplace=True), norm=torch.nn.BatchNorm2d
        ),
        train={
            "lr": "${base.lr}",
            "amp": {"dtype": torch.float16},
            "empty": {},
            "steps": (1, 2),
        },
        odd={"a b": math.inf},
        hooks=[{"f": min}, {1: None}],
    )
    assert LazyConfig.to_py(cfg) == (
        f"cfg.model = {__name__}.Backbone(torch.nn.ReLU(inplace=True), norm=torch.nn.BatchNorm2d)\n"
        "cfg.train.lr = '${base.lr}'\n"
        "cfg.train.amp.dtype = torch.float16\n"
        "cfg.train.empty = {}\n"
        "cfg.train.steps = (1, 2)\n"
        "cfg.odd = {'a b': float('inf')}\n"
        "cfg.hooks = [{'f': builtins.min}, {1: None}]\n"
    )
    assert LazyConfig.to_py(ConfigDict(a=1), prefix="") == "a = 1\n"
    cfg = ConfigDict(a=LazyCall("f.g")("x" * 50, y="z" * 50))
    assert (
        LazyConfig.to_py(cfg)
        == f"cfg.a = f.g(\n    '{'x' * 50}',\n    y='{'z' * 50}',\n)\n"
    )
    # Values without a name are shown by their repr.
    cfg = ConfigDict(a=torch.nn.Linear(1, 2), b=torch.nn.Sequential(torch.nn.ReLU()))
    shown = "cfg.a = Linear(in_features=1, out_features=2, bias=True)\ncfg.b = <Sequential>\n"
    assert LazyConfig.to_py(cfg) == shown
