import copy
from typing import Any

import pytest
import torch
from strategy_toys import SGD, Regression, batch, train
from torch import nn

import hooktrain.compat.mmengine  # noqa: F401  # has rules for parameters
from hooktrain.config import LazyCall
from hooktrain.model import BatchNormXd
from hooktrain.solver import OptimWrapper, OptimWrapperDict, StepLR
from hooktrain.strategy import SingleDeviceStrategy


class Telling(SingleDeviceStrategy):
    """Tells in which order its methods are called."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(device="cpu", **kwargs)
        self.calls: list[str] = []


def _tell(name: str) -> Any:
    def method(self: Telling, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return getattr(SingleDeviceStrategy, name)(self, *args, **kwargs)

    return method


ORDER = [
    *("setup", "build_model", "init_model_weights", "wrap_model", "compile_model"),
    *("build_optim_wrapper", "build_param_scheduler"),
]
for _name in ORDER:
    setattr(Telling, _name, _tell(_name))


def strategy(**kwargs: Any) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device="cpu", **kwargs)


def steps(param: str = "lr") -> dict[str, Any]:
    return {"type": "StepLR", "step_size": 1, "gamma": 0.5, "by_epoch": False}


def test_everything_is_built_in_the_written_order() -> None:
    telling = Telling()
    telling.prepare(
        {"type": "StrategyToy"},
        optim_wrapper=SGD,
        param_scheduler=steps(),
        compile={"backend": "eager"},
        dispatch_kwargs={"max_iters": 4},
    )
    assert list(dict.fromkeys(telling.calls)) == ORDER


def test_the_constructor_only_stores(tmp_path: Any) -> None:
    state = torch.get_rng_state()
    made = strategy(work_dir=tmp_path / "runs", env_kwargs={"seed": 3}, log_kwargs={})
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tmp_path.iterdir()) == []
    for name in (
        "seed",
        "timestamp",
        "log_dir",
        "experiment_name",
        "launcher",
        "device",
        "model",
    ):
        assert not hasattr(made, name)
    with pytest.raises(
        ValueError, match="sync_bn must be 'torch' or None, but got 'mmcv'"
    ):
        strategy(sync_bn="mmcv")


def test_a_model_is_a_module_a_dict_a_lazy_call_or_a_function() -> None:
    made, module = strategy(), Regression()
    assert made.build_model(module) is module
    built = made.build_model({"type": "StrategyToy", "dropout": 0.25})
    assert isinstance(built, Regression)
    assert built.dropout.p == 0.25
    assert isinstance(
        made.build_model(LazyCall(nn.Linear)(in_features=1, out_features=2)), nn.Linear
    )
    assert made.build_model(lambda: module) is module
    for wrong in (3, {"type": dict}, lambda: 3):
        with pytest.raises(
            TypeError, match=r"model should be a nn\.Module object, dict or f"
        ):
            made.build_model(wrong)  # type: ignore[arg-type]


def test_what_was_prepared_is_returned() -> None:
    made = strategy()
    model = made.prepare({"type": "StrategyToy"})
    assert model is made.model
    assert made.prepare(model, optim_wrapper=SGD) == [model, made.optim_wrapper]
    again = made.prepare(
        model, param_scheduler=steps(), dispatch_kwargs={"max_iters": 4}
    )
    assert again == [model, made.optim_wrapper, made.param_schedulers]


def test_evaluating_first_and_training_later_works() -> None:
    made = strategy()
    model = made.prepare({"type": "StrategyToy"})
    weights = copy.deepcopy(model.state_dict())
    trained, wrapper = made.prepare({"type": "StrategyToy"}, optim_wrapper=SGD)
    assert trained is model
    assert model.initialized == 1
    loaded = {"init_weights_for_test_or_val": False}
    assert strategy().prepare(Regression(), dispatch_kwargs=loaded).initialized == 0
    assert all(
        torch.equal(weights[name], value) for name, value in model.state_dict().items()
    )
    losses = train(trained, wrapper, range(6))
    assert sum(losses[3:]) < sum(losses[:3])


def test_a_second_model_or_a_schedule_without_an_optimizer_is_refused() -> None:
    made = strategy()
    made.prepare(Regression())
    with pytest.raises(ValueError, match="has prepared another model"):
        made.prepare(Regression(), optim_wrapper=SGD)
    with pytest.raises(AttributeError, match="has no attribute 'optim_wrapper'"):
        strategy().prepare(Regression(), param_scheduler=steps())


def test_nothing_of_the_caller_is_changed() -> None:
    arguments: dict[str, Any] = {
        "optim_wrapper": {**SGD, "accumulative_counts": 2},
        "param_scheduler": [steps(), {**steps(), "convert_to_iter_based": False}],
        "compile": {"target": "forward", "backend": "eager"},
        "dispatch_kwargs": {"max_iters": 9, "train_micro_batch_size_per_gpu": 2},
    }
    constructor: dict[str, Any] = {
        "auto_scale_lr": {"enable": True, "base_batch_size": 4},
        "env_kwargs": {"randomness": {"seed": 1}},
    }
    before = copy.deepcopy((arguments, constructor))
    made = strategy(**constructor)
    made.prepare({"type": "StrategyToy"}, **arguments)
    made.dispatch_kwargs["max_iters"] = 1
    assert (arguments, constructor) == before


def test_compile_model_is_always_called_and_a_model_prepared_again_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, calls = strategy(), []
    monkeypatch.setattr(
        made, "compile_model", lambda model, how: calls.append(how) or model
    )
    model = made.prepare(Regression())
    for how in (True, {"target": "train_step"}):
        made.prepare(model, compile=how)
    assert calls == [False, True]


@pytest.mark.parametrize("target", ["forward", "train_step"])
def test_the_method_asked_for_is_compiled_each_time(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def fake(function: Any, *args: Any, **options: Any) -> Any:
        assert options == {"backend": "eager"}
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", fake)
    options = {"target": target, "backend": "eager"}
    for _ in range(2):
        strategy().compile_model(Regression(), options)
    # nn.Module.compile compiles what calls the forward and the hooks.
    assert compiled == [{"forward": "_call_impl"}.get(target, target)] * 2
    with pytest.raises(AttributeError, match="has no attribute 'train_stp'"):
        strategy().compile_model(Regression(), {"target": "train_stp"})


@pytest.mark.parametrize(
    "compile", [False, {"disable": True}, {"disable": True, "mode": "x"}]
)
def test_no_compiler_is_asked_unless_wanted(
    compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", None)
    model = Regression()
    assert strategy().compile_model(model, compile) is model


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    model = strategy().prepare(Regression(), compile={"backend": "eager"})
    x, y = batch(2, 0)
    before = model(x, y)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.last.weight)
    assert torch.equal(model(x, y), before)
    assert torch.equal(copied(x, y), copied.last.bias.expand(2, 1))
    assert list(model.state_dict()) == list(Regression().state_dict())


SCALING = {"enable": True, "base_batch_size": 4}


def test_learning_rates_are_scaled_before_schedules_are_built() -> None:
    made = strategy(auto_scale_lr=SCALING)
    rules = {"custom_keys": {"last": {"lr_mult": 2.0}}}
    _, wrapper, (schedule,) = made.prepare(
        {"type": "StrategyToy"},
        optim_wrapper={**SGD, "paramwise_cfg": rules},
        param_scheduler=steps(),
        dispatch_kwargs={"max_iters": 4, "train_micro_batch_size_per_gpu": 12},
    )
    rates = wrapper.get_lr()
    assert rates["lr"] == pytest.approx([0.3, 0.6])
    schedule.step()
    assert wrapper.get_lr()["lr"] == pytest.approx([0.15, 0.3])


def test_the_rates_of_several_optimizers_are_scaled() -> None:
    made = strategy(auto_scale_lr=SCALING)
    config = {"first": SGD, "last": {"optimizer": {"type": "SGD", "lr": 1.0}}}
    _, wrapper = made.prepare(
        {"type": "StrategyToy"},
        optim_wrapper=config,
        dispatch_kwargs={"train_micro_batch_size_per_gpu": 2},
    )
    assert wrapper.get_lr() == {"first.lr": [0.05], "last.lr": [0.5]}


def test_no_rate_is_scaled_unless_enabled_and_without_a_size_it_is_an_error() -> None:
    for config in (None, {}, {"enable": False}, {"base_batch_size": 4}):
        _, wrapper = strategy(auto_scale_lr=config).prepare(
            Regression(), optim_wrapper=SGD
        )
        assert wrapper.get_lr() == {"lr": [0.1]}
    with pytest.raises(
        ValueError, match=r"base_batch_size=4, .*_gpu=None in dispatch_kwargs"
    ):
        strategy(auto_scale_lr=SCALING).prepare(Regression(), optim_wrapper=SGD)
    made, known = (
        strategy(auto_scale_lr={"enable": True}),
        {"train_micro_batch_size_per_gpu": 2},
    )
    with pytest.raises(ValueError, match="base_batch_size=None"):
        made.prepare(Regression(), optim_wrapper=SGD, dispatch_kwargs=known)


def test_rates_that_a_schedule_has_noted_already_are_not_scaled() -> None:
    model = Regression()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = StepLR(wrapper, step_size=1)
    for given in (None, schedule):
        made = strategy(auto_scale_lr=SCALING)
        with pytest.raises(
            RuntimeError, match="noted the learning rates before they were scaled"
        ):
            made.prepare(
                model,
                optim_wrapper=wrapper,
                param_scheduler=given,
                dispatch_kwargs={"train_micro_batch_size_per_gpu": 2},
            )
    assert wrapper.get_lr() == {"lr": [0.1]}


def test_each_of_several_optimizers_and_its_schedule_know_where_the_run_ends() -> None:
    half = {**SGD, "accumulative_counts": 4}
    _, wrapper, schedules = strategy().prepare(
        {"type": "StrategyToy"},
        optim_wrapper={"first": half, "last": half},
        param_scheduler={"type": "LinearLR", "by_epoch": True},
        dispatch_kwargs={"max_iters": 6, "max_epochs": 7},
    )
    assert isinstance(wrapper, OptimWrapperDict)
    ends = {name: [s.end for s in each] for name, each in schedules.items()}
    assert ends == {"first": [7], "last": [7]}
    for member in wrapper.values():
        updated = []
        for _ in range(6):
            updated.append(
                member.update_params(torch.ones(1, requires_grad=True).sum())
            )
        assert updated == [False, False, False, True, False, True]


def test_batch_norms_of_several_ranks_become_those_of_one() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
    prepared = strategy().prepare(model)
    assert isinstance(prepared[1], BatchNormXd)
    assert prepared(torch.randn(4, 2)).shape == (4, 3)
