"""Code for MMEngine after tools/from_mmengine.sed: models, hooks, metrics, strategies."""

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
    StochasticWeightAverage,
    create_ddp_model,
    hooks,
)
from hooktrain.data import build_train_loader
from hooktrain.evaluation import inference_on_dataset
from hooktrain.utils import comm, registry
from recipes import after_recipe

HERE = "from hooktrain.compat.mmengine import"
IMPORTS = {
    "from mmengine.model import (": f"{HERE} (",
    "    from mmengine.optim.scheduler.lr_scheduler import LinearLR": f"    {HERE} LinearLR",
    "from mmengine._strategy import DDPStrategy": f"{HERE} DDPStrategy",
    "from mmengine import MODELS": f"{HERE} MODELS",
    "import mmengine.dist as dist": "import hooktrain.compat.mmengine as dist",
    **{
        line: line
        for line in ("from mmdet.models import A", "from mmengine.fileio import load")
    },
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


HOOKS_THERE = """\
CheckpointHook DistSamplerSeedHook EMAHook EarlyStoppingHook EmptyCacheHook IterTimerHook LoggerHook
NaiveVisualizationHook ParamSchedulerHook ProfilerHook RuntimeInfoHook SyncBuffersHook
"""
INSTEAD = {
    "Runner": "StepTrainer",
    "MessageHub": "get_event_storage",
    "kaiming_init": "nothing, or",
}
INSTEAD |= dict.fromkeys(
    HOOKS_THERE.split(), "(hooks|trainer|create_ddp_model|nothing: the trainer)"
)


def test_names_that_are_not_there_say_what_takes_their_place() -> None:
    assert [name for name in NAMES.split() if not hasattr(mmengine, name)] == []
    assert (
        mmengine.ConstantParamScheduler.__module__ == "hooktrain.solver.param_scheduler"
    )
    for name, instead in INSTEAD.items():
        with pytest.raises(ImportError, match=f"place of MMEngine's {name}: {instead}"):
            getattr(mmengine, name)


def test_a_name_that_a_registry_lacks_has_a_near_one() -> None:
    with pytest.raises(KeyError, match="did you mean 'AdamW'"):
        mmengine.OPTIMIZERS.build({"type": "AdmW"})  # type: ignore[attr-defined]


def test_registries_take_defaults_scopes_parents_and_builders() -> None:
    child = Registry("child", parent=MODELS, scope="mine", locations=["mine"])

    @child.register_module(force=True)
    class Child(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.ab = a, b

    assert MODELS.build(
        {"type": "mine.Child", "a": 1}, default_args={"a": 0, "b": 2}
    ).ab == (1, 2)
    assert MODELS.build({"type": "Child", "a": 1, "b": 2}, default_args=None).ab == (
        1,
        2,
    )
    assert (
        child.get("mine.Child")
        is child.get("Child")
        is registry.MODELS.get("Child")
        is Child
    )
    assert child.get("Chidl") is None
    assert type(
        MODELS.build({"type": "StochasticWeightAverage", "model": nn.Linear(1, 1)})
    ) is (StochasticWeightAverage)
    echo = Registry(
        "echo", build_func=lambda cfg, registry, **given: (cfg, registry.name, given)
    )
    assert echo.build({"type": "x"}, b=2) == ({"type": "x"}, "echo", {"b": 2})


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
        return [
            part.weight[0, 0].item()
            for part in self.modules()
            if isinstance(part, nn.Linear)
        ]


class Drawn(Net):
    def init_weights(self) -> None:
        nn.init.normal_(self.parts[0].linear.weight)


def sgd(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_a_trainer_initialises_weights_once_unless_they_were_loaded(
    tmp_path: Path,
) -> None:
    model = Net()
    assert not pickle.loads(pickle.dumps(model)).is_init
    StepTrainer(model, [], sgd(model))
    assert model.weights() == [0.5, 0.25]
    nn.init.zeros_(model.parts[0].linear.weight)
    assert create_ddp_model(model) is StepTrainer(model, [], sgd(model)).model
    assert model.weights() == [0, 0.25]
    loaded = Net()
    loaded.load_state_dict(model.state_dict())
    StepTrainer(loaded, [], sgd(loaded))
    assert loaded.weights() == [0, 0.25]
    made = SingleDeviceStrategy(work_dir=tmp_path, device="cpu").prepare(Net())
    assert (made.is_init, made.weights()) == (True, [0.5, 0.25])
    drawn = SingleDeviceStrategy(work_dir=tmp_path, device="cpu").prepare(Drawn())
    weights = drawn.weights()
    StepTrainer(drawn, [], sgd(drawn))
    assert drawn.weights() == weights


def test_init_cfg_loads_a_part_of_a_checkpoint(
    tmp_path: Path,
) -> None:
    torch.save(
        {"state_dict": {"a.linear.weight": torch.ones(1, 2)}}, tmp_path / "x.pth"
    )
    part = Part(
        0.0, {"type": "Pretrained", "checkpoint": tmp_path / "x.pth", "prefix": "a."}
    )
    part.init_weights()
    assert part.linear.weight.tolist() == [[1, 1]]
    for other in ({"type": "Normal"}, [{"type": "Normal"}]):
        with pytest.raises(
            ValueError, match=r"in init_weights\(\), not by init_cfg=.*'Normal'"
        ):
            Net(init_cfg=other)


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
        *(("run", 3, 0), "train", ("epoch", 0)),
        *(
            (0, 3, ["loss"]),
            (1, 4, ["loss"]),
            "iter 1",
            "last of epoch",
            "end of epoch",
        ),
        *(
            ("epoch", 1),
            (0, 3, ["loss"]),
            "iter 2",
            "last epoch",
            "end of train",
            "end of run",
        ),
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
        (SingleDeviceStrategy, "_setup_distributed", r"override setup\(\)"),
        (SingleDeviceStrategy, "_set_randomness", r"override setup\(\)"),
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


RUN = {
    "optim_wrapper": {
        "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
        "paramwise_cfg": {"bias_lr_mult": 2.0},
    },
    "param_scheduler": {"type": "StepLR", "step_size": 2, "by_epoch": False},
}


def strategy_run(folder: Path) -> tuple[Any, StepTrainer, Checkpointer]:
    strategy = SingleDeviceStrategy(
        work_dir=folder, device="cpu", env_kwargs={"seed": 1}
    )
    model, wrapper, schedulers = strategy.prepare(Net(), **RUN)
    data = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    loader = build_train_loader([(row,) for row in data], total_batch_size=4, seed=0)
    assert len(loader) == 3
    trainer = StepTrainer(model, loader, wrapper)
    trainer.register_hooks([hooks.LRScheduler(scheduler=schedulers), hooks.EMA(model)])
    return strategy, trainer, Checkpointer(model, folder, trainer=trainer)


def final(trainer: StepTrainer) -> list[Tensor]:
    trainer.train(max_iter=7)
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_a_trainer_goes_on_from_a_strategys_checkpoint(tmp_path: Path) -> None:
    strategy, trainer, _ = strategy_run(tmp_path)
    trainer.train(max_iter=3)
    path = tmp_path / "iter_3.pth"
    strategy.save_checkpoint(path, extra_ckpt={"meta": {"iter": 3}})
    expected = final(trainer)
    strategy, resumed, checkpointer = strategy_run(tmp_path / "other")
    torch.save(mmengine.from_mmengine(load_file(path)), tmp_path / "trainer.pth")
    checkpointer.load(tmp_path / "trainer.pth")
    assert resumed.iter == 2
    resumed.data_loader.batches = 3  # type: ignore[attr-defined]
    assert all(map(torch.equal, final(resumed), expected))


def test_a_strategy_goes_on_from_a_trainers_checkpoint(tmp_path: Path) -> None:
    strategy, trainer, checkpointer = strategy_run(tmp_path)
    trainer.train(max_iter=3)
    checkpointer.save("model_0000002", iteration=2)
    saved = load_file(tmp_path / "model_0000002.pth")
    torch.save(mmengine.to_mmengine(saved), tmp_path / "iter_3.pth")
    other, _, _ = strategy_run(tmp_path)
    rest = other.resume(tmp_path / "iter_3.pth")
    assert rest["meta"]["iter"] == 3
    assert_equal(other.model_state_dict(), strategy.model_state_dict())
    assert other.optim_wrapper.get_lr() == strategy.optim_wrapper.get_lr()


RULES = {
    "norm_decay_mult": 0.0,
    "bias_decay_mult": 0.0,
    "custom_keys": {"last": {"lr_mult": 0.1}},
}
ADAMW = {
    "optimizer": {"type": "AdamW", "lr": 0.1, "weight_decay": 0.5},
    "paramwise_cfg": RULES,
}


def epochs_run(work_dir: Path) -> tuple[SingleDeviceStrategy, StepTrainer, hooks.EMA]:
    """A run with rules for parameters, a schedule in epochs of two iterations, and an average."""
    torch.manual_seed(7)
    strategy = SingleDeviceStrategy(
        work_dir=work_dir, device="cpu", env_kwargs={"seed": 3}
    )
    schedule = {"type": "MultiStepLR", "milestones": [1, 3], "gamma": 0.5}
    strategy.prepare(Net(), optim_wrapper=ADAMW, param_scheduler=schedule)
    ema = hooks.EMA(strategy.model, decay=0.5, warmup=False)
    drawn = torch.Generator().manual_seed(1)
    trainer = StepTrainer(
        strategy.model,
        [(torch.randn(4, 2, generator=drawn),) for _ in range(2)],
        strategy.optim_wrapper,
    )
    schedules = hooks.LRScheduler(scheduler=strategy.param_schedulers)
    trainer.register_hooks([schedules, ema])
    return strategy, trainer, ema


def as_mmengine_has_it(
    strategy: SingleDeviceStrategy, ema: hooks.EMA
) -> dict[str, Any]:
    """A group for each parameter, states by position, the average in place of the weights."""
    model, saved = strategy.model_state_dict(), strategy.optim_state_dict()
    rates = {name: dict(g) for g in saved["param_groups"] for name in g["params"]}
    groups = [{**rates[name], "params": [k]} for k, name in enumerate(model)]
    values = [group["lr"] for group in groups]
    schedule = {
        "milestones": {1: 1, 3: 1},
        "gamma": 0.5,
        "begin": 0,
        "end": 10**9,
        "last_step": 2,
    }
    schedule |= {
        "param_name": "lr",
        "by_epoch": True,
        "verbose": False,
        "_global_step": 2,
    }
    schedule |= {"base_values": [g["initial_lr"] for g in groups] + [0.1]}
    average = ema.state_dict()
    return {
        "meta": {"iter": 4, "epoch": 2, "seed": 3},
        "state_dict": {name: average[f"module.{name}"].clone() for name in model},
        "ema_state_dict": {"steps": average["steps"]}
        | {f"module.{n}": model[n] for n in model},
        "optimizer": {
            "state": {k: saved["state"][name] for k, name in enumerate(model)},
            "param_groups": groups,
            "base_param_settings": {"lr": 0.05, "params": torch.zeros(1)},
        },
        "param_schedulers": [schedule | {"_last_value": [*values, 0.05]}],
    }


def test_a_run_of_mmengine_goes_on_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "epoch_2.pth"
    whole, trainer, average = epochs_run(tmp_path)
    trainer.train(max_iter=4)
    theirs = as_mmengine_has_it(whole, average)
    torch.save(mmengine.from_mmengine(theirs), path)
    strategy, resumed, ema = epochs_run(tmp_path)
    Checkpointer(strategy.model, trainer=resumed).load(path)
    for each in (trainer, resumed):
        each.train(max_iter=8)
    assert resumed.start_iter == 4
    assert_equal(strategy.model_state_dict(), whole.model_state_dict())
    assert_equal(ema.state_dict(), average.state_dict())
    assert strategy.optim_wrapper.get_lr() == whole.optim_wrapper.get_lr()


def test_a_state_of_mmengine_with_a_group_for_each_parameter_goes_to_the_same_parameters() -> (
    None
):
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    theirs = torch.optim.SGD(
        [{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9
    )
    for number, parameter in enumerate(model.parameters()):
        theirs.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    optimizer = {"type": "SGD", "lr": 0.1, "momentum": 0.9}
    ours = DefaultOptimWrapperConstructor(
        {"optimizer": optimizer}, {"bias_lr_mult": 2.0}
    )(model)
    assert [len(group["params"]) for group in ours.optimizer.param_groups] == [2, 2]
    ours.name_parameters(model)
    ours.load_state_dict(theirs.state_dict())
    for number, parameter in enumerate(model.parameters()):
        momentum = ours.optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(momentum, torch.full_like(parameter, number))


def test_a_moving_average_begins_with_the_weights_of_its_first_update() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = MODELS.build(
        {"type": "ExponentialMovingAverage", "momentum": 0.25, "model": model}
    )
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        average.update_parameters(model)
    assert average.module.weight.item() == 1.25


class Decaying(DefaultOptimWrapperConstructor):
    def add_params(
        self, params: Any, module: nn.Module, prefix: str = "", **kwargs: Any
    ) -> None:  # type: ignore[override]
        super().add_params(params, module, prefix, **kwargs)
        for group in params:
            group["lr"] *= self.paramwise_cfg["layer_decay"]


def test_a_constructor_has_rules_of_its_own_beside_those_that_are_there() -> None:
    rules = {"layer_decay": 0.5, "bias_lr_mult": 4.0}
    wrapper = Decaying({"optimizer": {"type": "SGD", "lr": 1.0}}, rules)(
        nn.Linear(1, 1)
    )
    assert wrapper.get_lr()["lr"] == [0.5, 2.0]
