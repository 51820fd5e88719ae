"""Code for MMEngine after tools/from_mmengine.sed: models, hooks, metrics, strategies."""

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equality import assert_equal
from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, load_file
from hooktrain.compat import mmengine
from hooktrain.compat.mmengine import (
    MODELS,
    AmpOptimWrapper,
    BaseMetric,
    BaseModel,
    BaseModule,
    BaseStrategy,
    DDPStrategy,
    DefaultOptimWrapperConstructor,
    FSDPStrategy,
    Hook,
    ModuleList,
    OptimWrapper,
    Registry,
    Sequential,
    SingleDeviceStrategy,
    StepTrainer,
    create_ddp_model,
    hooks,
)
from hooktrain.evaluation import inference_on_dataset
from hooktrain.utils import comm, registry
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
        ("MessageHub", "get_event_storage"),
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


class Part(BaseModule):
    def __init__(self, value: float, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        self.linear = nn.Linear(2, 1)
        self.value = value

    def init_weights(self) -> None:
        super().init_weights()
        if self.init_cfg is None:
            nn.init.constant_(self.linear.weight, self.value)


class Net(BaseModel):
    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(data_preprocessor=None, init_cfg=init_cfg)
        self.parts = ModuleList([Part(0.5), Sequential(Part(0.25))])

    def forward(self, inputs: Tensor, mode: str = "tensor") -> Any:  # type: ignore[override]
        outputs = self.parts[0].linear(inputs) + self.parts[1][0].linear(inputs)
        return {"loss": outputs.square().mean()} if mode == "loss" else outputs

    def weights(self) -> list[float]:
        layers = (self.parts[0].linear, self.parts[1][0].linear)
        return [layer.weight[0, 0].item() for layer in layers]


class Drawn(Net):
    def init_weights(self) -> None:
        nn.init.normal_(self.parts[0].linear.weight)


def sgd(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


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


def test_load_checkpoint_takes_mmengines_arguments(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save(
        {"state_dict": {"a.weight": torch.ones(1, 2)}, "meta": {"epoch": 3}}, path
    )
    model = nn.Linear(2, 1, bias=False)
    logger, keys = logging.getLogger("mine"), [(r"^a\.", "")]
    rest = mmengine.load_checkpoint(model, path, None, True, logger, keys)
    assert model.weight.tolist() == [[1, 1]]
    assert rest["meta"] == {"epoch": 3}
    mmengine.load_checkpoint(model, path, logger="current", revise_keys=keys)


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


class Noting(Hook):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before_run(self, runner: Any) -> None:
        self.seen.append(("run", runner.max_iters, runner.epoch))

    def before_train(self, runner: Any) -> None:
        super().before_train(runner)
        self.seen.append("train")

    def before_train_epoch(self, runner: Any) -> None:
        self.seen.append(("epoch", runner.epoch))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.seen.append((batch_idx, data_batch[0].shape[0], sorted(outputs)))
        if self.every_n_train_iters(runner, 2) or self.is_last_train_iter(runner):
            self.seen.append(f"iter {runner.iter}")
        if self.end_of_epoch(runner.train_dataloader, batch_idx):
            self.seen.append("last of epoch")
        if self.is_last_train_epoch(runner):
            self.seen.append("last epoch")

    def after_train_epoch(self, runner: Any) -> None:
        assert self.every_n_epochs(runner, 1)
        self.seen.append("end of epoch")

    def after_train(self, runner: Any) -> None:
        self.seen.append("end of train")

    def after_run(self, runner: Any) -> None:
        self.seen.append("end of run")


def test_a_hook_has_mmengines_events() -> None:
    model, hook = Net(), Noting()
    trainer = StepTrainer(model, [[torch.ones(3, 2)], [torch.ones(4, 2)]], sgd(model))
    trainer.register_hooks([hook])
    trainer.train(max_iter=3)
    assert hook.seen == [
        ("run", 3, 0),
        "train",
        ("epoch", 0),
        (0, 3, ["loss"]),
        (1, 4, ["loss"]),
        "iter 1",
        "last of epoch",
        "end of epoch",
        ("epoch", 1),
        (0, 3, ["loss"]),
        "iter 2",
        "last epoch",
        "end of train",
        "end of run",
    ]


@pytest.mark.parametrize(
    ("base", "method", "instead"),
    [
        (Hook, "after_val_epoch", "inference_on_dataset callbacks"),
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


class Spread(BaseMetric):
    default_prefix = "spread"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"all": [float(result) for result in results]}


def evaluate(data: list[list[float]]) -> dict[str, Any]:
    batches = [torch.tensor(data[comm.get_rank()])]
    return inference_on_dataset(lambda batch: batch + 1, batches, Spread())


def test_a_metric_gets_the_results_of_all_ranks_in_order() -> None:
    of_ranks = run_ranks(evaluate, 2, [[1.0, 2.0], [3.0]])
    assert of_ranks == [{"spread": {"all": [2.0, 3.0, 4.0]}}] * 2
    metric = Spread(prefix="")
    metric.process(None, torch.ones(3))
    assert metric.evaluate(size=2) == {"spread": {"all": [1.0, 1.0]}}


class Run:
    """With rules for parameters, a schedule in epochs of two iterations, and an average."""

    def __init__(self, work_dir: Path) -> None:
        torch.manual_seed(7)
        self.strategy = SingleDeviceStrategy(
            work_dir=work_dir, device="cpu", env_kwargs={"seed": 3}
        )
        rules = {
            "bias_decay_mult": 0.0,
            "custom_keys": {"parts.1": {"lr_mult": 0.1}},
        }
        optimizer = {"type": "AdamW", "lr": 0.1, "weight_decay": 0.5}
        model, wrapper, schedulers = self.strategy.prepare(
            Net(),
            optim_wrapper={"optimizer": optimizer, "paramwise_cfg": rules},
            param_scheduler={"type": "MultiStepLR", "milestones": [1, 3], "gamma": 0.5},
        )
        self.ema = hooks.EMA(model, decay=0.5, warmup=False)
        data = [(part,) for part in torch.randn(2, 4, 2)]
        self.trainer = StepTrainer(model, data, wrapper)
        schedules = hooks.LRScheduler(scheduler=schedulers)
        self.trainer.register_hooks([schedules, self.ema])
        self.checkpointer = Checkpointer(model, work_dir, trainer=self.trainer)

    def as_mmengine_has_it(self) -> dict[str, Any]:
        """A group for each parameter, and the average in place of the weights."""
        model = self.strategy.model_state_dict()
        saved = self.strategy.optim_state_dict()
        groups = []
        states = {}
        for place, name in enumerate(model):
            states[place] = saved["state"][name]
            (group,) = [
                each for each in saved["param_groups"] if name in each["params"]
            ]
            groups.append({**group, "params": [place]})
        average = self.ema.state_dict()
        own = {f"module.{name}": value for name, value in model.items()}
        return {
            "meta": {"iter": 4, "epoch": 2, "seed": 3},
            "state_dict": {name: average[f"module.{name}"].clone() for name in model},
            "ema_state_dict": {"steps": average["steps"], **own},
            "optimizer": {
                "state": states,
                "param_groups": groups,
                "base_param_settings": {"lr": 0.05, "params": torch.zeros(1)},
            },
            "param_schedulers": [
                {
                    "milestones": {1: 1, 3: 1},
                    "gamma": 0.5,
                    "begin": 0,
                    "end": 10**9,
                    "last_step": 2,
                    "param_name": "lr",
                    "by_epoch": True,
                    "verbose": False,
                    "_global_step": 2,
                    # The last one is of the base_param_settings.
                    "base_values": [*(group["initial_lr"] for group in groups), 0.1],
                    "_last_value": [*(group["lr"] for group in groups), 0.05],
                }
            ],
        }


@pytest.fixture
def whole(tmp_path: Path) -> Run:
    """A run after two of its epochs."""
    run = Run(tmp_path)
    run.trainer.train(max_iter=4)
    return run


def assert_same(ours: Run, theirs: Run) -> None:
    state = ours.strategy.model_state_dict()
    assert_equal(state, theirs.strategy.model_state_dict())
    assert ours.trainer.optim_wrapper.get_lr() == theirs.trainer.optim_wrapper.get_lr()


def test_a_run_of_mmengine_goes_on_bit_for_bit(tmp_path: Path, whole: Run) -> None:
    path = tmp_path / "epoch_2.pth"
    torch.save(mmengine.from_mmengine(whole.as_mmengine_has_it()), path)
    resumed = Run(tmp_path)
    resumed.checkpointer.load(path)
    for run in (whole, resumed):
        run.trainer.train(max_iter=8)
    assert resumed.trainer.start_iter == 4
    assert_same(resumed, whole)
    assert_equal(resumed.ema.state_dict(), whole.ema.state_dict())


def test_a_trainer_goes_on_from_a_strategys_checkpoint(
    tmp_path: Path, whole: Run
) -> None:
    path = tmp_path / "iter_4.pth"
    whole.strategy.save_checkpoint(path, extra_ckpt={"meta": {"iter": 4}})
    resumed = Run(tmp_path)
    torch.save(mmengine.from_mmengine(load_file(path)), path)
    resumed.checkpointer.load(path)
    for run in (whole, resumed):
        run.trainer.train(max_iter=8)
    assert resumed.trainer.start_iter == 4
    assert_same(resumed, whole)


def test_a_strategy_goes_on_from_a_trainers_checkpoint(
    tmp_path: Path, whole: Run
) -> None:
    path = tmp_path / "iter_4.pth"
    whole.checkpointer.save("model_0000003", iteration=3)
    saved = load_file(tmp_path / "model_0000003.pth")
    torch.save(mmengine.to_mmengine(saved), path)
    other = Run(tmp_path)
    rest = other.strategy.resume(path)
    assert rest is not None
    assert rest["meta"]["iter"] == 4
    assert_same(other, whole)
