"""Configurations that were written with omegaconf."""

from pathlib import Path

import pytest
from torch import nn

from hooktrain.compat.detectron2 import (
    DictConfig,
    LazyCall,
    LazyConfig,
    ListConfig,
    OmegaConf,
    instantiate,
)

CONFIG = """
from dataclasses import dataclass
from functools import partial
from torch import nn
from hooktrain.compat.detectron2 import LazyCall as L, MultiStepParamScheduler, OmegaConf

@dataclass
class Shape:
    channels: int = 8

def double(x):
    return 2 * x

model = OmegaConf.create()
model.net = L(nn.Linear)(in_features="${train.size}", out_features=1)
model.shape, model.function, model.own = Shape(4), lambda x: x, double
model.init, model.layer = partial(nn.init.normal_, std=0.1), nn.Tanh()
scheduler = L(MultiStepParamScheduler)(values=[1.0], milestones=[30, 90])
scheduler.values = [1.0, 0.5]
scheduler.update(milestones=[60, 90])
train = dict(size=8, init_checkpoint=None, seed=1)
"""


def test_omegaconfs_functions_take_and_give_configs(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"a": {"b": [1, {"c": 2}]}})
    assert isinstance(cfg, DictConfig)
    assert cfg.a.b[1].c == 2
    assert isinstance(OmegaConf.create([1]), ListConfig)
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert plain == cfg
    assert (type(plain), type(plain["a"]["b"][1])) == (dict, dict)
    empty = OmegaConf.create()
    empty.layer = LazyCall(nn.Linear)(2, 3)
    assert instantiate(empty.layer).weight.shape == (3, 2)


def test_what_cannot_be_saved_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(CONFIG)
    cfg = LazyConfig.load(path)
    LazyConfig.save(cfg, tmp_path / "saved.yaml")
    lacking = [
        message.split("lacks model.")[1].split(".")[0] for message in caplog.messages
    ]
    assert lacking == ["shape", "function", "own", "layer"]
    assert "double" in LazyConfig.to_py(cfg)
    assert instantiate(cfg.model.net).in_features == 8
    assert cfg.model.function(3) == 3
    assert cfg.model.own(3) == 6
    schedule = instantiate(cfg.scheduler)
    assert (schedule(0.5), schedule(0.9)) == (1.0, 0.5)
    saved = LazyConfig.load(tmp_path / "saved.yaml")
    assert instantiate(saved.scheduler)(0.5) == 1.0
