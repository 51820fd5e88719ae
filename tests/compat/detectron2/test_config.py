"""Configurations that were written with omegaconf."""

import importlib
from collections import OrderedDict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hooktrain.compat.detectron2 import (
    MISSING,
    DictConfig,
    LazyCall,
    LazyConfig,
    ListConfig,
    OmegaConf,
    instantiate,
    open_dict,
)
from recipes import PEERS, installed, without


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


@pytest.mark.parametrize(
    ("key", "value"),
    [("a.b.1.c", 2), ("a.b", [1, {"c": 2}]), ("a.x", None), ("a.b.9", None)],
)
def test_a_dotted_path_selects(key: str, value: object) -> None:
    cfg = OmegaConf.create({"a": {"b": [1, {"c": 2}]}})
    assert OmegaConf.select(cfg, key) == value
    assert OmegaConf.select(cfg, "a.b.c", default=7) == 7


def test_what_could_never_be_called_is_refused_where_it_is_written_down() -> None:
    for target in (nn.Linear, "torch.nn.Linear", DictConfig(_target_=print)):
        assert LazyCall(target)()["_target_"] == target
    with pytest.raises(TypeError, match=r"callable.*3"):
        LazyCall(3)


def test_a_config_takes_new_keys() -> None:
    cfg = OmegaConf.create({"a": MISSING})
    with open_dict(cfg) as opened:
        opened.new = 1
    assert cfg == {"a": "???", "new": 1}


def test_other_functions_are_omegaconfs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, *PEERS)
    with pytest.raises(ImportError, match=r"OmegaConf\.from_cli needs omegaconf"):
        OmegaConf.from_cli()


@pytest.mark.parametrize("given", ["SEED: 7\n", 3, {1, 2}, OrderedDict(a=1)])
def test_what_is_no_dict_or_list_is_for_omegaconf(
    given: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *PEERS)
    with pytest.raises(ImportError) as raised:
        OmegaConf.create(given)
    assert f"create({given!r}) needs omegaconf" in str(raised.value)


# As much of omegaconf as is asked for, where it is not installed.
STAND_IN = {
    "dictconfig.py": "class DictConfig:\n    pass\n",
    "listconfig.py": "class ListConfig:\n    pass\n",
    "__init__.py": """
import json
from pathlib import Path
from omegaconf.dictconfig import DictConfig
from omegaconf.listconfig import ListConfig

class OmegaConf:
    @staticmethod
    def create(content, flags=None):
        if isinstance(content, str):
            lines = [line.split(": ", 1) for line in content.splitlines()]
            content = {key: json.loads(value) for key, value in lines}
        cfg = DictConfig() if isinstance(content, dict) else ListConfig()
        cfg.content = content
        return cfg

    @staticmethod
    def load(path):
        return OmegaConf.create(Path(path).read_text())

    @staticmethod
    def to_container(cfg, resolve=False):
        if isinstance(cfg, dict):
            return {k: OmegaConf.to_container(v, resolve) for k, v in cfg.items()}
        if resolve and cfg == "${..width}":
            return 3
        return OmegaConf.to_container(cfg.content, resolve) if hasattr(cfg, "content") else cfg
""",
}


@pytest.fixture
def omegaconf(tmp_path: Path) -> Iterator[Any]:
    files = STAND_IN if find_spec("omegaconf") is None else {}
    with installed(tmp_path / "stand_in", "omegaconf", files):
        yield importlib.import_module("omegaconf")


def test_a_file_loads_another_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("model = dict(width=3)")
    load = "from hooktrain.compat.detectron2 import LazyConfig"
    path = tmp_path / "main.py"
    path.write_text(f"{load}\nmodel = LazyConfig.load_rel('base.py', 'model')\n")
    assert LazyConfig.load(path) == {"model": {"width": 3}}


CONFIG = """
from omegaconf import OmegaConf
from torch import nn

_objects = {"allow_objects": True}
_layer = {"_target_": nn.Linear, "in_features": "${..width}", "out_features": 2}
model = OmegaConf.create({"layer": _layer, "width": 3}, flags=_objects)
train = {"sizes": OmegaConf.create([1, "${model.width}"])}
"""


def test_what_omegaconf_has_made_is_taken_into_a_config(
    omegaconf: Any, tmp_path: Path
) -> None:
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    cfg = LazyConfig.load(path)
    assert cfg.train.sizes == [1, 3]
    assert cfg.model.layer.in_features == 3
    cfg = LazyConfig.apply_overrides(cfg, ["model.width=4"])
    assert instantiate(cfg.model.layer).weight.shape == (2, 4)
    assert cfg.train.sizes == [1, 4]


def test_the_functions_take_what_omegaconf_has_made(omegaconf: Any) -> None:
    theirs = omegaconf.OmegaConf.create({"width": 3, "sizes": [1, 2]})
    plain = OmegaConf.to_container(theirs, resolve=True)
    assert plain == {"width": 3, "sizes": [1, 2]}
    assert OmegaConf.select(theirs, "sizes.1") == 2
    made = OmegaConf.create(theirs)
    assert isinstance(made, DictConfig)
    assert (made.width, made.sizes) == (3, [1, 2])


def test_omegaconf_reads_yaml_text(omegaconf: Any) -> None:
    cfg = OmegaConf.create('SEED: 7\nOUTPUT_DIR: "here"\n')
    assert isinstance(cfg, DictConfig)
    assert cfg == {"SEED": 7, "OUTPUT_DIR": "here"}
    # As a copy of detectron2's default_setup looks for its keys.
    assert OmegaConf.select(cfg, "OUTPUT_DIR", default=None) == "here"


def test_yaml_is_read_by_omegaconf(omegaconf: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text('width: 3\nsizes: [1, "${..width}"]\nname: "x"\n')
    assert LazyConfig.load(path) == {"width": 3, "sizes": [1, 3], "name": "x"}
    assert LazyConfig.load(path, "sizes") == [1, 3]
    assert LazyConfig.load(path, ("name", "width")) == ("x", 3)


def test_yaml_without_omegaconf_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *PEERS)
    path = tmp_path / "model.yaml"
    path.write_text("width: 3")
    with pytest.raises(ValueError, match=r"model\.yaml"):
        LazyConfig.load(path)


def test_what_omegaconf_has_made_is_instantiated(omegaconf: Any) -> None:
    layer = {"_target_": "torch.nn.Linear", "in_features": "${..width}"}
    cfg = omegaconf.OmegaConf.create(
        {"layer": {**layer, "out_features": 2}, "width": 3}
    )
    assert instantiate(cfg)["layer"].weight.shape == (2, 3)
