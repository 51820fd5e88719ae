import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hooktrain.compat.mmengine  # noqa: F401  # has rules for parameters
from equality import assert_equal
from hooktrain.checkpoint import CorruptCheckpointError, load_file
from hooktrain.config import LazyCall
from hooktrain.solver import OptimWrapper, OptimWrapperDict, StepLR
from hooktrain.strategy import SingleDeviceStrategy
from hooktrain.utils.env import seed_step
from toys import SGD, Regression, batch, train_steps


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


def test_seed_and_folders_are_known_before_the_setup(tmp_path: Any) -> None:
    made = strategy(work_dir=tmp_path, env_kwargs={"seed": 3})
    assert (made.seed, made.launcher) == (3, "none")
    assert made.log_dir == str(tmp_path / made.timestamp)


def test_a_model_is_built_of_what_describes_it() -> None:
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


def test_a_second_model_is_refused() -> None:
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


def test_no_rate_is_scaled_without_a_size() -> None:
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


def test_several_optimizers_know_where_the_run_ends() -> None:
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


STEP = {"type": "StepLR", "step_size": 2, "gamma": 0.5, "by_epoch": False}


def prepared(
    work_dir: Path, seed: int | None = 3, dropout: float = 0.5, **kwargs: Any
) -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(
        work_dir=work_dir, device="cpu", env_kwargs={"seed": seed}
    )
    defaults = {
        "optim_wrapper": SGD,
        "param_scheduler": STEP,
        "dispatch_kwargs": {"max_iters": 9},
    }
    strategy.prepare(
        {"type": "StrategyToy", "dropout": dropout}, **{**defaults, **kwargs}
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


def test_a_checkpoint_has_the_parts_and_what_is_added(tmp_path: Path) -> None:
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
    assert saved["meta"].items() >= {"epoch": 2, "seed": 3}.items()
    strategy.save_checkpoint(
        tmp_path / "b.pth", save_optimizer=False, save_param_scheduler=False
    )
    assert set(load_file(tmp_path / "b.pth")) == {"model", "meta"}
    with pytest.raises(ValueError, match="'optimizer'"):
        strategy.save_checkpoint(tmp_path / "c.pth", extra_ckpt={"optimizer": 1})


def test_a_checkpoint_that_lacks_a_part_changes_nothing(tmp_path: Path) -> None:
    strategy = prepared(tmp_path)
    strategy.save_checkpoint(tmp_path / "a.pth", save_optimizer=False)
    nn.init.zeros_(strategy.model.last.weight)
    with pytest.raises(ValueError, match="'optimizer' is not in"):
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


def test_an_evaluation_resumes_from_any_checkpoint(tmp_path: Path) -> None:
    prepared(tmp_path).save_checkpoint(tmp_path / "a.pth")
    made = strategy(work_dir=tmp_path)
    made.prepare(Regression())
    rest = made.load_or_resume(resume=True)
    assert rest is not None
    assert set(rest) == {"optimizer", "param_schedulers", "meta"}


def test_other_schedulers_than_those_saved_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path).save_checkpoint(tmp_path / "a.pth")
    second = prepared(tmp_path, param_scheduler=[STEP, STEP])
    nn.init.zeros_(second.model.last.weight)
    with pytest.raises(ValueError, match="schedulers"):
        second.resume(tmp_path / "a.pth")
    assert not second.model.last.weight.any()


def test_the_schedulers_of_several_optimizers_come_back(tmp_path: Path) -> None:
    options = {"optim_wrapper": {"first": SGD, "last": SGD}}
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


def test_the_newest_intact_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    for number in (1, 2):
        extra = {"meta": {"iter": number}}
        made.save_checkpoint(tmp_path / f"iter_000000{number}.pth", extra_ckpt=extra)
    made.save_checkpoint(tmp_path / "best.pth", tag=False)
    (tmp_path / "iter_0000002.pth").write_bytes(b"broken")
    with pytest.raises(CorruptCheckpointError):
        made.resume(tmp_path / "iter_0000002.pth")
    rest = made.load_or_resume(resume=True)
    assert rest is not None
    assert rest["meta"]["iter"] == 1


def test_a_checkpoint_of_mmengine_resumes(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.025, momentum=0.9)
    model(torch.ones(2, 3), torch.ones(2, 1)).sum().backward()
    optimizer.step()
    schedule = {"step_size": 2, "gamma": 0.5, "param_name": "lr", "begin": 0, "end": 9}
    schedule |= {
        "by_epoch": False,
        "base_values": [0.1],
        "last_step": 4,
        "_global_step": 4,
    }
    schedule |= {"verbose": False, "_last_value": [0.025]}
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


def test_loading_or_resuming_follows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = strategy(work_dir=tmp_path)
    monkeypatch.setattr(made, "resume", lambda name: ("resume", name))
    monkeypatch.setattr(made, "load_checkpoint", lambda name: ("load", name))
    table: list[tuple[Any, Any, Any]] = [
        (False, None, None),
        (False, "a", ("load", "a")),
        (True, None, ("resume", None)),
        (True, "a", ("resume", "a")),
        ("b", "a", ("resume", "b")),
    ]
    for resume, load_from, expected in table:
        assert made.load_or_resume(resume=resume, load_from=load_from) == expected
