"""Configurations that were written with omegaconf."""

from torch import nn

from hooktrain.compat.detectron2 import (
    DictConfig,
    LazyCall,
    ListConfig,
    OmegaConf,
    instantiate,
)


def test_omegaconfs_functions_take_and_give_configs() -> None:
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
