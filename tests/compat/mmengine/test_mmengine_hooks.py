"""Hooks for MMEngine, and what they know of a run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hooktrain.checkpoint import Checkpointer
from hooktrain.compat import mmengine
from hooktrain.compat.mmengine import (
    EpochBasedTrainLoop,
    Hook,
    MessageHub,
    ParamSchedulerHook,
    StepTrainer,
)
from hooktrain.engine import HookBase
from hooktrain.engine.hooks import (
    EMA,
    CallbackHook,
    EvalHook,
    IterationTimer,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hooktrain.evaluation import inference_on_dataset
from hooktrain.events import EventStorage
from mmengine_toys import Net, sgd
from processes import run_program

Priority = mmengine.Priority


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


class Told(Hook):
    """Notes where the run is at each of its events."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, event: str, runner: Any, *more: Any) -> None:
        self.seen.append((event, runner.epoch, runner.iter, *more))

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        self.note("iter", runner)

    def after_train_epoch(self, runner: Any) -> None:
        self.note("epoch", runner)

    def before_val(self, runner: Any) -> None:
        self.note("before", runner)

    def before_val_epoch(self, runner: Any) -> None:
        self.note("before epoch", runner)

    def after_val_epoch(
        self, runner: Any, metrics: dict[str, float] | None = None
    ) -> None:
        self.note("after epoch", runner, metrics)

    def after_val(self, runner: Any) -> None:
        self.note("after", runner)

    def after_train(self, runner: Any) -> None:
        self.note("end", runner)


def trained(
    *hooks: HookBase, max_iter: int = 2, folder: Path | None = None
) -> StepTrainer:
    model = Net()
    trainer = StepTrainer(model, [[torch.ones(3, 2)], [torch.ones(4, 2)]], sgd(model))
    trainer.register_hooks(hooks)
    if folder is not None:
        checkpointer = Checkpointer(model, folder, trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2)])
        checkpointer.resume_or_load("")
    trainer.train(max_iter=max_iter)
    return trainer


@pytest.mark.parametrize("after_train", [False, True])
def test_a_validation_comes_with_its_events_where_mmengine_has_them(
    after_train: bool,
) -> None:
    hook = Told()
    validation = EvalHook("1 epoch", lambda: {"acc": 0.5}, after_train)
    trainer = trained(hook, validation)
    # As MMEngine's Runner calls them: an epoch and its last iteration are over by then.
    assert hook.seen == [
        ("iter", 0, 0),
        ("iter", 0, 1),
        ("epoch", 0, 2),
        ("before", 1, 2),
        ("before epoch", 1, 2),
        ("after epoch", 1, 2, {"acc": 0.5}),
        ("after", 1, 2),
        ("end", 1, 2),
    ]
    trainer.train(max_iter=4)
    assert [event for event, *_ in hook.seen].count("before") == 2


def test_events_that_nothing_calls_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Showing(Noting):
        def after_val_iter(self, *_: Any, **__: Any) -> None:
            raise AssertionError

        def after_test_epoch(self, *_: Any, **__: Any) -> None:
            raise AssertionError

    hook = Showing()
    trained(hook, EvalHook(1, lambda: {"acc": 0.5}))
    assert "end of epoch" in hook.seen
    (record,) = [
        each for each in caplog.records if "may never be called" in each.message
    ]
    assert "['after_test_epoch', 'after_val_iter'] of" in record.message
    assert "Showing" in record.message


class OfAllModes(Hook):
    """Notes the events of all modes, as MMEngine's hooks to draw and to measure have them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self.seen.append(("before epoch", mode, runner.iter))

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        self.seen.append(("after epoch", mode, runner.iter))

    def _before_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train"
    ) -> None:
        self.seen.append(("before", mode, batch_idx))

    def _after_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        (images,) = data_batch
        self.seen.append(("after", mode, runner.iter, batch_idx, len(images)))
        if mode == "val":
            assert torch.equal(outputs, images + 1)


def test_an_event_calls_the_one_of_all_modes_also_for_the_batches_of_a_validation() -> (
    None
):
    hook = OfAllModes()
    data = [[torch.ones(5)], [torch.ones(1)]]

    def validate() -> dict[str, Any]:
        return inference_on_dataset(lambda batch: batch[0] + 1, data, [hook])

    trained(hook, EvalHook("1 epoch", validate))
    # As MMEngine's Runner calls them, but for "before" in a validation.
    assert hook.seen == [
        ("before epoch", "train", 0),
        ("before", "train", 0),
        ("after", "train", 0, 0, 3),
        ("before", "train", 1),
        ("after", "train", 1, 1, 4),
        ("after epoch", "train", 2),
        ("before epoch", "val", 2),
        ("after", "val", 2, 0, 5),
        ("after", "val", 2, 1, 1),
        ("after epoch", "val", 2),
    ]


class Asking(Hook):
    def before_train(self, runner: Any) -> None:
        runner.mine = 1

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        self.answers = {
            "work_dir": runner.work_dir,
            "log_dir": runner.log_dir,
            "private": (runner._iter, runner._train_loop._epoch, runner._work_dir),
            "max_epochs": runner.max_epochs,
            "max_iters": runner.max_iters,
            "world_size": runner.world_size,
            "rank": runner.rank,
            "loader": len(runner.train_loop.dataloader),
            "val": runner.val_dataloader,
            "hub": runner.message_hub.get_info("iter"),
            "wrapped": runner.distributed,
            "rate": runner.optim_wrapper.get_lr()["lr"],
            "hooks": len(runner.hooks),
            "mine": runner.mine,
        }
        with pytest.raises(
            AttributeError, match=r"no runner\.cfg here; .* trainer\.cfg"
        ):
            runner.cfg  # noqa: B018
        runner.logger.info("asked")
        assert isinstance(runner.train_loop, EpochBasedTrainLoop)
        runner.train_loop.stop_training = True


def test_a_hook_finds_what_it_asks_a_runner_for(tmp_path: Path) -> None:
    hook = Asking()
    trainer = trained(hook, max_iter=5, folder=tmp_path)
    assert hook.answers == {
        "work_dir": str(tmp_path),
        "log_dir": str(tmp_path),
        "private": (0, 0, str(tmp_path)),
        "max_epochs": 3,
        "max_iters": 5,
        "world_size": 1,
        "rank": 0,
        "loader": 2,
        "val": None,
        "hub": 0,
        "wrapped": False,
        "rate": [0.1],
        "hooks": 2,
        "mine": 1,
    }
    assert (trainer.iter, trainer.stop_reason) == (1, "a hook has set stop_training")


def test_without_a_checkpointer_there_is_no_work_dir() -> None:
    with pytest.raises(
        AttributeError, match="no hook of the trainer has a checkpointer"
    ):
        trained(Asking())


NAMES = ("iter", "epoch", "max_iters", "max_epochs")


class Telling(Hook):
    count = 0

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        hub = MessageHub.get_current_instance()
        assert MessageHub.get_instance("another") is hub
        known = [hub.get_info(name) for name in NAMES]
        assert known == [getattr(runner, name) for name in NAMES]
        self.count = hub.get_info("count", 0) + 1
        hub.update_info("count", self.count)
        hub.update_info("object", self, resumed=False)
        assert hub.get_info("object") is self
        hub.update_scalars({"train/a": runner.iter})
        hub.update_scalar("b", 6, count=2)
        with pytest.raises(TypeError, match="cannot save mine of type"):
            hub.update_info("mine", object())


def test_what_a_hub_is_told_in_a_run_is_saved_with_it(tmp_path: Path) -> None:
    trained(Telling(), max_iter=2, folder=tmp_path)
    resumed = Telling()
    trainer = trained(resumed, max_iter=4, folder=tmp_path)
    assert trainer.start_iter == 2
    assert resumed.count == 4
    values = [value for value, _ in trainer.storage.history("a").values()]
    assert values == [0, 1, 2, 3]
    assert trainer.storage.latest()["b"] == (3, 3)


def test_a_hub_knows_the_remaining_time_that_the_printer_has_told() -> None:
    etas = []
    with EventStorage() as storage:
        hub = MessageHub.get_current_instance()
        etas.append(hub.get_info("eta"))
        storage.put_scalar("eta_seconds", 2.5, smoothing_hint=False)
        etas.append(hub.get_info("eta"))
    assert etas == [None, 2.5]


def test_outside_of_a_run_a_hub_knows_what_it_was_told_there() -> None:
    hub = MessageHub.get_current_instance()
    assert hub.get_info("iter") is None
    hub.update_info("told before", 1)
    assert hub.get_info("told before") == 1
    assert hub.get_info("never told", 2) == 2


def test_a_hub_gives_metrics_in_mmengines_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # MMEngine looks for it
    hub = MessageHub.get_current_instance()
    with EventStorage() as storage:
        for value in (1.0, 2.0, 6.0):
            storage.put_scalar("loss", torch.tensor(value))
        loss = hub.get_scalar("train/loss")
        assert (loss.current(), loss.mean(), loss.mean(2)) == (6, 3, 4)
        with pytest.raises(KeyError, match="'val/loss'"):
            hub.get_scalar("val/loss")


class Halving(ParamSchedulerHook):
    def before_train_epoch(self, runner: Any) -> None:
        for group in runner.optim_wrapper.optimizer.param_groups:
            group["lr"] /= 2


def test_a_schedule_of_ones_own_derives_from_mmengines_hook() -> None:
    trainer = trained(Halving(), max_iter=4)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.025
    with pytest.raises(TypeError, match="use LRScheduler"):
        trained(ParamSchedulerHook())


class Placed(Hook):
    def __init__(self, priority: Any) -> None:
        self.priority = priority


@pytest.mark.parametrize("first", [True, False])
def test_a_priority_is_a_place_among_all_hooks(first: bool, tmp_path: Path) -> None:
    trainer = StepTrainer(Net(), [[torch.ones(3, 2)]], sgd(Net()))
    saver = PeriodicCheckpointer(Checkpointer(trainer.model, tmp_path), 2)
    others = [
        IterationTimer(),
        EMA(trainer.model),
        EvalHook(1, dict),
        PeriodicWriter([]),
        saver,
    ]
    own = [Placed(each) for each in ("LOWEST", "NORMAL", 40, "very_low", Priority.LOW)]
    for group in (own, others) if first else (others, own):
        trainer.register_hooks(group)
    order = [getattr(hook, "priority", type(hook).__name__) for hook in trainer.hooks]
    assert order == [
        "IterationTimer",
        40,
        "EMA",
        "NORMAL",
        Priority.LOW,
        "EvalHook",
        "PeriodicWriter",
        "PeriodicCheckpointer",
        "very_low",
        "LOWEST",
    ]


def test_a_hook_of_very_low_priority_finds_the_checkpoint_of_the_iteration(
    tmp_path: Path,
) -> None:
    found = []

    class Uploading(Hook):
        priority = "VERY_LOW"

        def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
            found.append(sorted(path.name for path in tmp_path.glob("*.pth")))

    trained(Uploading(), max_iter=2, folder=tmp_path)
    assert found == [[], ["model_final.pth"]]


@pytest.mark.parametrize("priority", ["HIGHER", None, 1.5])
def test_an_unknown_priority_is_refused_when_the_hook_is_registered(
    priority: Any,
) -> None:
    with pytest.raises(ValueError, match=f"Placed.*'VERY_LOW'.*not {priority!r}"):
        trained(Placed(priority))


def test_a_validation_of_ones_own_reaches_the_hooks() -> None:
    hook = Told()
    validate = CallbackHook(after_step=lambda t: t.after_evaluation({"acc": t.iter}))
    trained(hook, validate)
    assert [each for each in hook.seen if each[0] == "after epoch"] == [
        ("after epoch", 0, 1, {"acc": 0.0}),
        ("after epoch", 1, 2, {"acc": 1.0}),
    ]


ORDER = """
import logging
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

EVENTS = "run train train_epoch train_iter val val_epoch".split()
EVENTS = [f"{when}_{what}" for what in EVENTS for when in ("before", "after")]


def noting(library_hook, seen):
    class Noting(library_hook):
        def __init__(self, name, priority):
            self.name, self.priority = name, priority

    def note(event):
        def method(self, runner, *args, **kwargs):
            if event in ("before_train", "after_train"):
                getattr(library_hook, event)(self, runner)
            rate = runner.optim_wrapper.get_lr()["lr"][0]
            seen.append((event, self.name, round(rate, 12), kwargs.get("metrics")))
        method.__name__ = event
        return method

    for event in EVENTS:
        if event != "before_run":  # MMEngine has no optimizer then
            setattr(Noting, event, note(event))
    if library_hook is ours.Hook:  # what defining the class has done for its methods
        Noting = type("Noting", (library_hook,), dict(vars(Noting)))
    return [Noting(name, priority) for name, priority in PRIORITIES]


PRIORITIES = [
    ("a", "NORMAL"), ("b", "LOW"), ("c", "VERY_HIGH"), ("d", 45), ("e", "normal"), ("f", 89),
    ("g", "HIGHEST"), ("h", "BELOW_NORMAL"),
]
data = [(torch.ones(1), torch.ones(1))] * 6


def model_of(base):
    class Model(base):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, img, label, mode="tensor"):
            feat = self.linear(img)
            return {"loss": (feat - label).square()} if mode == "loss" else feat

    return Model()


class Metric(TheirMetric):
    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return {"acc": 0.5}


theirs_seen, ours_seen = [], []
schedule = dict(type="StepLR", step_size=2, gamma=0.5, by_epoch=False)
Runner(
    model=model_of(TheirModel),
    work_dir="work_dir",
    train_dataloader=DataLoader(data, batch_size=2),
    val_dataloader=DataLoader(data, batch_size=2),
    val_evaluator=[Metric()],
    val_cfg={},
    train_cfg=dict(by_epoch=True, max_epochs=2),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0)),
    param_scheduler=dict(schedule),
    custom_hooks=noting(TheirHook, theirs_seen),
).train()

model = model_of(ours.BaseModel)
wrapper = ours.build_optim_wrapper(model, dict(optimizer=dict(type="SGD", lr=1.0)))
trainer = ours.StepTrainer(model, DataLoader(data, batch_size=2), wrapper)
schedulers = ours.build_param_scheduler(schedule, wrapper, dict(max_iters=6))
# Registered in another order of kinds: priorities decide.
trainer.register_hooks([EvalHook("1 epoch", lambda: {"acc": 0.5})])
trainer.register_hooks(noting(ours.Hook, ours_seen))
trainer.register_hooks([ours.LRScheduler(scheduler=schedulers)])
trainer.train(max_epochs=2)
assert [name for _, name, _, _ in theirs_seen][:8] == [*"gcdaehbf"]
for place, values in ((0, EVENTS), (1, "abcdefgh")):
    for value in values:
        mine, other = (
            [each for each in seen if each[place] == value] for seen in (ours_seen, theirs_seen)
        )
        # MMEngine's scheduler has the priority LOW too, and is registered before these hooks; then
        # it has stepped before "b" is called. Here it is the last one of them.
        assert [(*each[:2], each[3]) for each in mine] == [(*each[:2], each[3]) for each in other]
        known = [each for each in mine if each[1] != "b"]
        assert known == [each for each in other if each[1] != "b"], (value, mine, other)
rates = [rate for event, name, rate, _ in ours_seen if (event, name) == ("after_train_iter", "a")]
assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
assert trainer.storage.history("lr").values() == [(rate, i) for i, rate in enumerate(rates)]
"""


def test_hooks_run_in_mmengines_order_with_its_rates_and_metrics(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORDER)
    done = run_program(script, folder=tmp_path)
    assert done.returncode == 0, done.stdout
