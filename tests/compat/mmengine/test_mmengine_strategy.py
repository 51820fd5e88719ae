"""MMEngine's strategies: each method of theirs, called by its name."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equality import assert_equal
from gloo import run_ranks, torchrun
from hooktrain.checkpoint import load_file
from hooktrain.checkpoint.files import save_file
from hooktrain.compat.mmengine import (
    BaseStrategy,
    DDPStrategy,
    FSDPStrategy,
    MMDistributedDataParallel,
    MultiStepLR,
    SingleDeviceStrategy,
    StepLR,
    build_optim_wrapper,
)
from hooktrain.compat.mmengine.registry import STRATEGIES
from hooktrain.engine import SimpleTrainer
from hooktrain.model import StepDistributedDataParallel
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from hooktrain.strategy import Environment
from hooktrain.strategy.environment import leave_processes
from hooktrain.utils import comm
from hooktrain.utils.env import seed_step
from hooktrain.utils.logger import close_logger
from sharding_toys import CONFIG, DATA, own_part
from toys import SGD, Regression, batch, train_steps

TOY = {"type": "StrategyToy"}
STEP = {"type": "StepLR", "step_size": 2, "gamma": 0.5, "by_epoch": False}
ORDER = [
    "setup",
    "_setup_env",
    "_setup_distributed",
    "_set_randomness",
    "build_model",
    "_init_model_weights",
    "_wrap_model",
    "compile_model",
    "build_optim_wrapper",
    "_scale_lr",
    "build_param_scheduler",
    "_build_param_scheduler",
    "_prepared_components",
]


@pytest.fixture
def made(tmp_path: Path) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(work_dir=tmp_path, device="cpu")


def called(base: type[BaseStrategy], names: list[str], calls: list[str]) -> Any:
    """A subclass that overrides methods, and tells when they are called."""

    def override(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return method

    return type("Own", (base,), {name: override(name) for name in names})


def test_what_a_subclass_overrides_is_called_in_the_written_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in torchrun().items():
        monkeypatch.setenv(name, value)
    calls: list[str] = []
    own = called(DDPStrategy, ORDER, calls)(work_dir=tmp_path, device="cpu")
    try:
        own.prepare(
            TOY,
            optim_wrapper=SGD,
            param_scheduler=STEP,
            dispatch_kwargs={"max_iters": 4},
        )
    finally:
        del own.model, own.optim_wrapper
        leave_processes()
    assert calls == ORDER


def test_the_classes_are_related_as_in_mmengine() -> None:
    assert issubclass(DDPStrategy, SingleDeviceStrategy)
    with pytest.raises(TypeError, match="use SingleDeviceStrategy"):
        BaseStrategy()
    # A subclass that defines what it needs may be made.
    assert type("Own", (BaseStrategy,), {})(device="cpu").seed is not None


def test_processes_are_joined_by_the_launcher_of_torch_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in torchrun().items():
        monkeypatch.setenv(name, value)
    made = DDPStrategy(device="cpu")
    try:
        made._setup_distributed(backend="gloo")
        assert (made.distributed, made.world_size) == (True, 1)
    finally:
        leave_processes()


def test_what_a_subclass_saves_and_loads_by_is_called(tmp_path: Path) -> None:
    saving = ["model_state_dict", "optim_state_dict", "scheduler_state_dict"]
    loading = [f"load_{name}" for name in saving]
    calls: list[str] = []
    kind = called(SingleDeviceStrategy, [*saving, *loading], calls)
    own = kind(work_dir=tmp_path, device="cpu")
    own.prepare(
        TOY, optim_wrapper=SGD, param_scheduler=STEP, dispatch_kwargs={"max_iters": 4}
    )
    own.save_checkpoint(tmp_path / "a.pth")
    assert sorted(calls) == sorted(saving)
    for filename in (tmp_path / "a.pth", None):
        calls.clear()
        own.resume(filename)
        assert sorted(calls) == sorted(loading)
    calls.clear()
    own.load_checkpoint(tmp_path / "a.pth")
    assert calls == loading[:1]


def test_a_subclass_may_change_the_environment(tmp_path: Path) -> None:
    class Seeded(SingleDeviceStrategy):
        def _setup_env(self, **env_kwargs: Any) -> None:
            super()._setup_env(**{**env_kwargs, "randomness": {"seed": 9}})

    own = Seeded(work_dir=tmp_path, device="cpu", env_kwargs={"seed": 3})
    own.setup()
    assert own.seed == torch.initial_seed() == 9


def test_a_model_is_built_of_its_configuration(made: SingleDeviceStrategy) -> None:
    module = Regression()
    assert made.build_model(module) is module
    built = made.build_model({**TOY, "dropout": 0.25})
    assert isinstance(built, Regression)
    assert built.dropout.p == 0.25
    with pytest.raises(TypeError, match=r"model .*\{\}"):
        made.build_model({"type": dict})


def test_weights_are_initialised_unless_the_run_only_evaluates(tmp_path: Path) -> None:
    for known, times in (({}, 1), ({"init_weights_for_test_or_val": False}, 0)):
        made = SingleDeviceStrategy(work_dir=tmp_path, device="cpu")
        model = made.prepare(Regression(), dispatch_kwargs=known)
        assert model.initialized == times
        assert made._init_model_weights(model) is model


def test_the_parts_are_returned(made: SingleDeviceStrategy) -> None:
    model = made.prepare(TOY)
    assert model is made.model
    assert made._prepared_components() is model
    assert made.prepare(model, optim_wrapper=SGD) == [model, made.optim_wrapper]
    again = made.prepare(model, param_scheduler=STEP, dispatch_kwargs={"max_iters": 4})
    assert again == [model, made.optim_wrapper, made.param_schedulers]
    with pytest.raises(ValueError, match="another model"):
        made.prepare(Regression())


def test_optimizers_are_built_of_each_form(made: SingleDeviceStrategy) -> None:
    model = Regression()
    built = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    assert made.build_optim_wrapper(built) is built
    for config in (
        SGD,
        {"type": "OptimWrapper", **SGD},
        {"optimizer": built.optimizer},
    ):
        wrapper = made.build_optim_wrapper(config, model)
        assert isinstance(wrapper, OptimWrapper)
        assert wrapper.get_lr() == {"lr": [0.1]}
    several = made.build_optim_wrapper({"a": built, "b": built})
    assert isinstance(several, OptimWrapperDict)
    assert list(several) == ["a", "b"]


def test_schedulers_are_built_of_each_form(made: SingleDeviceStrategy) -> None:
    model = Regression()
    wrapper: Any = made.build_optim_wrapper(SGD, model)
    run = {"max_epochs": 8, "epoch_length": 3}
    config = {"type": "MultiStepLR", "milestones": [1, 2]}
    (single,) = made.build_param_scheduler(config, wrapper, run)
    assert isinstance(single, MultiStepLR)
    assert single.end == 8
    assert made.build_param_scheduler(single, wrapper) == [single]
    in_iterations = {**config, "convert_to_iter_based": True}
    first, second = made.build_param_scheduler([in_iterations, single], wrapper, run)
    assert (first.end, list(first.milestones), second) == (24, [3, 6], single)
    several = OptimWrapperDict(a=wrapper, b=wrapper)
    built = made.build_param_scheduler({"a": config, "b": [config] * 2}, several, run)
    assert {name: len(each) for name, each in built.items()} == {"a": 1, "b": 2}  # type: ignore[union-attr]
    same = made.build_param_scheduler(config, several, run)
    assert {name: len(each) for name, each in same.items()} == {"a": 1, "b": 1}  # type: ignore[union-attr]
    with pytest.raises(KeyError, match="'b'"):
        made.build_param_scheduler({"a": config}, several, run)


def test_an_optimizer_of_another_model_is_refused(made: SingleDeviceStrategy) -> None:
    optimizer = torch.optim.SGD(Regression().parameters())
    with pytest.raises(ValueError, match="parameters of another model"):
        made.prepare(Regression(), optim_wrapper=optimizer)


def test_nothing_of_the_caller_is_changed() -> None:
    arguments: dict[str, Any] = {
        "optim_wrapper": {**SGD, "accumulative_counts": 2},
        "param_scheduler": [STEP, {**STEP, "convert_to_iter_based": False}],
        "compile": {"target": "forward", "backend": "eager"},
        "dispatch_kwargs": {"max_iters": 9, "train_micro_batch_size_per_gpu": 2},
    }
    constructor: dict[str, Any] = {
        "auto_scale_lr": {"enable": True, "base_batch_size": 4},
        "env_kwargs": {"randomness": {"seed": 1}},
    }
    before = copy.deepcopy((arguments, constructor))
    made = SingleDeviceStrategy(device="cpu", **constructor)
    made.prepare(TOY, **arguments)
    made.dispatch_kwargs["max_iters"] = 1
    assert (arguments, constructor) == before


def test_the_settings_of_mmengine_are_understood() -> None:
    env_kwargs = {
        "launcher": "slurm",
        "cudnn_benchmark": True,
        "mp_cfg": {"mp_start_method": "fork", "opencv_num_threads": 0},
        "dist_cfg": {"backend": "gloo", "timeout": 90},
        "resource_limit": 4096,
        "randomness": {"seed": 1, "deterministic": True},
    }
    made = SingleDeviceStrategy(env_kwargs=env_kwargs)
    assert made.environment == Environment(
        launcher="slurm", backend="gloo", timeout=90, seed=1, deterministic=True
    )
    assert made.randomness == {
        "seed": 1,
        "diff_rank_seed": False,
        "deterministic": True,
    }
    flat = SingleDeviceStrategy(env_kwargs={"dist_cfg": None, "seed": 2})
    assert flat.environment == Environment(seed=2)
    with pytest.raises(TypeError, match="'bakend'"):
        SingleDeviceStrategy(env_kwargs={"dist_cfg": {"bakend": "gloo"}})


def test_cudnn_tries_its_algorithms_if_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    env_kwargs = {"cudnn_benchmark": True}
    SingleDeviceStrategy(device="cpu", env_kwargs=env_kwargs).setup()
    assert torch.backends.cudnn.benchmark


def test_the_environment_is_told(made: SingleDeviceStrategy) -> None:
    system, run = made.collect_env()
    assert system["torch"] == torch.__version__
    assert run["seed"] is None
    assert run["Distributed launcher"] == "none"
    assert run["Distributed training"] is False
    assert run["GPU number"] == 1


def test_random_numbers_are_seeded_by_name(made: SingleDeviceStrategy) -> None:
    made._set_randomness(seed=7)
    assert made.seed == torch.initial_seed() == 7


def test_a_run_has_a_name() -> None:
    plain = SingleDeviceStrategy()
    assert plain.experiment_name == plain.timestamp
    made = SingleDeviceStrategy(experiment_name="digits")
    assert made.experiment_name == f"digits_{made.timestamp}"


def test_a_strategy_has_a_seed_before_it_is_set_up() -> None:
    chosen = SingleDeviceStrategy(env_kwargs={"seed": 3}, device="cpu")
    assert (chosen.seed, chosen.launcher, chosen.world_size) == (3, "none", 1)
    drawn = SingleDeviceStrategy(device="cpu")
    seed = drawn.seed
    assert torch.initial_seed() == seed
    drawn.setup()
    assert drawn.seed == seed


def test_a_logger_writes_into_the_folder_of_the_run(tmp_path: Path) -> None:
    made = SingleDeviceStrategy(
        work_dir=tmp_path, device="cpu", log_kwargs={"log_level": "WARNING"}
    )
    made.prepare(nn.Linear(2, 1))
    try:
        logger = logging.getLogger("hooktrain")
        logger.info("not this")
        logger.warning("but this")
    finally:
        close_logger()
    log = (Path(made.log_dir) / f"{made.timestamp}.log").read_text()
    assert "but this" in log
    assert "not this" not in log


def test_configurations_build_these_strategies() -> None:
    built = STRATEGIES.build({"type": "DDPStrategy", "experiment_name": "digits"})
    assert type(built) is DDPStrategy


SCALING = {"enable": True, "base_batch_size": 4}
TWELVE = {"max_iters": 4, "train_micro_batch_size_per_gpu": 12}


def scaling(config: dict[str, Any] = SCALING) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device="cpu", auto_scale_lr=config)


def test_learning_rates_are_scaled_before_schedules_are_built() -> None:
    rules = {"custom_keys": {"last": {"lr_mult": 2.0}}}
    _, wrapper, (schedule,) = scaling().prepare(
        TOY,
        optim_wrapper={**SGD, "paramwise_cfg": rules},
        param_scheduler={**STEP, "step_size": 1},
        dispatch_kwargs=TWELVE,
    )
    assert wrapper.get_lr()["lr"] == pytest.approx([0.3, 0.6])
    schedule.step()
    assert wrapper.get_lr()["lr"] == pytest.approx([0.15, 0.3])


@pytest.mark.parametrize(
    ("config", "known", "missing"),
    [
        (SCALING, {}, "train_micro_batch_size_per_gpu"),
        ({"enable": True}, TWELVE, "base_batch_size"),
    ],
)
def test_scaling_needs_both_sizes(config: Any, known: Any, missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        scaling(config).prepare(Regression(), optim_wrapper=SGD, dispatch_kwargs=known)


def test_rates_that_a_schedule_has_noted_already_are_not_scaled() -> None:
    model = Regression()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = StepLR(wrapper, step_size=1)
    with pytest.raises(RuntimeError, match="before the learning rates were scaled"):
        scaling().prepare(
            model,
            optim_wrapper=wrapper,
            param_scheduler=schedule,
            dispatch_kwargs=TWELVE,
        )
    assert wrapper.param_groups[0]["lr"] == 0.1


class ByPart:
    """A constructor as users of MMEngine write it: an optimizer for each part of a model."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        self.cfg = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        wrappers: dict[str, Any] = {}
        for name in ("first", "last"):
            part = model.get_submodule(name)
            wrappers[name] = build_optim_wrapper(part, self.cfg)
        return OptimWrapperDict(**wrappers)


def test_several_optimizers_know_where_the_run_ends(made: SingleDeviceStrategy) -> None:
    _, wrapper, schedules = made.prepare(
        TOY,
        optim_wrapper={**SGD, "accumulative_counts": 4, "constructor": ByPart},
        param_scheduler={"type": "LinearLR", "by_epoch": True},
        dispatch_kwargs={"max_iters": 6, "max_epochs": 7},
    )
    ends = {name: [s.end for s in each] for name, each in schedules.items()}
    assert ends == {"first": [7], "last": [7]}
    for member in wrapper.values():
        updated = []
        for _ in range(6):
            loss = torch.ones(1, requires_grad=True).sum()
            member.update_params(loss)
            updated.append(member.should_update())
        assert updated == [False, False, False, True, False, True]


def prepared(
    work_dir: Path, seed: int = 3, dropout: float = 0.5, **kwargs: Any
) -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(
        work_dir=work_dir, device="cpu", env_kwargs={"seed": seed}
    )
    arguments = {"optim_wrapper": SGD, "param_scheduler": STEP, **kwargs}
    strategy.prepare(
        {**TOY, "dropout": dropout}, dispatch_kwargs={"max_iters": 9}, **arguments
    )
    return strategy


def go(strategy: SingleDeviceStrategy, steps: range) -> list[float]:
    losses = []
    for step in steps:
        seed_step(strategy.seed, step, strategy.rank)
        losses += train_steps(
            strategy.model, strategy.optim_wrapper, range(step, step + 1)
        )
        for scheduler in strategy.param_schedulers:
            scheduler.step()
    return losses


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    go(first, range(3))
    first.save_checkpoint(tmp_path / "iter_3.pth", extra_ckpt={"meta": {"iter": 3}})
    expected = go(first, range(3, 7))
    second = prepared(tmp_path, seed=8)
    go(second, range(1))
    rest = second.load_or_resume(resume=True)
    assert rest is not None
    assert rest["meta"]["iter"] == 3
    assert list(rest) == ["meta"]
    assert second.seed == 3
    assert second.optim_wrapper.get_lr() == {"lr": [0.05]}
    assert go(second, range(3, 7)) == expected
    assert_equal(second.model_state_dict(), first.model_state_dict())


@pytest.mark.parametrize("damaged", ["iter_10.pth", "last_checkpoint"])
def test_the_newest_intact_checkpoint_of_mmengines_names_is_resumed(
    tmp_path: Path, damaged: str
) -> None:
    made = prepared(tmp_path)
    for name, done in (("iter_9", 9), ("best_loss_iter_11", 11), ("iter_10", 10)):
        made.save_checkpoint(
            tmp_path / f"{name}.pth", extra_ckpt={"meta": {"iter": done}}
        )
    (tmp_path / damaged).write_bytes(b"damaged")
    rest = made.resume(None)
    assert rest is not None
    assert rest["meta"]["iter"] == (9 if damaged == "iter_10.pth" else 10)


def test_the_first_save_removes_what_a_killed_run_has_left(tmp_path: Path) -> None:
    left = tmp_path / ".iter_3.pth.tmp-hooktrain-1-elsewhere"
    left.write_bytes(b"half of a file")
    prepared(tmp_path).save_checkpoint(tmp_path / "iter_3.pth")
    assert not left.exists()
    assert (tmp_path / "iter_3.pth").exists()


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_of_other_shapes_is_not_resumed(
    tmp_path: Path, named: bool
) -> None:
    prepared(tmp_path).save_checkpoint(tmp_path / "iter_3.pth")
    path = tmp_path / "iter_3.pth"
    state = torch.load(path)
    name, weight = next(iter(state["model"].items()))
    state["model"][name] = torch.cat([weight, weight])
    save_file(state, path)
    other = prepared(tmp_path)
    before = copy.deepcopy(other.model_state_dict())
    with pytest.raises(ValueError, match=name):
        other.resume(path if named else None)
    assert_equal(other.model_state_dict(), before)
    other.load_checkpoint(path)  # the weights that fit


def test_accumulation_goes_on_where_it_was(tmp_path: Path) -> None:
    accumulating = {"optim_wrapper": {**SGD, "accumulative_counts": 4}}
    first = prepared(tmp_path, **accumulating)
    go(first, range(4))
    first.save_checkpoint(tmp_path / "a.pth")
    expected = go(first, range(4, 9))
    second = prepared(tmp_path, **accumulating)
    second.resume(tmp_path / "a.pth")
    assert go(second, range(4, 9)) == expected
    assert second.optim_wrapper.should_update()  # the last step is of one pass


def test_a_checkpoint_has_the_parts_beside_what_is_added(tmp_path: Path) -> None:
    strategy = prepared(tmp_path)
    extra = {"message_hub": {}, "meta": {"epoch": 2, "seed": 0}}
    before = copy.deepcopy(extra)
    strategy.save_checkpoint(tmp_path / "new" / "a.pth", extra_ckpt=extra)
    assert extra == before
    saved = load_file(tmp_path / "new" / "a.pth")
    parts = {"model", "optimizer", "param_schedulers"}
    assert set(saved) == {*parts, "message_hub", "meta"}
    assert list(saved["model"]) == list(Regression().state_dict())
    assert saved["param_schedulers"] == [strategy.param_schedulers[0].state_dict()]
    assert saved["meta"] == {"epoch": 2, "seed": 3}
    with pytest.raises(TypeError, match="'optimizer'"):
        strategy.save_checkpoint(tmp_path / "c.pth", extra_ckpt={"optimizer": 1})


def test_parts_are_left_out_of_a_checkpoint(tmp_path: Path) -> None:
    prepared(tmp_path).save_checkpoint(
        tmp_path / "b.pth", save_optimizer=False, save_param_scheduler=False
    )
    assert set(load_file(tmp_path / "b.pth")) == {"model", "meta"}


def test_a_checkpoint_that_lacks_a_part_changes_nothing(tmp_path: Path) -> None:
    strategy = prepared(tmp_path)
    strategy.save_checkpoint(tmp_path / "a.pth", save_optimizer=False)
    nn.init.zeros_(strategy.model.last.weight)
    with pytest.raises(ValueError, match="has no 'optimizer'"):
        strategy.resume(tmp_path / "a.pth")
    assert not strategy.model.last.weight.any()
    strategy.resume(tmp_path / "a.pth", resume_optimizer=False)
    assert strategy.model.last.weight.all()


def test_new_schedulers_begin_with_their_own_rates(tmp_path: Path) -> None:
    first, second = prepared(tmp_path), prepared(tmp_path)
    go(first, range(4))
    first.save_checkpoint(tmp_path / "a.pth")
    assert first.optim_wrapper.get_lr() == {"lr": [0.025]}
    second.resume(tmp_path / "a.pth", resume_param_scheduler=False)
    assert second.optim_wrapper.get_lr() == {"lr": [0.1]}
    go(second, range(2))
    assert second.optim_wrapper.get_lr() == {"lr": [0.05]}


def test_an_evaluation_resumes_from_any_checkpoint(
    tmp_path: Path, made: SingleDeviceStrategy
) -> None:
    prepared(tmp_path).save_checkpoint(tmp_path / "a.pth")
    made.prepare(Regression())
    rest = made.load_or_resume(resume=True)
    assert rest is not None
    assert set(rest) == {"optimizer", "param_schedulers", "meta"}


def test_the_schedulers_of_several_optimizers_come_back(tmp_path: Path) -> None:
    options = {"optim_wrapper": {**SGD, "constructor": ByPart}}
    first = prepared(tmp_path, **options)
    first.param_schedulers["last"][0].step()  # type: ignore[call-overload]
    first.save_checkpoint(tmp_path / "a.pth")
    second = prepared(tmp_path, **options)
    second.resume(tmp_path / "a.pth")
    assert second.scheduler_state_dict() == first.scheduler_state_dict()
    steps = {n: s["_global_step"] for n, (s,) in second.scheduler_state_dict().items()}  # type: ignore[union-attr]
    assert steps == {"first": 0, "last": 1}


def test_without_a_checkpoint_a_run_begins(tmp_path: Path) -> None:
    assert prepared(tmp_path).load_or_resume(resume=True) is None


def test_a_checkpoint_of_mmengine_resumes(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.025, momentum=0.9)
    model(torch.ones(2, 3), torch.ones(2, 1)).sum().backward()
    optimizer.step()
    schedule = {"step_size": 2, "gamma": 0.5, "param_name": "lr", "begin": 0, "end": 9}
    schedule |= {"by_epoch": False, "base_values": [0.1], "_last_value": [0.025]}
    schedule |= {"last_step": 4, "_global_step": 4, "verbose": False}
    saved = {
        "meta": {"iter": 4, "seed": 11, "mmengine_version": "0.10.7"},
        "state_dict": {
            f"module.{name}": value for name, value in model.state_dict().items()
        },
        "optimizer": optimizer.state_dict(),
        "param_schedulers": [schedule],
    }
    torch.save(saved, tmp_path / "iter_4.pth")
    options = {"optim_wrapper": {**SGD, "accumulative_counts": 2}}
    strategy = prepared(tmp_path, **options)
    strategy.resume(tmp_path / "iter_4.pth")
    assert torch.equal(strategy.model_state_dict()["last.weight"], model.last.weight)
    assert strategy.optim_wrapper.get_lr() == {"lr": [0.025]}
    assert strategy.optim_wrapper.inner_count == 4
    assert strategy.seed == 11
    go(strategy, range(4, 6))
    assert strategy.optim_wrapper.get_lr() == {"lr": [0.0125]}


@pytest.mark.parametrize(
    ("resume", "load_from", "expected"),
    [
        (False, None, None),
        (False, "a", ("load", "a")),
        (True, None, ("resume", None)),
        (True, "a", ("resume", "a")),
        ("b", "a", ("resume", "b")),
    ],
)
def test_loading_or_resuming_follows_the_table(
    made: SingleDeviceStrategy,
    monkeypatch: pytest.MonkeyPatch,
    resume: Any,
    load_from: Any,
    expected: Any,
) -> None:
    monkeypatch.setattr(made, "resume", lambda name: ("resume", name))
    monkeypatch.setattr(made, "load_checkpoint", lambda name: ("load", name))
    assert made.load_or_resume(resume=resume, load_from=load_from) == expected


def test_checkpoints_are_changed_by_a_function(tmp_path: Path) -> None:
    def forget(checkpoint: dict[str, Any]) -> None:
        del checkpoint["model"]["last.bias"]
        checkpoint["note"] = 1

    first = prepared(tmp_path)
    path = tmp_path / "a.pth"
    first.save_checkpoint(path, callback=lambda checkpoint: checkpoint.pop("optimizer"))
    assert "optimizer" not in load_file(path)
    first.save_checkpoint(path)
    for load in (
        lambda each: each.load_checkpoint(path, callback=forget),
        lambda each: each.resume(path, map_location="default", callback=forget),
        lambda each: each.resume(None, callback=forget),
    ):
        second = prepared(tmp_path)
        nn.init.constant_(second.model.last.bias, 3)
        rest = load(second)
        assert rest["note"] == 1
        assert second.model.last.bias.item() == 3
        assert torch.equal(second.model.last.weight, first.model.last.weight)


def test_weights_are_renamed_as_they_are_loaded(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    state = {f"net.{name}": value for name, value in first.model_state_dict().items()}
    second = prepared(tmp_path)
    renames = [(r"^net\.", "")]
    second.load_model_state_dict(state, strict=True, revise_keys=renames)
    assert_equal(dict(second.model_state_dict()), dict(first.model_state_dict()))
    with pytest.raises(ValueError, match="last"):
        second.load_model_state_dict({"last.bias": torch.ones(1)}, strict=True)
    torch.save({"state_dict": state}, tmp_path / "b.pth")
    second.load_checkpoint(tmp_path / "b.pth", strict=True, revise_keys=renames)


def test_states_are_loaded_one_by_one(tmp_path: Path) -> None:
    first, second = prepared(tmp_path), prepared(tmp_path)
    go(first, range(3))
    second.load_optim_state_dict(copy.deepcopy(first.optim_state_dict()))
    second.load_scheduler_state_dict(first.scheduler_state_dict())
    assert_equal(second.optim_state_dict(), first.optim_state_dict())
    assert second.scheduler_state_dict() == first.scheduler_state_dict()


def test_the_synchronised_batch_norm_of_another_package_is_refused() -> None:
    assert SingleDeviceStrategy(sync_bn="torch").sync_bn
    assert not SingleDeviceStrategy().sync_bn
    with pytest.raises(ValueError, match="'mmcv'"):
        SingleDeviceStrategy(sync_bn="mmcv")


def test_another_form_of_saved_states_is_refused() -> None:
    with pytest.raises(ValueError, match="'shraded'"):
        FSDPStrategy(state_dict_cfg="shraded")


HALVES = [slice(0, 4), slice(4, 8)]
ADAMW = {"optimizer": {"type": "AdamW", "lr": 0.01}}
SEED: Any = {"device": "cpu", "env_kwargs": {"seed": 3}}


class Loss(nn.Linear):
    """A model that returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def accumulated(made: Any, share: slice = slice(None), **known: int) -> Tensor:
    """The weights after updates of four batches each, by a trainer that knows no such number."""
    accumulating = {**SGD, "accumulative_counts": 4}
    torch.manual_seed(0)
    model, wrapper = made.prepare(
        Loss(1, 1), optim_wrapper=accumulating, dispatch_kwargs=known
    )
    data = [batch(8, seed)[1][share] for seed in range(8)]
    SimpleTrainer(model, data, wrapper).train(0, 4)
    weights: Tensor = unwrap_model(model).weight.detach()
    return weights


def wrapped() -> list[str]:
    """The wrappers of a model by default, and by their names."""
    kinds = []
    for wrapper in (None, {"type": "MMDistributedDataParallel"}):
        made = DDPStrategy(model_wrapper=wrapper, **SEED)
        assert made.model_wrapper == wrapper
        model = made.prepare(TOY)
        assert isinstance(model, StepDistributedDataParallel)
        assert made._wrap_model(model) is model
        assert made.convert_model(model) is model
        kinds.append(type(model).__name__)
    anomalous = {"type": MMDistributedDataParallel, "detect_anomalous_params": True}
    made = DDPStrategy(model_wrapper=anomalous, **SEED)
    assert made.prepare(TOY).detect_anomalous_params
    return kinds


def goes_on(folder: str) -> bool:
    made = DDPStrategy(work_dir=folder, **SEED)
    accumulating = {**SGD, "accumulative_counts": 2}
    model, wrapper = made.prepare({**TOY, "dropout": 0.5}, optim_wrapper=accumulating)
    train_steps(model, wrapper, range(4), HALVES[made.rank])
    seed_step(made.seed, 4, made.rank)
    if made.rank == 0:
        made.save_checkpoint(Path(folder) / "a.pth", extra_ckpt={"meta": {"iter": 4}})
    expected = train_steps(model, wrapper, range(4, 8), HALVES[made.rank])
    made.load_or_resume(resume=True)
    return train_steps(model, wrapper, range(4, 8), HALVES[made.rank]) == expected


def sharded(folder: str) -> dict[str, Any]:
    """Whether sharded runs go on, and the states of one that saves whole files."""
    again = []
    for form in ("full", "local"):
        made = FSDPStrategy(work_dir=f"{folder}/{form}", state_dict_cfg=form, **SEED)
        model, wrapper = made.prepare(CONFIG, optim_wrapper=ADAMW)
        text_steps(model, wrapper, slice(2))
        made.save_checkpoint(f"{made.work_dir}/iter_2.pth")
        expected = text_steps(model, wrapper, slice(2, 4))
        made.resume(f"{made.work_dir}/iter_2" + ".pth" * (form == "full"))
        again.append(text_steps(model, wrapper, slice(2, 4)) == expected)
        if form == "full":
            states = made.model_state_dict()
    return {"equal": again, "states": states}


def text_steps(model: nn.Module, wrapper: OptimWrapper, steps: slice) -> list[float]:
    losses = []
    for data in DATA[steps]:
        loss = model(own_part(data))["loss_lm"]
        wrapper.update_params(loss)
        losses.append(loss.item())
    return losses


def built_before() -> None:
    made = FSDPStrategy(**SEED)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="another model"):
        made.prepare(model, optim_wrapper=optimizer)


def on_two_ranks(folder: str) -> dict[str, Any]:
    built_before()
    made = DDPStrategy(**SEED)
    own = HALVES[comm.get_rank()]
    return {
        "wrapped": wrapped(),
        "goes on": goes_on(folder),
        "sharded": sharded(folder),
        "accumulated": accumulated(made, own, max_iters=6),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    return run_ranks(on_two_ranks, 2, str(folder))


def test_wrappers_are_chosen_by_the_model_or_by_name(ranks: Any) -> None:
    expected = ["StepDistributedDataParallel", "MMDistributedDataParallel"]
    assert [rank["wrapped"] for rank in ranks] == [expected] * 2


def test_all_ranks_go_on_from_what_the_main_process_alone_has_saved(ranks: Any) -> None:
    assert [rank["goes on"] for rank in ranks] == [True, True]


def test_a_checkpoint_of_two_ranks_resumes_on_one(ranks: Any, folder: Path) -> None:
    assert list(load_file(folder / "a.pth")["model"]) == list(Regression().state_dict())
    made = SingleDeviceStrategy(work_dir=folder, **SEED)
    accumulating = {**SGD, "accumulative_counts": 2}
    _, wrapper = made.prepare(TOY, optim_wrapper=accumulating)
    made.load_or_resume(resume=True)
    assert wrapper.inner_count == 4


def test_sharded_runs_go_on_bit_for_bit(ranks: Any) -> None:
    assert [rank["sharded"]["equal"] for rank in ranks] == [[True, True]] * 2


def test_the_states_are_whole_on_the_main_process_only(ranks: Any) -> None:
    main, other = (rank["sharded"]["states"] for rank in ranks)
    assert main["head.weight"].shape == (17, 16)
    assert set(other.values()) == {None}


def test_a_trainer_counts_its_passes_itself_whatever_the_strategy_knows(
    ranks: Any,
) -> None:
    first, second = (rank["accumulated"] for rank in ranks)
    assert torch.equal(first, second)
    alone = accumulated(SingleDeviceStrategy(**SEED))
    known = SingleDeviceStrategy(**SEED)
    assert torch.equal(accumulated(known, max_iters=6), alone)
    torch.testing.assert_close(first, alone)
