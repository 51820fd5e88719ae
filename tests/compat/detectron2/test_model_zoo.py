"""detectron2's model zoo, with and without detectron2."""

import runpy
from pathlib import Path

import pytest

from hooktrain.compat.detectron2 import LazyConfig, get_config, model_zoo
from recipes import PEERS, installed, without

ZOO = """
get_config_file = "/configs/{}".format
def get_config(config_path, trained=False):
    return config_path, trained
"""


def test_the_zoo_of_an_installed_detectron2_answers(tmp_path: Path) -> None:
    files = {"__init__.py": "", "model_zoo/__init__.py": ZOO}
    with installed(tmp_path, "detectron2", files):
        assert get_config("common/train.py") == ("common/train.py", False)
        assert model_zoo.get_config("model.yaml", trained=True) == ("model.yaml", True)
        assert model_zoo.get_config_file("model.yaml") == "/configs/model.yaml"


def test_without_detectron2_the_keys_of_train_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *PEERS)
    path = tmp_path / "config.py"
    path.write_text(
        "from hooktrain.compat.detectron2 import model_zoo\n"
        "train = model_zoo.get_config('common/train.py').train\n"
        "train.amp.enabled, train.max_iter = True, 5\n"
    )
    train = LazyConfig.load(path).train
    assert (train.amp.enabled, train.max_iter, train.output_dir) == (
        True,
        5,
        "./output",
    )
    configs = Path(__file__).parents[3] / "configs"
    ours = runpy.run_path(str(configs / "common" / "train.py"))["train"]
    assert train.keys() == ours.keys()


def test_without_detectron2_other_configurations_say_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, *PEERS)
    with pytest.raises(ImportError, match=r"'get_config': it belongs to detectron2"):
        get_config("common/optim.py")
    with pytest.raises(ImportError, match=r"'get_checkpoint_url'.*detectron2"):
        model_zoo.get_checkpoint_url  # noqa: B018
