import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_toys import SGD, Regression, batch, train
from torch import nn

import hooktrain
import hooktrain.compat.mmengine  # has rules for parameters
from equality import assert_equal
from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, load_file
from hooktrain.engine import StepTrainer, hooks
from hooktrain.strategy import SingleDeviceStrategy
from hooktrain.utils.env import seed_step

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
        losses += train(strategy.model, strategy.optim_wrapper, range(step, step + 1))
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
    for name, value in first.model_state_dict().items():
        assert torch.equal(second.model_state_dict()[name], value)


def test_accumulations_go_on_where_they_were(tmp_path: Path) -> None:
    accumulating = {"optim_wrapper": {**SGD, "accumulative_counts": 4}}
    first = prepared(tmp_path, **accumulating)
    go(first, range(4))
    first.save_checkpoint(tmp_path / "a.pth")
    expected = go(first, range(4, 9))
    second = prepared(tmp_path, **accumulating)
    second.resume(tmp_path / "a.pth")
    assert go(second, range(4, 9)) == expected
    assert second.optim_wrapper.should_update()  # the last accumulation has one pass


def test_a_checkpoint_has_the_parts_and_what_is_added(tmp_path: Path) -> None:
    strategy = prepared(tmp_path)
    strategy.save_checkpoint(
        tmp_path / "new" / "a.pth",
        extra_ckpt={"message_hub": {}, "meta": {"epoch": 2, "seed": 0}},
    )
    saved = load_file(tmp_path / "new" / "a.pth")
    assert list(saved) == [
        "model",
        "optimizer",
        "param_schedulers",
        "message_hub",
        "meta",
    ]
    assert list(saved["model"]) == list(Regression().state_dict())
    assert saved["model"]._metadata == strategy.model.state_dict()._metadata
    assert saved["param_schedulers"] == [strategy.param_schedulers[0].state_dict()]
    assert saved["meta"]["epoch"] == 2
    assert saved["meta"]["seed"] == 3
    assert saved["meta"]["hooktrain"] == hooktrain.__version__
    assert len(saved["meta"]["time"]) == len("20251231_235959")
    strategy.save_checkpoint(
        tmp_path / "b.pth", save_optimizer=False, save_param_scheduler=False
    )
    assert list(load_file(tmp_path / "b.pth")) == ["model", "meta"]


def test_extra_entries_are_not_changed_and_replace_no_part(tmp_path: Path) -> None:
    extra = {"meta": {"iter": 1}, "more": [1]}
    before = json.dumps(extra)
    strategy = prepared(tmp_path)
    strategy.save_checkpoint(tmp_path / "a.pth", extra_ckpt=extra)
    assert json.dumps(extra) == before
    for part in ("model", "optimizer", "param_schedulers"):
        with pytest.raises(
            ValueError, match=rf"must not replace .* same name: {{'{part}'}}"
        ):
            strategy.save_checkpoint(tmp_path / "b.pth", extra_ckpt={part: 1})
    assert not (tmp_path / "b.pth").exists()


def test_a_checkpoint_is_not_saved_at_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"cannot write to 's3://bucket/a\.pth'"):
        prepared(tmp_path).save_checkpoint("s3://bucket/a.pth")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_optimizer_says_how_to_go_on(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    first.save_checkpoint(tmp_path / "a.pth", save_optimizer=False)
    nn.init.zeros_(first.model.last.weight)
    with pytest.raises(
        ValueError, match=r"no \['optimizer'\].*give resume_optimizer=False"
    ):
        first.resume(tmp_path / "a.pth")
    assert not first.model.last.weight.any()
    first.resume(tmp_path / "a.pth", resume_optimizer=False)
    assert first.model.last.weight.all()
    first.save_checkpoint(tmp_path / "b.pth", save_param_scheduler=False)
    with pytest.raises(
        ValueError, match=r"no \['param_schedulers'\].*param_scheduler=False"
    ):
        first.resume(tmp_path / "b.pth")
    first.resume(tmp_path / "b.pth", resume_param_scheduler=False)


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
    strategy = SingleDeviceStrategy(work_dir=tmp_path, device="cpu")
    strategy.prepare(Regression())
    rest = strategy.load_or_resume(resume=True)
    assert rest is not None
    assert list(rest) == ["optimizer", "param_schedulers", "meta"]


def test_other_schedulers_than_those_saved_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path).save_checkpoint(tmp_path / "a.pth")
    second = prepared(tmp_path, param_scheduler=[STEP, STEP])
    with pytest.raises(
        ValueError, match=r"so many schedulers: {'': 1}, and this run: {'': 2}"
    ):
        second.resume(tmp_path / "a.pth")
    third = prepared(tmp_path, optim_wrapper={"first": SGD, "last": SGD})
    with pytest.raises(ValueError, match=r"this run: {'first': 1, 'last': 1}"):
        third.load_scheduler_state_dict([])


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


class Recording(SingleDeviceStrategy):
    """Records what it would load."""

    def resume(self, filename: Any, **kwargs: Any) -> Any:
        return {"resume": filename}

    def load_checkpoint(self, filename: Any, **kwargs: Any) -> Any:
        return {"load": filename}


def test_loading_or_resuming_follows_the_table(tmp_path: Path) -> None:
    strategy = Recording(work_dir=tmp_path, device="cpu")
    strategy.prepare(Regression())
    table: list[tuple[Any, Any, Any]] = [
        (False, None, None),
        (False, "a", {"load": "a"}),
        (True, "a", {"resume": "a"}),
        ("b", None, {"resume": "b"}),
        ("b", "a", {"resume": "b"}),
        (Path("b"), "a", {"resume": Path("b")}),
    ]
    for resume, load_from, expected in table:
        assert strategy.load_or_resume(resume=resume, load_from=load_from) == expected


def test_with_nothing_to_resume_from_a_run_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert prepared(tmp_path).load_or_resume(resume=True) is None
    assert (
        f"No checkpoint in {tmp_path} to resume from: a new run begins" in caplog.text
    )


def test_a_broken_checkpoint_and_one_that_is_not_to_be_resumed_from_are_passed_over(
    tmp_path: Path,
) -> None:
    strategy = prepared(tmp_path)
    strategy.save_checkpoint(tmp_path / "iter_0000001.pth")
    strategy.save_checkpoint(tmp_path / "iter_0000002.pth")
    strategy.save_checkpoint(tmp_path / "best.pth", tag=False)
    assert (tmp_path / "last_checkpoint").read_text() == "iter_0000002.pth"
    (tmp_path / "iter_0000002.pth").write_bytes(b"broken")
    with pytest.raises(CorruptCheckpointError):
        strategy.resume(tmp_path / "iter_0000002.pth")
    assert strategy.load_or_resume(resume=True) is not None


def test_callbacks_see_the_content_and_may_change_it(tmp_path: Path) -> None:
    strategy = prepared(tmp_path)
    strategy.save_checkpoint(
        tmp_path / "a.pth", callback=lambda state: state.pop("optimizer")
    )

    def zero(state: dict[str, Any]) -> None:
        assert list(state) == ["model", "param_schedulers", "meta"]
        state["model"]["last.bias"].zero_()

    strategy.load_checkpoint(tmp_path / "a.pth", callback=zero)
    assert strategy.model.last.bias.item() == 0

    def add(state: dict[str, Any]) -> None:
        state["optimizer"] = strategy.optim_state_dict()

    strategy.resume(tmp_path / "a.pth", callback=add)
    assert strategy.model.last.bias.item() != 0


def test_names_are_revised_and_differences_refused_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    first, second = prepared(tmp_path), prepared(tmp_path)
    state = {f"old.{name}": value for name, value in first.model_state_dict().items()}
    torch.save({"model": state}, tmp_path / "a.pth")
    options: dict[str, Any] = {"strict": True, "revise_keys": [(r"^old\.", "")]}
    nn.init.zeros_(second.model.last.weight)
    second.load_checkpoint(tmp_path / "a.pth", **options)
    assert torch.equal(second.model.last.weight, first.model.last.weight)
    second.load_model_state_dict(state, **options)
    with pytest.raises(RuntimeError, match="nothing was loaded, with strict=True"):
        second.load_model_state_dict(state, strict=True)


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


RULES = {
    "norm_decay_mult": 0.0,
    "bias_decay_mult": 0.0,
    "custom_keys": {"last": {"lr_mult": 0.1}},
}
ADAMW = {
    "optimizer": {"type": "AdamW", "lr": 0.1, "weight_decay": 0.5},
    "paramwise_cfg": RULES,
}


def by_epochs(work_dir: Path) -> tuple[SingleDeviceStrategy, StepTrainer, hooks.EMA]:
    """A run with rules for parameters, a schedule in epochs of two iterations, and an average."""
    torch.manual_seed(7)
    schedule = {"type": "MultiStepLR", "milestones": [1, 3], "gamma": 0.5}
    strategy = prepared(
        work_dir, dropout=0.0, optim_wrapper=ADAMW, param_scheduler=schedule
    )
    ema = hooks.EMA(strategy.model, decay=0.5, warmup=False)
    trainer = StepTrainer(
        strategy.model, [batch(8, 0), batch(8, 1)], strategy.optim_wrapper
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


@pytest.mark.parametrize("by_strategy", [True, False])
def test_a_run_of_mmengine_with_rules_epochs_and_an_average_goes_on_bit_for_bit(
    tmp_path: Path, by_strategy: bool
) -> None:
    path = tmp_path / "epoch_2.pth"
    whole, trainer, average = by_epochs(tmp_path)
    trainer.train(max_iter=4)
    torch.save(as_mmengine_has_it(whole, average), path)
    strategy, resumed, ema = by_epochs(tmp_path)
    checkpointer = Checkpointer(strategy.model, trainer=resumed)
    checkpointer.load(path, checkpointables=[])
    assert_equal(strategy.model.state_dict(), average.average.module.state_dict())
    if by_strategy:
        strategy.resume(path)
    else:
        checkpointer.load(path)
    for each in (trainer, resumed):
        each.train(max_iter=8)
    assert resumed.start_iter == 4
    assert_equal(strategy.model_state_dict(), whole.model_state_dict())
    assert_equal(ema.state_dict(), average.state_dict())
    assert strategy.optim_wrapper.get_lr() == whole.optim_wrapper.get_lr()


def test_the_weights_of_a_checkpointer_load(tmp_path: Path) -> None:
    model = Regression()
    Checkpointer(model, tmp_path).save("model_final", iteration=9)
    strategy = prepared(tmp_path / "other")
    assert strategy.load_checkpoint(tmp_path / "model_final.pth") == {"iteration": 9}
    assert torch.equal(strategy.model_state_dict()["last.weight"], model.last.weight)
    with pytest.raises(ValueError, match=r"has no \['optimizer', 'param"):
        strategy.resume(tmp_path / "model_final.pth")
