"""The hook that steps MMEngine's schedulers, alone and together with others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ExponentialLR as TorchExponentialLR,
    ReduceLROnPlateau,
    StepLR as TorchStepLR,
)

from hooktrain.checkpoint import Checkpointer
from hooktrain.compat import mmengine as compat
from hooktrain.compat.mmengine import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    StepLR,
    build_param_scheduler,
)
from hooktrain.engine import SimpleTrainer, StepTrainer
from hooktrain.engine.hooks import CallbackHook, PeriodicCheckpointer
from hooktrain.solver import LinearParamScheduler, OptimWrapper, OptimWrapperDict
from processes import run_program
from scheduler_toys import theirs
from toys import LinearLoss, Two, linear_trainer, sgd

ReduceOnPlateauLR = theirs.ReduceOnPlateauLR


def recorded(trainer: Any, name: str = "lr") -> list[float]:
    return [value for value, _ in trainer.storage.history(name).values()]


def test_epochs_and_iterations_of_all_kinds_go_together() -> None:
    trainer = linear_trainer(lr=8.0)
    optimizer = trainer.optimizer
    schedulers = [TorchStepLR(optimizer, 1, gamma=0.5), StepLR(optimizer, 2, gamma=0.5)]
    trainer.epoch_length = 2
    trainer.register_hooks([LRScheduler(scheduler=schedulers, by_epoch=True)])
    trainer.train(0, 6)
    assert recorded(trainer) == [8.0, 8.0, 4.0, 4.0, 1.0, 1.0]


def measure(values: dict[int, float], name: str = "val") -> CallbackHook:
    return CallbackHook(
        after_step=lambda t: (
            t.iter in values and t.after_evaluation({name: values[t.iter]})
        ),
        phase="evaluate",
    )


def test_plateaus_step_after_each_new_value_of_their_metric() -> None:
    trainer = linear_trainer(measure({1: 1.0, 3: 1.0, 5: 1.0}), lr=1.0)
    schedulers = [
        ReduceLROnPlateau(trainer.optimizer, factor=0.25, patience=0),
        ReduceOnPlateauLR(trainer.optimizer, "val", factor=0.5, patience=1),
    ]
    trainer.epoch_length = 1
    trainer.register_hooks([LRScheduler(scheduler=schedulers, metric="val")])
    trainer.train(0, 8)
    assert recorded(trainer) == [1.0] * 4 + [0.25] * 2 + [0.25 * 0.5 * 0.25] * 2


def test_plateaus_without_an_evaluation_say_what_they_wait_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer()
    schedulers = [
        ReduceLROnPlateau(trainer.optimizer),
        ReduceOnPlateauLR(trainer.optimizer, "acc", rule="greater"),
    ]
    trainer.epoch_length = 1
    trainer.register_hooks([LRScheduler(scheduler=schedulers, metric="val_loss")])
    with caplog.at_level("INFO", "hooktrain"):
        trainer.train(0, 2)
    for metric in ("val_loss", "acc"):
        said = f"LRScheduler waits for trainer.after_evaluation({{{metric!r}: ...}})"
        assert said in caplog.text


def test_a_plateau_with_a_range_counts_epochs() -> None:
    trainer = linear_trainer(measure(dict.fromkeys(range(8), 1.0)), lr=1.0)
    scheduler = ReduceOnPlateauLR(
        trainer.optimizer, "val", factor=0.5, patience=0, begin=2, end=3
    )
    trainer.epoch_length = 2
    trainer.register_hooks([LRScheduler(scheduler=scheduler)])
    trainer.train(0, 8)
    # Epoch 2 begins after iteration 3, whose value is the first to count.
    assert recorded(trainer) == [1.0] * 5 + [0.5] * 3


def test_several_optimizers_have_schedulers_by_name() -> None:
    model = Two()
    one = OptimWrapper(sgd(model.one, lr=0.5))
    wrappers = OptimWrapperDict(one=one, two=OptimWrapper(sgd(model.two, lr=2.0)))
    trainer = StepTrainer(model, [torch.zeros(2, 4)], wrappers)
    warm_up = [
        LinearLR(one, 0.25, by_epoch=False, end=4),
        StepLR(one, 2, gamma=0.5, by_epoch=False, begin=4),
    ]
    schedulers = {"one": warm_up, "two": LinearParamScheduler(1.0, 0.0)}
    trainer.register_hooks([LRScheduler(scheduler=schedulers)])
    trainer.train(0, 8)
    warming = [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert recorded(trainer, "one.lr") == warming
    assert recorded(trainer, "two.lr") == [2.0 * (1 - k / 8) for k in range(8)]


def all_kinds(trainer: Any) -> list[Any]:
    optimizer = trainer.optimizer
    return [
        TorchExponentialLR(optimizer, 0.9),
        LinearLR(optimizer, 0.0, by_epoch=False, end=4),
        CosineAnnealingLR(optimizer, T_max=7, eta_min=0.01),
        ReduceOnPlateauLR(optimizer, "val", factor=0.5, patience=1),
    ]


def make() -> Any:
    trainer = linear_trainer(measure(dict.fromkeys(range(0, 20, 2), 1.0)), lr=0.5)
    trainer.epoch_length = 3
    trainer.register_hooks([LRScheduler(scheduler=all_kinds(trainer))])
    return trainer


@pytest.mark.parametrize("at", [1, 5, 6, 13])
def test_a_list_of_all_kinds_goes_on_bit_for_bit(at: int) -> None:
    whole, first, second = make(), make(), make()
    whole.train(0, 20)
    first.train(0, at)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=20)
    assert recorded(second)[-(20 - at) :] == recorded(whole)[at:]


def test_without_the_state_of_the_hooks_a_schedule_begins_anew() -> None:
    def make() -> Any:
        trainer = linear_trainer(lr=8.0)
        optimizer = trainer.optimizer
        schedule = StepLR(optimizer, 2, 0.5, by_epoch=False)
        trainer.register_hooks([LRScheduler(scheduler=schedule)])
        return trainer

    first, second = make(), make()
    first.train(0, 4)
    second.load_state_dict({"optimizer": first.state_dict()["optimizer"]})
    second.train(max_iter=4)
    assert recorded(second) == recorded(first)


def warmed_up(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        LinearLR(optimizer, start_factor=0.25, by_epoch=False, end=3),
        CosineAnnealingLR(optimizer, by_epoch=False, begin=3, end=12, eta_min=0.125),
        MultiStepLR(optimizer, milestones=[8], by_epoch=False),
    ]


def make_of_groups(split: bool) -> SimpleTrainer:
    model = LinearLoss()
    named = {"weight": model.fc.weight, "bias": model.fc.bias}
    names = [["weight"], ["bias"]] if split else [["weight", "bias"]]
    groups = [{"params": [named[n] for n in group]} for group in names]
    optimizer = torch.optim.SGD(groups, lr=8.0)
    trainer = SimpleTrainer(model, [torch.zeros(1, 4)], optimizer)
    trainer.register_hooks([LRScheduler(scheduler=warmed_up(optimizer))])
    return trainer


@pytest.mark.parametrize("split_first", [True, False])
@pytest.mark.parametrize("stop", [2, 6, 9])
def test_the_rates_go_on_when_a_group_is_split_or_two_are_merged(
    split_first: bool, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_of_groups(split_first)
    whole.train(0, 12)
    first = make_of_groups(split_first)
    stop_there = CallbackHook(before_step=lambda t: 1 // (t.iter != stop))
    first.register_hooks([stop_there])
    with pytest.raises(ZeroDivisionError):
        first.train(0, 12)
    second = make_of_groups(not split_first)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=12)
    rates = recorded(second)[-(12 - stop) :]
    assert rates == pytest.approx(recorded(whole)[stop:], rel=1e-12)
    assert "groups" in caplog.text


ONLY_THEIRS: dict[str, dict[str, Any]] = {
    "OneCycleLR": {"eta_max": 0.5, "total_steps": 20, "by_epoch": False},
    "CosineRestartLR": {
        "periods": [6, 14],
        "restart_weights": [1, 0.5],
        "eta_min": 0.01,
        "by_epoch": False,
    },
    "CosineRestartMomentum": {
        "periods": [6, 14],
        "restart_weights": [1, 0.5],
        "eta_min_ratio": 0.1,
        "by_epoch": False,
    },
    "ReduceOnPlateauLR": {"monitor": "val", "factor": 0.5, "patience": 1},
    "ReduceOnPlateauMomentum": {"monitor": "val", "factor": 0.5, "patience": 1},
}


def with_scheduler_of_mmengine(name: str, how: str, folder: Path) -> Any:
    trainer = linear_trainer(measure(dict.fromkeys(range(0, 20, 2), 1.0)), lr=0.5)
    trainer.epoch_length = 3
    options = ONLY_THEIRS[name]
    wrapper = compat.OptimWrapper(trainer.optimizer)
    scheduler = {
        "by type": lambda: build_param_scheduler({"type": name, **options}, wrapper),
        "with a wrapper": lambda: getattr(compat, name)(wrapper, **options),
        "without the recipe": lambda: getattr(theirs, name)(
            trainer.optimizer, **options
        ),
    }[how]()
    checkpointer = Checkpointer(trainer.model, folder, trainer=trainer)
    trainer.register_hooks(
        [LRScheduler(scheduler=scheduler), PeriodicCheckpointer(checkpointer, 7)]
    )
    return trainer, checkpointer


def group(trainer: Any) -> Any:
    return trainer.optimizer.param_groups[0]


@pytest.mark.parametrize("how", ["by type", "with a wrapper", "without the recipe"])
@pytest.mark.parametrize("name", ONLY_THEIRS)
def test_schedulers_that_only_mmengine_has_are_saved_and_go_on_bit_for_bit(
    name: str, how: str, tmp_path: Path
) -> None:
    key = "momentum" if "Momentum" in name else "lr"
    whole, _ = with_scheduler_of_mmengine(name, how, tmp_path / "whole")
    values = []
    whole.register_hooks(
        [CallbackHook(after_step=lambda t: values.append(group(t)[key]))]
    )
    whole.train(0, 20)
    assert len(set(values)) > 2
    second, checkpointer = with_scheduler_of_mmengine(name, how, tmp_path / "second")
    checkpointer.load(tmp_path / "whole" / "model_0000006.pth")
    rest = []
    second.register_hooks(
        [CallbackHook(after_step=lambda t: rest.append(group(t)[key]))]
    )
    second.train(max_iter=20)
    assert rest == values[7:]


@pytest.mark.parametrize("name", ["OneCycleLR", "CosineRestartLR"])
def test_schedulers_that_only_mmengine_has_give_its_values(
    name: str, tmp_path: Path
) -> None:
    trainer, _ = with_scheduler_of_mmengine(name, "with a wrapper", tmp_path)
    trainer.train(0, 20)
    optimizer = sgd(Two().one, lr=0.5)
    scheduler = getattr(theirs, name)(optimizer, **ONLY_THEIRS[name])
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert recorded(trainer) == expected


PLATEAU = """
import sys
import warnings

warnings.simplefilter("ignore")
sys.modules["torchvision"] = sys.modules["transformers"] = None
import torch
from mmengine.evaluator import BaseMetric as TheirMetric
from mmengine.hooks import Hook as TheirHook
from mmengine.model import BaseModel as TheirModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from hooktrain.compat import mmengine as ours
from hooktrain.engine.hooks import EvalHook

VALUES = [0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.6]
data = DataLoader([(torch.ones(1), torch.ones(1))] * 4, batch_size=2)
schedules = [
    dict(type="ReduceOnPlateauLR", monitor="acc", rule="greater", factor=0.5, patience=1),
    dict(type="StepLR", step_size=2, gamma=0.25),
]


def model_of(base):
    class Model(base):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(1, 1)

        def forward(self, img, label, mode="tensor"):
            feat = self.linear(img)
            if mode != "loss":
                return feat
            # A metric of the training that has the name of the result.
            return {"loss": (feat - label).square(), "acc": torch.tensor(9.0)}

    return Model()


def noting(library_hook, rates):
    class Noting(library_hook):
        def after_train_iter(self, runner, *args, **kwargs):
            rates.append(runner.optim_wrapper.get_lr()["lr"][0])

    return Noting()


class Metric(TheirMetric):
    values = iter(VALUES)

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return {"acc": next(self.values)}


theirs = []
runner = Runner(
    model=model_of(TheirModel),
    work_dir="work_dir",
    train_dataloader=data,
    val_dataloader=data,
    val_evaluator=[Metric()],
    val_cfg={},
    train_cfg=dict(by_epoch=True, max_epochs=len(VALUES)),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    param_scheduler=[dict(each) for each in schedules],
    custom_hooks=[noting(TheirHook, theirs)],
)
runner.train()

rates, values = [], iter(VALUES)
model = model_of(ours.BaseModel)
wrapper = ours.build_optim_wrapper(model, dict(optimizer=dict(type="SGD", lr=0.1)))
trainer = ours.StepTrainer(model, data, wrapper)
known = dict(max_epochs=len(VALUES), epoch_length=len(data))
built = ours.build_param_scheduler(schedules, wrapper, known)
trainer.register_hooks(
    [
        noting(ours.Hook, rates),
        ours.LRScheduler(scheduler=built),
        EvalHook("1 epoch", lambda: {"acc": next(values)}),
    ]
)
trainer.train(max_epochs=len(VALUES))
assert rates == theirs, (rates, theirs)
assert len(set(rates)) == 5, rates
for mine, other in zip(model.parameters(), runner.model.parameters(), strict=True):
    assert torch.equal(mine, other)
"""


def test_a_plateau_reduces_where_it_does_in_mmengine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLATEAU)
    done = run_program(script, folder=tmp_path)
    assert done.returncode == 0, done.stdout


# What is refused


@pytest.mark.parametrize(
    "make", [lambda o: StepLR(o, 2), lambda o: ReduceOnPlateauLR(o, begin=2)]
)
def test_epochs_without_a_length_are_refused_before_the_first_step(make: Any) -> None:
    trainer = linear_trainer()
    trainer.data_loader = (batch for batch in ())  # no length
    trainer.register_hooks([LRScheduler(scheduler=make(trainer.optimizer))])
    with pytest.raises(ValueError, match=r"counts epochs, .*set trainer.epoch_length"):
        trainer.train(0, 1)
    assert "total_loss" not in trainer.storage.histories()


def test_a_scheduler_of_an_optimizer_that_was_replaced_is_refused() -> None:
    trainer = linear_trainer()
    trainer.register_hooks([LRScheduler(scheduler=StepLR(trainer.optimizer, 2))])
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=4.0)
    with pytest.raises(ValueError, match="another optimizer"):
        trainer.train(0, 2)


def test_a_rate_with_a_multiplier_and_another_schedule_is_refused() -> None:
    trainer = linear_trainer()
    schedules = [LinearParamScheduler(1.0, 0.0), StepLR(trainer.optimizer, 2)]
    trainer.epoch_length = 2
    trainer.register_hooks([LRScheduler(scheduler=schedules)])
    with pytest.raises(
        ValueError, match="a multiplier must be the only schedule of lr"
    ):
        trainer.train(0, 2)
