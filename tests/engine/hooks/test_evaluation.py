import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine.hooks import (
    CallbackHook,
    EarlyStopping,
    EvalHook,
    PeriodicCheckpointer,
    evaluation,
)
from hooktrain.evaluation import DatasetEvaluator, inference_on_dataset
from hooktrain.utils import comm
from toys import Idle, linear_trainer


@pytest.mark.parametrize(
    ("period", "max_iter", "at_end", "expected"),
    [
        *((15, 30, True, 2), (15, 31, True, 3), (0, 20, True, 1), (40, 20, True, 1)),
        *((-1, 20, True, 1), (10, 20, False, 2)),
    ],
)
def test_it_evaluates_each_period_and_once_at_the_end(
    period: int, max_iter: int, at_end: bool, expected: int
) -> None:
    calls: list[int] = []
    Idle(EvalHook(period, lambda: calls.append(1), at_end)).train(0, max_iter)  # type: ignore[arg-type, func-returns-value]
    assert len(calls) == expected


class Counts(DatasetEvaluator):
    """How many batches each evaluation has seen."""

    seen: ClassVar[list[int]] = []

    def reset(self) -> None:
        self.seen.append(0)

    def process(self, inputs: Any, outputs: Any) -> None:
        self.seen[-1] += 1

    def evaluate(self) -> dict[str, Any]:
        return {"count": self.seen[-1]}


def test_it_is_tried_on_a_few_batches_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counts, "seen", [])
    trainer = Idle()
    count = partial(inference_on_dataset, abs, [1, 2, 3], Counts())
    steps = CallbackHook(before_step=lambda _: Counts.seen.append(-1))
    trainer.register_hooks([EvalHook(2, count, sanity_batches=2), steps])
    trainer.train(0, 3)
    assert Counts.seen == [2, -1, -1, 3, -1, 3]
    assert trainer.storage.history("count").values() == [(3.0, 1), (3.0, 3)]


def test_results_become_metrics_with_slashes() -> None:
    trainer = Idle(EvalHook(2, lambda: {"bbox": {"AP": 1, "AR": 2.5}, "speed": 3}))
    trainer.train(0, 3)
    assert trainer.storage.latest() == {
        "bbox/AP": (1.0, 3),
        "bbox/AR": (2.5, 3),
        "speed": (3.0, 3),
    }
    assert not trainer.storage.smoothing_hints()["speed"]


def test_a_run_that_was_stopped_is_evaluated() -> None:
    calls: list[int] = []
    stop = CallbackHook(after_step=lambda t: t.iter == 1 and t.request_stop("now"))
    trainer = Idle(EvalHook(0, lambda: calls.append(trainer.iter)), stop)  # type: ignore[arg-type, func-returns-value]
    trainer.train(0, 1)
    trainer.train(max_iter=9)
    assert calls == [1, 2]


def test_a_name_that_training_logs_too_keeps_its_hint() -> None:
    trainer = linear_trainer(EvalHook(2, lambda: {"total_loss": 7.0, "accuracy": 1.0}))
    trainer.train(0, 3)
    assert (7.0, 1) in trainer.storage.history("total_loss").values()
    hints = trainer.storage.smoothing_hints()
    assert hints["total_loss"]
    assert not hints["accuracy"]


def broken() -> None:
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_failing_evaluation_comes_after_the_save(
    at_the_end: bool, tmp_path: Path
) -> None:
    def stop(trainer: Any) -> None:
        if at_the_end and trainer.iter == 1:
            trainer.request_stop("now")

    evaluation = EvalHook(0 if at_the_end else 2, broken)  # type: ignore[arg-type]
    trainer = linear_trainer(CallbackHook(after_step=stop), evaluation)
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2 + 7 * at_the_end)])
    with pytest.raises(ZeroDivisionError, match="broken"):
        trainer.train(0, 8)
    assert not trainer.succeeded
    (name,) = [path.name for path in tmp_path.glob("*.pth")]
    assert name == ("model_final.pth" if at_the_end else "model_0000001.pth")
    assert checkpointer.resume_or_load("")["iteration"] == 1


def fail_on(ranks: list[int], folder: Path) -> tuple[str, list[str]]:
    def evaluate() -> dict[str, float]:
        if comm.get_rank() in ranks:
            raise ZeroDivisionError("broken")
        return {"accuracy": 1.0}

    trainer = linear_trainer(EvalHook(2, evaluate))
    checkpointer = Checkpointer(trainer.model, folder, sharded=True, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2)])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train(0, 8)
    return str(caught.value), sorted(path.name for path in folder.glob("[!.]*"))


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_all_ranks_save_when_the_evaluation_of_one_has_failed(
    ranks: list[int], tmp_path: Path
) -> None:
    saved = ["last_checkpoint", "model_0000001"]
    assert run_ranks(fail_on, 2, ranks, tmp_path) == [("broken", saved)] * 2


def fail_where_another_rank_waits() -> None:
    def evaluate() -> dict[str, float]:
        if comm.is_main_process():
            comm.all_gather("the predictions")
        raise ZeroDivisionError("broken")

    evaluation._PATIENCE_SECONDS = 0.2
    linear_trainer(EvalHook(2, evaluate)).train(0, 8)


def test_a_rank_that_fails_while_another_waits_for_it_ends_the_run_soon() -> None:
    with pytest.raises(RuntimeError, match="failure in rank 1") as caught:
        run_ranks(fail_where_another_rank_waits, 2)
    assert str(caught.value).endswith("ZeroDivisionError: broken\n")


def trainer_of(values: list[float], **kwargs: Any) -> Idle:
    """Put a value of "loss" in each iteration, as long as there are values."""

    def put(trainer: Any) -> None:
        if trainer.iter < len(values):
            trainer.storage.put_scalar("loss", values[trainer.iter])

    return Idle(CallbackHook(after_step=put), EarlyStopping("loss", **kwargs))


@pytest.mark.parametrize(
    ("values", "options", "end"),
    [
        ([3.0, 2.0, 2.5, 2.0, 1.0], {"patience": 2}, 4),
        # An improvement resets the patience, and must exceed min_delta.
        ([3.0, 3.5, 2.0, 1.9, 1.8, 1.7], {"patience": 2, "min_delta": 0.15}, 9),
        ([1.0, 2.0, 1.5], {"mode": "max", "patience": 1}, 3),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([1.0, 2.0], {"patience": 2}, 9),  # iterations without a value do not count
    ],
)
def test_training_stops_after_so_many_values_without_improvement(
    values: list[float], options: dict[str, Any], end: int
) -> None:
    trainer = trainer_of(values, **options)
    trainer.train(0, 9)
    assert trainer.iter == end
    assert (trainer.stop_reason is None) == (end == 9)


def test_the_patience_survives_a_resume() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    first = trainer_of(values, patience=3)
    first.train(0, 2)
    second = trainer_of(values, patience=3)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=9)
    assert second.iter == 4
    third = trainer_of(values, patience=3)  # a stopped run stays stopped
    third.load_state_dict(second.state_dict())
    third.train(max_iter=9)
    assert third.iter == 4


@pytest.mark.parametrize("is_first", [True, False])
def test_a_metric_that_no_evaluation_gives_ends_the_run(is_first: bool) -> None:
    hooks = [EarlyStopping("acc"), EvalHook(2, lambda: {"accuracy": 1.0})]
    trainer = Idle(*(hooks if is_first else reversed(hooks)))
    with pytest.raises(ValueError, match="no metric 'acc'; there is 'accuracy'"):
        trainer.train(0, 9)
    assert trainer.iter == (2 if is_first else 1)
