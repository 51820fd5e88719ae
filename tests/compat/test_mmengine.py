"""Code for MMEngine after tools/from_mmengine.sed: names, registries, models."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.compat import mmengine
from hooktrain.compat.mmengine import (
    MODELS,
    AmpOptimWrapper,
    BaseStrategy,
    DDPStrategy,
    DefaultOptimWrapperConstructor,
    FSDPStrategy,
    Hook,
    Registry,
    SingleDeviceStrategy,
    StepTrainer,
    create_ddp_model,
)
from hooktrain.utils import registry
from mmengine_toys import Net, Part, sgd
from recipes import after_recipe

HERE = "from hooktrain.compat.mmengine import"
IMPORTS = {
    "from mmengine.model import (": f"{HERE} (",
    "    from mmengine.optim.scheduler import LinearLR": f"    {HERE} LinearLR",
    "from mmengine import MODELS": f"{HERE} MODELS",
    "import mmengine.dist as dist": "import hooktrain.compat.mmengine as dist",
    "from mmdet.models import A": "from mmdet.models import A",
    "from mmengine.fileio import load": "from mmengine.fileio import load",
}


def test_the_recipe_changes_the_imports_of_what_trains_alone() -> None:
    changed = after_recipe("mmengine", "\n".join(IMPORTS))
    assert changed.splitlines() == [*IMPORTS.values()]


NAMES = """\
AmpOptimWrapper BaseAveragedModel BaseDataPreprocessor ConstantParamScheduler CosineAnnealingLR
DATASETS DDPStrategy FSDPStrategy HOOKS ImgDataPreprocessor LinearMomentum METRICS
MMDistributedDataParallel MMSeparateDistributedDataParallel MODEL_WRAPPERS MomentumAnnealingEMA
ModuleDict OPTIMIZERS OPTIM_WRAPPERS OptimWrapperDict PARAM_SCHEDULERS ReduceOnPlateauLR
_ParamScheduler barrier build_optim_wrapper convert_sync_batchnorm get_dist_info get_rank
is_main_process MMLogger is_model_wrapper load_checkpoint master_only print_log set_random_seed
"""


def test_what_models_and_scripts_import_is_there() -> None:
    assert [name for name in NAMES.split() if not hasattr(mmengine, name)] == []
    scheduler = mmengine.ConstantParamScheduler
    assert scheduler.__module__ == "hooktrain.solver.param_scheduler"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("Runner", "StepTrainer"),
        ("LoggerHook", "hooks"),
        ("kaiming_init", "nothing, or"),
    ],
)
def test_a_name_that_is_not_there_says_what_takes_its_place(
    name: str, instead: str
) -> None:
    with pytest.raises(ImportError, match=f"place of MMEngine's {name}: {instead}"):
        getattr(mmengine, name)


def test_a_name_that_a_registry_lacks_has_a_near_one() -> None:
    with pytest.raises(KeyError, match="did you mean 'AdamW'"):
        mmengine.OPTIMIZERS.build({"type": "AdmW"})  # type: ignore[attr-defined]


class Child(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.ab = a, b


def test_a_registry_shares_its_objects_with_its_parent_in_all_scopes() -> None:
    child = Registry("child", parent=MODELS, scope="mine", locations=["mine"])
    child.register_module(force=True, module=Child)
    assert child.get("mine.Child") is child.get("Child") is Child
    assert registry.MODELS.get("Child") is Child
    assert child.get("Chidl") is None
    made = MODELS.build({"type": "mine.Child", "a": 1}, default_args={"a": 0, "b": 2})
    assert made.ab == (1, 2)
    made = MODELS.build({"type": "torch.nn.Linear"}, in_features=1, out_features=2)
    assert isinstance(made, nn.Linear)


def test_a_registry_builds_by_a_function_of_ones_own() -> None:
    def echo(cfg: Any, registry: Any, **given: Any) -> Any:
        return cfg, registry.name, given

    made = Registry("echo", build_func=echo).build({"type": "x"}, b=2)
    assert made == ({"type": "x"}, "echo", {"b": 2})


class Drawn(Net):
    def init_weights(self) -> None:
        nn.init.normal_(self.parts[0].linear.weight)


def test_a_trainer_initialises_weights_once() -> None:
    model = Net()
    assert not pickle.loads(pickle.dumps(model)).is_init
    StepTrainer(model, [], sgd(model))
    assert model.weights() == [0.5, 0.25]
    nn.init.zeros_(model.parts[0].linear.weight)
    assert create_ddp_model(model) is StepTrainer(model, [], sgd(model)).model
    assert model.weights() == [0, 0.25]


def test_weights_that_were_loaded_are_not_initialised() -> None:
    model, loaded = Net(), Net()
    nn.init.zeros_(model.parts[0].linear.weight)
    loaded.load_state_dict(model.state_dict())
    StepTrainer(loaded, [], sgd(loaded))
    assert loaded.weights() == model.weights()


def test_a_strategy_initialises_weights_in_place_of_the_trainer(tmp_path: Path) -> None:
    model = SingleDeviceStrategy(work_dir=tmp_path, device="cpu").prepare(Drawn())
    weights = model.weights()
    StepTrainer(model, [], sgd(model))
    assert model.weights() == weights


def test_init_cfg_loads_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save({"state_dict": {"a.linear.weight": torch.ones(1, 2)}}, path)
    part = Part(0.0, {"type": "Pretrained", "checkpoint": path, "prefix": "a."})
    part.init_weights()
    assert part.linear.weight.tolist() == [[1, 1]]


@pytest.mark.parametrize("init_cfg", [{"type": "Normal"}, [{"type": "Normal"}]])
def test_another_init_cfg_is_refused(init_cfg: Any) -> None:
    with pytest.raises(ValueError, match=r"in init_weights\(\), not by init_cfg="):
        Net(init_cfg=init_cfg)


class Doubled(Net):
    def _run_forward(self, data: Any, mode: str) -> Any:
        outputs = super()._run_forward(data, mode)
        return {"loss": 2 * outputs["loss"]} if mode == "loss" else 2 * outputs


def test_what_a_model_overrides_around_its_forward_is_called_in_each_step() -> None:
    model, x = Doubled(), torch.ones(1, 2)
    loss = model(x, mode="loss")["loss"].item()
    assert torch.equal(model.val_step([x]), 2 * model(x))
    assert torch.equal(model.test_step([x]), 2 * model(x))
    assert model.train_step([x], sgd(model))["loss"].item() == 2 * loss


@pytest.mark.parametrize(
    ("base", "method", "instead"),
    [
        (Hook, "before_save_checkpoint", "state_dict"),
        (Hook, "_after_iter", "override after_train_iter"),
        (AmpOptimWrapper, "_clip_grad", r"override clip_gradients\(\)"),
        (DefaultOptimWrapperConstructor, "_validate_cfg", r"override add_params\(\)"),
        (BaseStrategy, "_wrap_model", r"override wrap_model\(\)"),
        (DDPStrategy, "_init_model_weights", r"override init_model_weights\(\)"),
        (FSDPStrategy, "_build_param_scheduler", r"override build_param_scheduler\(\)"),
        (SingleDeviceStrategy, "_setup_env", r"override setup\(\)"),
    ],
)
def test_an_override_that_nothing_would_call_is_refused_when_the_class_is_defined(
    base: type, method: str, instead: str
) -> None:
    with pytest.raises(
        TypeError, match=f"Own.{method} would never be called: .*{instead}"
    ):
        type("Own", (base,), {method: lambda self: None, "__qualname__": "Own"})
