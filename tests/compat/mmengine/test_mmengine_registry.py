"""MMEngine's registries, where it is installed and where it is not."""

from collections.abc import Iterator
from typing import Any

import mmengine.registry
import pytest
from torch import nn

from hooktrain.compat import mmengine as compat
from hooktrain.compat.mmengine import build_optim_wrapper, registry
from hooktrain.solver import OptimWrapper
from recipes import without
from toys import LinearLoss


class Net(nn.Module):
    def __init__(self, a: int = 0, b: int = 0) -> None:
        super().__init__()
        self.ab = a, b


class OtherNet(Net):
    pass


class Model(compat.BaseModel):
    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "") -> Any:
        return inputs


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    registry.get_registry.cache_clear()
    theirs = [mmengine.registry.MODELS, mmengine.registry.DATASETS]
    for each in (*theirs, registry.MODELS, registry.OPTIM_WRAPPER_CONSTRUCTORS):
        for name in ("_objects", "_module_dict", "_children"):
            if hasattr(each, name):
                monkeypatch.setattr(each, name, {**getattr(each, name)})
    yield
    registry.get_registry.cache_clear()


def scope(name: str, parent: str = "MODELS") -> Any:
    """What a project has in its ``registry.py``."""
    top = getattr(compat, parent)
    return compat.Registry("models", parent=top, scope=name)


def test_two_projects_may_have_the_same_name() -> None:
    mmdet, mmseg = scope("mmdet"), scope("mmseg")
    mmdet.register_module("Net", module=Net)
    mmseg.register_module("Net", module=OtherNet)
    assert (mmdet.get("Net"), mmseg.get("Net")) == (Net, OtherNet)
    assert mmdet.get("mmseg.Net") is compat.MODELS.get("mmseg.Net") is OtherNet
    assert registry.MODELS.find("mmdet.Net") is Net
    model = Model(data_preprocessor={"type": "mmdet.Net", "a": 1})
    assert model.data_preprocessor.ab == (1, 0)
    with pytest.raises(KeyError, match="no 'Net'"):
        registry.MODELS.find("Net")


def test_a_name_of_ours_may_be_a_projects_too() -> None:
    mine = scope("mine", "OPTIM_WRAPPER_CONSTRUCTORS")

    @mine.register_module()
    class DefaultOptimWrapperConstructor:
        pass

    found = mine.get("DefaultOptimWrapperConstructor")
    assert found is DefaultOptimWrapperConstructor
    wrapper = build_optim_wrapper(LinearLoss(), {"optimizer": {"type": "SGD"}})
    assert isinstance(wrapper, OptimWrapper)


def test_what_is_registered_at_the_top_is_found_in_a_scope_and_by_us() -> None:
    compat.MODELS.register_module(module=Net)
    assert scope("mine").get("Net") is registry.MODELS.find("Net") is Net
    cfg = {"type": "Net", "a": 1}
    assert compat.MODELS.build(cfg, default_args={"a": 0, "b": 2}).ab == (1, 2)


def test_wrappers_and_schedulers_are_ours_by_name() -> None:
    optimizer = compat.OPTIMIZERS.build(
        {"type": "SGD", "params": LinearLoss().parameters(), "lr": 0.1}
    )
    cfg = {"type": "OptimWrapper", "accumulative_counts": 2}
    wrapper = compat.OPTIM_WRAPPERS.build(cfg, default_args={"optimizer": optimizer})
    assert isinstance(wrapper, OptimWrapper)
    for name in ("mmengine.MultiStepLR", "MultiStepLR"):
        assert compat.PARAM_SCHEDULERS.get(name) is compat.MultiStepLR


def test_the_default_scope_says_which_project_a_name_is_of() -> None:
    mine, _ = scope("hooktrain"), scope("other").register_module("Net", module=OtherNet)
    mine.register_module("Net", module=Net)
    with mmengine.registry.DefaultScope.overwrite_default_scope("hooktrain"):
        assert registry.MODELS.find("Net") is Net


def test_other_packages_look_up_in_the_same_registries_where_mmengine_is() -> None:
    assert compat.MODELS is mmengine.registry.MODELS
    assert compat.DATASETS is mmengine.registry.DATASETS
    assert compat.OPTIM_WRAPPERS is not mmengine.registry.OPTIM_WRAPPERS


def test_without_mmengine_the_registries_are_ours_and_have_no_scopes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "mmengine")
    assert compat.MODELS is registry.MODELS
    compat.HOOKS.register_module(module=Net)
    assert compat.HOOKS.build({"type": "Net", "a": 1}).ab == (1, 0)
    with pytest.raises(ValueError, match=r"already has .*'Net'"):
        compat.HOOKS.register_module("Net", module=OtherNet)
    with pytest.raises(KeyError, match="did you mean 'AdamW'"):
        compat.OPTIMIZERS.build({"type": "AdmW"})
    with pytest.raises(TypeError, match="'scope'"):
        compat.Registry("models", scope="mine")
