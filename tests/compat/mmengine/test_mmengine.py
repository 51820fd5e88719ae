"""Code for MMEngine after tools/from_mmengine.sed: names, registries, models."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equality import assert_equal
from hooktrain.compat import mmengine
from hooktrain.compat.mmengine import (
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    Hook,
    SingleDeviceStrategy,
    StepTrainer,
    create_ddp_model,
)
from mmengine_toys import Net, Part, sgd
from processes import run_program
from recipes import after_recipe, without

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
MMDistributedDataParallel MMSeparateDistributedDataParallel MODEL_WRAPPERS
ModuleDict OPTIMIZERS OPTIM_WRAPPERS OptimWrapperDict PARAM_SCHEDULERS ReduceOnPlateauLR
_ParamScheduler barrier build_optim_wrapper convert_sync_batchnorm get_dist_info get_rank
is_main_process MMLogger is_model_wrapper load_checkpoint master_only print_log set_random_seed
"""


def test_what_models_and_scripts_import_is_there() -> None:
    assert [name for name in NAMES.split() if not hasattr(mmengine, name)] == []
    scheduler = mmengine.ConstantParamScheduler
    assert scheduler.__module__ == "hooktrain.compat.mmengine.param_scheduler"


IMPORTED_AFTER_THE_CORE = """
import sys
import hooktrain.checkpoint, hooktrain.demos, hooktrain.engine, hooktrain.strategy

assert "hooktrain.compat" not in sys.modules
core = [m for name, m in sys.modules.items() if name.split(".")[0] == "hooktrain"]
names = [{**vars(module)} for module in core]
kinds = {k for found in names for k in found.values() if isinstance(k, type)}
methods = {kind: {**vars(kind)} for kind in kinds if kind.__module__.startswith("hooktrain")}
import hooktrain.compat.mmengine

of_a_class = {"__abstractmethods__", "_abc_impl", "__doc__"}
for module, before in zip(core, names):
    for name, value in before.items():
        assert name == "__doc__" or vars(module)[name] is value, (module, name)
for kind, before in methods.items():
    for name in before.keys() - of_a_class:
        assert vars(kind)[name] is before[name], (kind, name)
    assert vars(kind).keys() == before.keys(), kind
"""


def test_importing_compat_changes_nothing_of_the_core(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(IMPORTED_AFTER_THE_CORE)
    done = run_program(script)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Runner", "LoggerHook", "kaiming_init"])
def test_without_mmengine_a_name_says_where_to_look(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "mmengine")
    with pytest.raises(ImportError, match=f"no {name!r}: .* or install mmengine"):
        getattr(mmengine, name)


# By the module of mmengine that people import them from; hooktrain has none of them.
THEIRS = """
mmengine: Config DictAction init_default_scope
mmengine.dist: all_reduce broadcast collect_results
mmengine.evaluator: Evaluator
mmengine.hooks.hook: DATA_BATCH
mmengine.model: constant_init normal_init revert_sync_batchnorm stack_batch merge_dict
mmengine.registry: EVALUATOR INFERENCERS LOG_PROCESSORS LOOPS RUNNERS VISBACKENDS VISUALIZERS
mmengine.model.weight_init: trunc_normal_
mmengine.runner: CheckpointLoader Runner
mmengine.runner.checkpoint: _load_checkpoint_with_prefix
"""


@pytest.mark.parametrize("line", THEIRS.split("\n")[1:-1])
def test_what_is_not_here_comes_from_mmengine(line: str) -> None:
    module, names = line.split(": ")
    for name in names.split():
        theirs = getattr(importlib.import_module(module), name)
        assert getattr(mmengine, name) is theirs


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


def test_init_cfg_initialises_as_in_mmengine() -> None:
    theirs = importlib.import_module("mmengine.model")
    normal = {"type": "Normal", "layer": "Linear", "std": 2.0}
    last = {"type": "Constant", "val": 3.0, "bias": 4.0, "override": {"name": "linear"}}
    found = []
    for kind in (theirs.BaseModule, mmengine.BaseModule):

        class Own(kind):  # type: ignore[misc]
            def __init__(self, init_cfg: Any = None) -> None:
                super().__init__(init_cfg)
                self.linear = nn.Linear(2, 2)

        torch.manual_seed(0)
        outer = Own([normal, last])
        outer.inner = Own(init_cfg=normal)
        outer.init_weights()
        found.append(outer.state_dict())
    assert_equal(*found)
    assert found[0]["linear.bias"].tolist() == [4.0, 4.0]


def test_without_mmengine_another_init_cfg_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "mmengine")
    model = Net(init_cfg=[{"type": "Normal"}])
    with pytest.raises(ImportError, match=r"in init_weights\(\), or install mmengine"):
        StepTrainer(model, [], sgd(model))


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
        (AmpOptimWrapper, "_clip_grad", r"override clip_gradients\(\)"),
        (DefaultOptimWrapperConstructor, "_validate_cfg", r"override add_params\(\)"),
    ],
)
def test_an_override_that_nothing_would_call_is_refused_when_the_class_is_defined(
    base: type, method: str, instead: str
) -> None:
    with pytest.raises(
        TypeError, match=f"Own.{method} would never be called: .*{instead}"
    ):
        type("Own", (base,), {method: lambda self: None, "__qualname__": "Own"})
