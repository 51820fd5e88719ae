"""Saving configs as JSON, and loading them again."""

import math
import os
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hooktrain.config import ConfigDict, LazyCall, LazyConfig, instantiate, resolve


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


def round_trip(cfg: ConfigDict, folder: Path) -> ConfigDict:
    LazyConfig.save(cfg, folder / "config.json")
    loaded = LazyConfig.load(folder / "config.json")
    assert isinstance(loaded, ConfigDict)
    return loaded


def test_a_saved_config_describes_the_same_objects(tmp_path: Path) -> None:
    cfg = ConfigDict(
        model=LazyCall(Backbone)(width="${..train.width}", norm=torch.nn.BatchNorm2d),
        optimizer=LazyCall(torch.optim.AdamW)(lr="${train.lr}", betas=(0.9, 0.999)),
        wrapper={"type": torch.optim.SGD},
        train={"width": 4, "lr": 1e-3, "name": "lr ${.lr}"},
    )
    loaded = round_trip(resolve(cfg), tmp_path)
    assert list(loaded) == list(cfg)
    assert loaded.train == cfg.train
    assert loaded.wrapper.type == "torch.optim.SGD"
    LazyConfig.apply_overrides(loaded, ["train.lr=0.5"])
    assert (loaded.optimizer.lr, loaded.train.name) == (0.5, "lr 0.5")
    assert isinstance(instantiate(loaded.model).norm, torch.nn.BatchNorm2d)
    assert os.listdir(tmp_path) == ["config.json"]


def test_to_load_a_saved_file_runs_and_imports_nothing(tmp_path: Path) -> None:
    text = "open('ran', 'w')\nclass Net: pass\n"
    (tmp_path / "own_module.py").write_text(text)
    file = tmp_path / "config.json"
    file.write_text('{"model": {"_target_": "own_module.Net"}}')
    sys.path.insert(0, str(tmp_path))
    try:
        assert LazyConfig.load(file, "model")["_target_"] == "own_module.Net"
        assert "own_module" not in sys.modules
    finally:
        sys.path.remove(str(tmp_path))


NAMED = [Backbone, Backbone.Block, Backbone.small, Precision.HALF, torch.tanh, len]
CALLS = [Path("a/b"), torch.device("cuda", 1), range(1, 9, 2), {3: 4, None: 5}]
PLAIN = [-math.inf, "${", "é😀\u2028"]


@pytest.mark.parametrize("value", [*NAMED, torch.float16, *CALLS, *PLAIN])
def test_a_saved_value_is_made_again(value: Any, tmp_path: Path) -> None:
    loaded = round_trip(ConfigDict(a={"found": [value]}), tmp_path)
    made = instantiate(loaded.a)["found"][0]
    assert type(made) is type(value)
    assert made == value


def test_a_class_of_the_script_is_saved_by_its_name_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net = type("Net", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Net", net, raising=False)
    loaded = round_trip(ConfigDict(model=LazyCall(net)(), kind=net), tmp_path)
    assert loaded.model["_target_"] == "__main__.Net"
    keys = [message.split(",")[0] for message in caplog.messages]
    assert keys == [
        "The saved config has model._target_ = '__main__.Net'",
        "The saved config has kind._args_ = ['__main__.Net']",
    ]
    assert type(instantiate(loaded.model)) is net
    assert instantiate(loaded.kind) is net


def test_partials_and_numbers_of_numpy_are_made_again(tmp_path: Path) -> None:
    sgd = partial(torch.optim.SGD, lr=np.float64(0.1))
    numbers = [np.int64(3), np.bool_(True), np.str_("x"), np.float32(math.inf)]
    loaded = instantiate(round_trip(ConfigDict(a=numbers, b=[sgd]), tmp_path))
    assert loaded["a"] == [3, True, "x", math.inf]
    assert [type(value) for value in loaded["a"]] == [int, bool, str, float]
    made = loaded["b"][0]
    assert (made.func, made.keywords) == (torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize(
    "value", [lambda x: x, torch.zeros(2), torch.nn.Linear(1, 1), np.longdouble(1)]
)
def test_what_cannot_be_saved_is_a_warning(
    value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = ConfigDict(a=LazyCall(dict)(1, b=[0, {"x": value}]), e=[1])
    loaded = round_trip(cfg, tmp_path)
    assert "The saved config lacks a.b = " in caplog.text
    assert loaded.e == [1]
    with pytest.raises(ImportError, match="NOT SAVED"):
        instantiate(loaded.a)


def test_a_save_that_fails_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    LazyConfig.save(ConfigDict(a={"x": 1}), path)
    with pytest.raises(ValueError, match=r"'config\.py'"):
        LazyConfig.save(ConfigDict(), "config.py")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left .*config\.json"):
        LazyConfig.save(ConfigDict(a={"x": 2}), path)
    assert LazyConfig.load(path) == {"a": {"x": 1}}
    assert os.listdir(tmp_path) == ["config.json"]


def test_to_py_lists_dotted_keys() -> None:
    train = {"lr": 0.1, "empty": {}, "steps": (1, 2)}
    cfg = ConfigDict(model=LazyCall(Backbone)(8), train=train, hooks=[{"f": "x"}])
    assert LazyConfig.to_py(cfg).splitlines() == [
        f"cfg.model._target_ = '{__name__}.Backbone'",
        "cfg.model._args_ = [8]",
        "cfg.train.lr = 0.1",
        "cfg.train.empty = {}",
        "cfg.train.steps = [1, 2]",
        "cfg.hooks = [{'f': 'x'}]",
    ]
