"""Checkpoints of MMEngine and of strategies become a trainer's, and back."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equality import assert_equal
from hooktrain.checkpoint import Checkpointer, load_file
from hooktrain.compat import mmengine
from hooktrain.compat.mmengine import SingleDeviceStrategy, StepTrainer, hooks
from mmengine_toys import Net


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


class Run:
    """With rules for parameters, a schedule in epochs of two iterations, and an average."""

    def __init__(self, work_dir: Path) -> None:
        torch.manual_seed(7)
        self.strategy = SingleDeviceStrategy(
            work_dir=work_dir, device="cpu", env_kwargs={"seed": 3}
        )
        rules = {"bias_decay_mult": 0.0, "custom_keys": {"parts.1": {"lr_mult": 0.1}}}
        optimizer = {"type": "AdamW", "lr": 0.1, "weight_decay": 0.5}
        model, wrapper, schedulers = self.strategy.prepare(
            Net(),
            optim_wrapper={"optimizer": optimizer, "paramwise_cfg": rules},
            param_scheduler={"type": "MultiStepLR", "milestones": [1, 3], "gamma": 0.5},
        )
        self.ema = hooks.EMA(model, decay=0.5, warmup=False)
        data = [(part,) for part in torch.randn(2, 4, 2)]
        self.trainer = StepTrainer(model, data, wrapper)
        schedules = mmengine.LRScheduler(scheduler=schedulers)
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
    torch.save(mmengine.to_mmengine(saved, ema=False), path)
    other = Run(tmp_path)
    rest = other.strategy.resume(path)
    assert rest is not None
    assert rest["meta"]["iter"] == 4
    assert_same(other, whole)


def test_a_checkpoint_is_the_same_after_a_conversion_there_and_back(
    tmp_path: Path, whole: Run
) -> None:
    whole.checkpointer.save("model_0000003", iteration=3)
    saved = load_file(tmp_path / "model_0000003.pth")
    back = mmengine.from_mmengine(mmengine.to_mmengine(saved))
    assert_equal(back["model"], dict(saved["model"]))
    assert back["iteration"] == 3
    for part in ("optimizer", "seed"):
        assert_equal(back["trainer"][part], saved["trainer"][part])
    hooks, expected = back["trainer"]["hooks"], saved["trainer"]["hooks"]
    assert_equal(hooks["EMA"], dict(expected["EMA"]))
    assert_equal(
        hooks["LRScheduler"]["schedulers"], expected["LRScheduler"]["schedulers"]
    )
    assert mmengine.to_mmengine(saved, 2)["meta"] == {"iter": 4, "epoch": 2, "seed": 3}


def test_what_a_strategy_saves_becomes_mmengines(tmp_path: Path, whole: Run) -> None:
    whole.strategy.save_checkpoint(tmp_path / "x.pth", extra_ckpt={"meta": {"iter": 4}})
    converted = mmengine.to_mmengine(load_file(tmp_path / "x.pth"))
    theirs = whole.as_mmengine_has_it()
    assert_equal(converted["state_dict"], dict(whole.strategy.model_state_dict()))
    rates = {
        name: group["lr"]
        for group in converted["optimizer"]["param_groups"]
        for name in group["params"]
    }
    expected = [group["lr"] for group in theirs["optimizer"]["param_groups"]]
    assert [rates[name] for name in theirs["state_dict"]] == expected
    (ours,), (scheduler,) = converted["param_schedulers"], theirs["param_schedulers"]
    assert ours["_last_value"] == pytest.approx([0.05, 0.05, 0.005])
    assert ours["last_step"] == scheduler["last_step"]
