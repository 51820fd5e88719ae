"""detectron2's DefaultTrainer, on a tree of configuration, as its subclasses use it."""

import copy
import logging
import math
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.checkpoint import load_file
from hooktrain.compat.detectron2 import (
    AMPTrainer,
    BestCheckpointer,
    CallbackHook,
    Checkpointer,
    DatasetEvaluator,
    DefaultTrainer,
    DetectionCheckpointer,
    EvalHook,
    SimpleTrainer,
    TrainerBase,
    default_argument_parser,
    default_setup,
    default_writers,
    hooks,
    verify_results,
)
from hooktrain.events import EventStorage, load_json_metrics
from hooktrain.utils import comm
from hooktrain.utils.logger import close_logger
from toys import linear_trainer


class Tree(dict[str, Any]):
    """As much of yacs's CfgNode as is asked for."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]

    def clone(self) -> "Tree":
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: Any) -> "Tree":
        return Tree({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def defrost(self) -> None:
        pass

    def dump(self) -> str:
        return f"DUMPED: {self['SEED']}"


def tree(folder: Path, **solver: Any) -> Tree:
    steps = {
        "BASE_LR": 0.1,
        "MAX_ITER": 6,
        "WARMUP_ITERS": 2,
        "STEPS": (4,),
        "IMS_PER_BATCH": 2,
    }
    rest = {
        "CHECKPOINT_PERIOD": 2,
        "AMP": Tree(ENABLED=False),
        "REFERENCE_WORLD_SIZE": 0,
    }
    return Tree(
        OUTPUT_DIR=str(folder),
        SEED=7,
        CUDNN_BENCHMARK=False,
        MODEL=Tree(WEIGHTS=""),
        DATALOADER=Tree(NUM_WORKERS=0),
        DATASETS=Tree(TEST=("one", "two")),
        SOLVER=Tree({**steps, **rest, **solver}),
        TEST=Tree(
            EVAL_PERIOD=4,
            EXPECTED_RESULTS=[],
            PRECISE_BN=Tree(ENABLED=False, NUM_ITER=1),
        ),
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x + torch.rand(2) if self.training else x)
        return {"loss": y.square().mean()} if self.training else y


class Counts(DatasetEvaluator):
    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self) -> None:
        self.count = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        self.count += 1

    def evaluate(self) -> dict[str, Any]:
        return {"count": {self.name: self.count}}


class Trainer(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:
        return Net()

    @classmethod
    def build_optimizer(cls, cfg: Any, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), cfg.SOLVER.BASE_LR, momentum=0.9)

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, cfg.SOLVER.STEPS)

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Iterable[Any]:
        return [torch.ones(1, 2)]

    @classmethod
    def build_test_loader(cls, cfg: Any, dataset_name: str) -> Iterable[Any]:
        return [torch.ones(1, 2)] * (1 if dataset_name == "one" else 3)

    @classmethod
    def build_evaluator(
        cls, cfg: Any, dataset_name: str, output_folder: str | None = None
    ) -> DatasetEvaluator:
        return Counts(dataset_name)


@pytest.fixture(autouse=True)
def _logs() -> Any:
    logging.getLogger("hooktrain").setLevel(logging.INFO)
    yield
    close_logger()


def test_a_subclass_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = Trainer(tree(tmp_path / "whole"))
    whole.seed = 3
    whole.train()
    assert whole._last_eval_results == {
        "one": {"count": {"one": 1}},
        "two": {"count": {"two": 3}},
    }

    first = Trainer(tree(tmp_path / "parts"))
    first.seed = 3
    first.train(max_iter=5)
    (tmp_path / "parts" / "last_checkpoint").write_text("model_0000003.pth")
    second = Trainer(tree(tmp_path / "parts"))
    second.resume_or_load()
    assert second.start_iter == 4
    second.train()
    assert torch.equal(second.model.fc.weight, whole.model.fc.weight)
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_its_iteration_is_written(
    tmp_path: Path, number: int
) -> None:
    trainer = Trainer(tree(tmp_path))
    send = hooks.CallbackHook(before_step=lambda _: signal.raise_signal(number))
    trainer.register_hooks([send], before=hooks.IterationTimer)
    with pytest.raises(SystemExit, match=str(128 + number)):
        trainer.train()
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000000.pth"
    again = Trainer(tree(tmp_path))
    again.resume_or_load()
    assert again.start_iter == 1


class Doubled(SimpleTrainer):
    def run_step(self) -> None:
        super().run_step()
        self.ran = getattr(self, "ran", 0) + 1


class Assembled(Trainer):
    """With a constructor of its own, as unbiased-teacher's."""

    def __init__(self, cfg: Any, base: type = TrainerBase) -> None:
        if base is TrainerBase:
            TrainerBase.__init__(self)
        else:
            super(DefaultTrainer, self).__init__()
        model = self.build_model(cfg)
        self._trainer = Doubled(
            model, [torch.ones(1, 2)], self.build_optimizer(cfg, model)
        )
        self.scheduler = self.build_lr_scheduler(cfg, self._trainer.optimizer)
        self.max_iter, self.cfg = 3, cfg
        self.register_hooks([hooks.LRScheduler(self.optimizer, self.scheduler)])

    def run_step(self) -> None:
        self._trainer.iter = self.iter
        self._trainer.run_step()
        assert self._trainer.storage is self.storage
        assert next(self._trainer._data_loader_iter).shape == (1, 2)


@pytest.mark.parametrize("base", [TrainerBase, SimpleTrainer])
def test_a_constructor_of_ones_own_may_put_another_trainer_inside(
    tmp_path: Path, base: type
) -> None:
    trainer = Assembled(tree(tmp_path), base)
    trainer.train()
    assert trainer._trainer.ran == 3
    assert trainer.state_dict()["iteration"] == 2
    assert trainer.storage.history("total_loss").count == 3


class CopiedSteps(TrainerBase):
    """A copy of detectron2's SimpleTrainer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self.optimizer = model.train(), optimizer

    def run_step(self) -> None:
        loss = self.model(torch.ones(1, 2))["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        SimpleTrainer.write_metrics({"total_loss": loss}, 0.0, self.iter)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer"])


class AroundCopy(TrainerBase):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        self._trainer = CopiedSteps(model, optimizer)
        self.seed = 3
        self.saver = DetectionCheckpointer(model, str(folder), trainer=self)
        self.register_hooks(
            [hooks.PeriodicWriter(default_writers(str(folder)), period=2)]
        )

    def run_step(self) -> None:
        self._trainer.iter = self.iter
        self._trainer.run_step()


def test_a_copied_trainer_inside_writes_its_losses_and_resumes_its_optimizer(
    tmp_path: Path,
) -> None:
    whole = AroundCopy(tmp_path / "whole")
    whole.train(0, 6)
    first = AroundCopy(tmp_path / "parts")
    first.train(0, 4)
    first.saver.save("last")
    second = AroundCopy(tmp_path / "parts")
    second.saver.resume_or_load("", resume=True)
    second.train(second.iter + 1, 6)
    assert torch.equal(second._trainer.model.fc.weight, whole._trainer.model.fc.weight)
    both = [tmp_path / name / "metrics.json" for name in ("whole", "parts")]
    lines = [load_json_metrics(path) for path in both]
    assert [line["iteration"] for line in lines[0]] == [1, 3, 5]
    losses = [[line["total_loss"] for line in run] for run in lines]
    assert losses[0] == losses[1]


def test_a_copied_trainer_inside_ends_on_nan(tmp_path: Path) -> None:
    trainer = AroundCopy(tmp_path)
    trainer._trainer.model.fc.bias.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="iteration=0!"):
        trainer.train(0, 2)


def test_a_tree_is_saved(tmp_path: Path) -> None:
    args = default_argument_parser().parse_args([])
    default_setup(tree(tmp_path), args)
    assert (tmp_path / "config.yaml").read_text() == "DUMPED: 7"
    assert (tmp_path / "log.txt").exists()


def test_a_tree_is_not_saved_in_an_evaluation_nor_before_a_resume_is_accepted(
    tmp_path: Path,
) -> None:
    parse = default_argument_parser().parse_args
    default_setup(tree(tmp_path), parse(["--eval-only"]))
    assert not (tmp_path / "config.yaml").exists()
    default_setup(tree(tmp_path), parse([]))
    Trainer(tree(tmp_path)).train()
    changed = tree(tmp_path)
    changed.SEED = 8
    default_setup(changed, parse(["--resume"]))
    trainer = Trainer(changed)
    trainer.resume_or_load(resume=True)
    assert (tmp_path / "config.yaml").read_text() == "DUMPED: 7"
    trainer.train(max_iter=8)
    assert (tmp_path / "config.yaml").read_text() == "DUMPED: 8"


def test_a_configuration_for_other_ranks_is_scaled_by_detectron2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = SimpleNamespace(auto_scale_workers=lambda cfg, ranks: (cfg, ranks))
    monkeypatch.setattr(
        "hooktrain.compat.detectron2.default_trainer.import_from_detectron2",
        {"DefaultTrainer": theirs}.get,
    )
    cfg = tree(tmp_path, REFERENCE_WORLD_SIZE=2)
    assert Trainer.auto_scale_workers(cfg, 2) is cfg
    assert Trainer.auto_scale_workers(cfg, 4) == (cfg, 4)


def test_expected_results_are_compared(tmp_path: Path) -> None:
    cfg = tree(tmp_path)
    assert verify_results(cfg, {})
    cfg.TEST.EXPECTED_RESULTS = [["count", "one", 1, 0]]
    assert verify_results(cfg, {"count": {"one": 1}})
    with pytest.raises(ValueError, match=r"count/one is 2\.0"):
        verify_results(cfg, {"count": {"one": 2}})


@pytest.mark.parametrize(
    ("arguments", "prefix", "iteration"),
    [((), "", 4), ((3,), "", 3), ((3, "gan/"), "gan/", 3), (("gan/",), "gan/", 4)],
)
def test_losses_can_be_written_without_a_trainer(
    arguments: Any, prefix: str, iteration: int
) -> None:
    losses = {"loss_a": torch.tensor(1.0), "loss_b": torch.tensor(0.5)}
    with EventStorage(4) as storage:
        SimpleTrainer.write_metrics(losses, 0.25, *arguments)
        assert storage.latest() == {
            f"{prefix}total_loss": (1.5, iteration),
            "loss_a": (1.0, iteration),
            "loss_b": (0.5, iteration),
            "data_time": (0.25, iteration),
        }
        losses["loss_b"] = torch.tensor(math.inf)
        with pytest.raises(FloatingPointError, match=f"iteration={iteration}!"):
            AMPTrainer.write_metrics(losses, 0.25, *arguments)


def mean_written() -> Any:
    loss = torch.tensor(1.0 + comm.get_rank())
    with EventStorage(4) as storage:
        SimpleTrainer.write_metrics({"loss_a": loss}, float(loss), 4)
        return storage.latest()["loss_a"], storage.latest()["data_time"]


def test_what_is_written_without_a_trainer_is_the_mean_of_the_ranks() -> None:
    assert run_ranks(mean_written, 2) == [((1.5, 4), (2.0, 4))] * 2


# Evaluations, and the best model


class Value:
    """Something of a name, as a result may be."""

    def __repr__(self) -> str:
        return "a value"


@pytest.mark.parametrize("value", [Value(), [0.5, 0.25], "high", None])
def test_a_result_that_is_no_number_ends_the_run_as_in_detectron2(value: Any) -> None:
    trainer = linear_trainer(EvalHook(2, lambda: {"bbox": {"AP": value}}))
    with pytest.raises(ValueError, match=re.escape(f"Got 'bbox/AP: {value}' instead")):
        trainer.train(0, 3)
    assert trainer.iter == 1


def test_numbers_of_all_kinds_are_results() -> None:
    numbers = {"a": 1, "b": torch.tensor(2.0), "c": {"d": np.float32(3), "e": "4"}}
    trainer = linear_trainer(EvalHook(1, lambda: numbers), EvalHook(1, lambda: None))
    trainer.train(0, 1)
    results = {
        name: history.latest() for name, history in trainer.storage.results().items()
    }
    assert results == {"a": 1.0, "b": 2.0, "c/d": 3.0, "c/e": 4.0}


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_best_model_is_looked_for_where_a_period_ends_and_at_the_end(
    by_hand: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = [9.0, 1.0, 9.0, 3.0, 2.0]

    class Counted(BestCheckpointer):
        checks = 0

        def _best_checking(self) -> None:
            self.checks += 1
            super()._best_checking()

    def evaluate(trainer: Any) -> Any:
        result = {"AP": values[trainer.done - 1]}
        if not by_hand:
            return trainer.after_evaluation(result)
        return trainer.storage.put_scalars(**result, smoothing_hint=False)

    trainer = linear_trainer(CallbackHook(after_step=evaluate))
    best = Counted(2, Checkpointer(trainer.model, tmp_path), "AP")
    missing = BestCheckpointer(
        2, Checkpointer(trainer.model), "AR", file_prefix="other"
    )
    trainer.register_hooks([best, missing])
    trainer.train(0, 5)
    # At iterations 1 and 3, where periods end, and at the end.
    assert (best.checks, best.best_metric, best.best_iter) == (3, 3.0, 3)
    assert caplog.text.count("'AR' has no value from this iteration") == 3
    assert load_file(tmp_path / "model_best.pth")["iteration"] == 3


def test_a_result_goes_before_a_metric_of_the_training_of_its_name(
    tmp_path: Path,
) -> None:
    results = iter([1.0, 3.0, 2.0])
    trainer = linear_trainer(
        CallbackHook(after_step=lambda t: t.storage.put_scalar("acc", 10.0 * t.iter)),
        hooks.EvalHook(1, lambda: {"acc": next(results)}),
    )
    best = BestCheckpointer(1, Checkpointer(trainer.model, tmp_path), "acc")
    trainer.register_hooks([best])
    trainer.train(0, 3)
    assert (best.best_metric, best.best_iter) == (3.0, 1)
