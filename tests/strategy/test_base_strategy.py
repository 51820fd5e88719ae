import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equality import assert_equal
from hooktrain.checkpoint import load_file
from hooktrain.compat.mmengine import SingleDeviceStrategy, StepLR
from hooktrain.config import LazyCall
from hooktrain.solver import OptimWrapper
from hooktrain.utils.env import seed_step
from sharding_toys import batches, make_model
from toys import SGD, Regression, batch, train_steps

ORDER = [
    *("setup", "build_model", "init_model_weights", "wrap_model", "compile_model"),
    *("build_optim_wrapper", "build_param_scheduler"),
]
STEP = {"type": "StepLR", "step_size": 2, "gamma": 0.5, "by_epoch": False}


@pytest.fixture
def made(tmp_path: Path) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(work_dir=tmp_path, device="cpu")


def test_everything_is_built_in_the_written_order(made: SingleDeviceStrategy) -> None:
    calls: list[str] = []

    def tell(name: str) -> None:
        method = getattr(made, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        setattr(made, name, told)

    for name in ORDER:
        tell(name)
    made.prepare(
        {"type": "StrategyToy"},
        optim_wrapper=SGD,
        param_scheduler=STEP,
        dispatch_kwargs={"max_iters": 4},
    )
    assert calls == ORDER


def test_a_model_is_built_of_what_describes_it(made: SingleDeviceStrategy) -> None:
    module = Regression()
    assert made.build_model(module) is module
    assert made.build_model(lambda: module) is module
    built = made.build_model({"type": "StrategyToy", "dropout": 0.25})
    assert isinstance(built, Regression)
    assert built.dropout.p == 0.25
    lazy = LazyCall(nn.Linear)(in_features=1, out_features=2)
    assert isinstance(made.build_model(lazy), nn.Linear)


@pytest.mark.parametrize("wrong", [3, {"type": dict}, lambda: 3])
def test_what_gives_no_model_is_refused(made: SingleDeviceStrategy, wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=r"model should be a nn\.Module object, dict or"
    ):
        made.build_model(wrong)


def test_what_was_prepared_is_returned(made: SingleDeviceStrategy) -> None:
    model = made.prepare({"type": "StrategyToy"})
    assert model is made.model
    assert made.prepare(model, optim_wrapper=SGD) == [model, made.optim_wrapper]
    again = made.prepare(model, param_scheduler=STEP, dispatch_kwargs={"max_iters": 4})
    assert again == [model, made.optim_wrapper, made.param_schedulers]


def test_a_second_model_is_refused(made: SingleDeviceStrategy) -> None:
    made.prepare(Regression())
    with pytest.raises(ValueError, match="has prepared another model"):
        made.prepare(Regression(), optim_wrapper=SGD)


def test_an_optimizer_of_another_model_is_refused(made: SingleDeviceStrategy) -> None:
    optimizer = torch.optim.SGD(Regression().parameters())
    with pytest.raises(ValueError, match="has none of the model's parameters"):
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
    made.prepare({"type": "StrategyToy"}, **arguments)
    made.dispatch_kwargs["max_iters"] = 1
    assert (arguments, constructor) == before


@pytest.mark.parametrize(
    # nn.Module.compile compiles what calls the forward and the hooks.
    ("target", "function"),
    [("forward", "_call_impl"), ("train_step", "train_step")],
)
def test_the_method_asked_for_is_compiled_each_time(
    made: SingleDeviceStrategy,
    target: str,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def fake(function: Any, *args: Any, **options: Any) -> Any:
        assert options == {"backend": "eager"}
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", fake)
    options = {"target": target, "backend": "eager"}
    for _ in range(2):
        made.compile_model(Regression(), options)
    assert compiled == [function] * 2


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(
    made: SingleDeviceStrategy,
) -> None:
    model = made.prepare(Regression(), compile={"backend": "eager"})
    x, y = batch(2, 0)
    before = model(x, y)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.last.weight)
    assert torch.equal(model(x, y), before)
    assert torch.equal(copied(x, y), copied.last.bias.expand(2, 1))
    assert list(model.state_dict()) == list(Regression().state_dict())


def graphs_and_losses(blocks: Any, again: Any) -> tuple[list[int], list[float]]:
    """How often each compiled graph has activations computed again; two steps' losses."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [str(node.target) for node in graph.graph.nodes]
        graphs.append(sum("checkpoint" in call for call in calls))
        return graph.forward

    torch._dynamo.reset()
    strategy = SingleDeviceStrategy(
        device="cpu", activation_checkpointing=again, env_kwargs={"seed": 3}
    )
    model, wrapper = strategy.prepare(
        make_model(), optim_wrapper=SGD, compile={"backend": backend, "blocks": blocks}
    )
    losses = []
    for inputs in batches(2):
        loss = model(inputs)["loss_lm"]
        wrapper.update_params(loss)
        losses.append(loss.item())
    return graphs, losses


# torch's compiler looks at it while it reads the inputs of a block.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("blocks", "graphs"), [((), [2]), (["Block"], [1])])
def test_what_is_computed_again_is_compiled_too(blocks: Any, graphs: Any) -> None:
    plain, losses = graphs_and_losses(blocks, ())
    assert set(plain) == {0}
    # One for the whole model, or one that serves each block.
    assert graphs_and_losses(blocks, ["Block"]) == (graphs, losses)


SCALING = {"enable": True, "base_batch_size": 4}
TWELVE = {"max_iters": 4, "train_micro_batch_size_per_gpu": 12}


def scaling(config: dict[str, Any] = SCALING) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device="cpu", auto_scale_lr=config)


def test_learning_rates_are_scaled_before_schedules_are_built() -> None:
    rules = {"custom_keys": {"last": {"lr_mult": 2.0}}}
    _, wrapper, (schedule,) = scaling().prepare(
        {"type": "StrategyToy"},
        optim_wrapper={**SGD, "paramwise_cfg": rules},
        param_scheduler={**STEP, "step_size": 1},
        dispatch_kwargs=TWELVE,
    )
    assert wrapper.get_lr()["lr"] == pytest.approx([0.3, 0.6])
    schedule.step()
    assert wrapper.get_lr()["lr"] == pytest.approx([0.15, 0.3])


@pytest.mark.parametrize(
    ("config", "known", "message"),
    [
        (SCALING, {}, r"base_batch_size=4, .*_gpu=None in dispatch_kwargs"),
        ({"enable": True}, TWELVE, "base_batch_size=None"),
    ],
)
def test_scaling_needs_both_sizes(config: Any, known: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaling(config).prepare(Regression(), optim_wrapper=SGD, dispatch_kwargs=known)


def test_rates_that_a_schedule_has_noted_already_are_not_scaled() -> None:
    model = Regression()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = StepLR(wrapper, step_size=1)
    with pytest.raises(RuntimeError, match="noted the learning rates before they were"):
        scaling().prepare(
            model,
            optim_wrapper=wrapper,
            param_scheduler=schedule,
            dispatch_kwargs=TWELVE,
        )
    assert wrapper.get_lr() == {"lr": [0.1]}


def test_several_optimizers_know_where_the_run_ends(made: SingleDeviceStrategy) -> None:
    accumulating = {**SGD, "accumulative_counts": 4}
    _, wrapper, schedules = made.prepare(
        {"type": "StrategyToy"},
        optim_wrapper={"first": accumulating, "last": accumulating},
        param_scheduler={"type": "LinearLR", "by_epoch": True},
        dispatch_kwargs={"max_iters": 6, "max_epochs": 7},
    )
    ends = {name: [s.end for s in each] for name, each in schedules.items()}
    assert ends == {"first": [7], "last": [7]}
    for member in wrapper.values():
        updated = []
        for _ in range(6):
            loss = torch.ones(1, requires_grad=True).sum()
            updated.append(member.update_params(loss))
        assert updated == [False, False, False, True, False, True]


def prepared(
    work_dir: Path, seed: int = 3, dropout: float = 0.5, **kwargs: Any
) -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(
        work_dir=work_dir, device="cpu", env_kwargs={"seed": seed}
    )
    arguments = {"optim_wrapper": SGD, "param_scheduler": STEP, **kwargs}
    strategy.prepare(
        {"type": "StrategyToy", "dropout": dropout},
        dispatch_kwargs={"max_iters": 9},
        **arguments,
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
    with pytest.raises(ValueError, match="there is no 'optimizer' in"):
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
