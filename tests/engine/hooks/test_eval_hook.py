from typing import Any

import pytest

from hooktrain.engine.hooks import CallbackHook, EvalHook
from toy import Idle


def count(period: int, max_iter: int, **kwargs: Any) -> int:
    calls: list[int] = []
    Idle(EvalHook(period, lambda: calls.append(1), **kwargs)).train(0, max_iter)  # type: ignore[arg-type, func-returns-value]
    return len(calls)


@pytest.mark.parametrize(
    ("period", "max_iter", "calls"),
    [(15, 30, 2), (15, 31, 3), (0, 20, 1), (40, 20, 1), (-1, 20, 1)],
)
def test_it_evaluates_each_period_and_once_at_the_end(
    period: int, max_iter: int, calls: int
) -> None:
    assert count(period, max_iter) == calls


def test_without_the_evaluation_at_the_end_the_last_period_still_counts() -> None:
    assert count(10, 20, eval_after_train=False) == 2


def test_results_become_metrics_with_slashes() -> None:
    hook = EvalHook(2, lambda: {"bbox": {"AP": 1, "AR": 2.5}, "speed": 3})
    trainer = Idle(hook)
    trainer.train(0, 3)
    assert trainer.storage.latest() == {"bbox/AP": (1.0, 3), "bbox/AR": (2.5, 3), "speed": (3.0, 3)}
    assert not trainer.storage.smoothing_hints()["speed"]


def test_a_run_that_failed_in_its_last_iteration_is_not_evaluated() -> None:
    calls: list[int] = []
    trainer = Idle(EvalHook(0, lambda: calls.append(1)), fail_at=2)  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(ValueError, match="broken at 2"):
        trainer.train(0, 3)
    assert calls == []


def test_a_run_that_was_stopped_is_evaluated() -> None:
    calls: list[int] = []
    stop = CallbackHook(after_step=lambda t: t.request_stop("now"))
    Idle(EvalHook(0, lambda: calls.append(1)), stop).train(0, 9)  # type: ignore[arg-type, func-returns-value]
    assert calls == [1]


def test_the_same_trainer_can_be_trained_and_evaluated_twice() -> None:
    calls: list[int] = []
    trainer = Idle(EvalHook(0, lambda: calls.append(1)))  # type: ignore[arg-type, func-returns-value]
    trainer.train(0, 1)
    trainer.train(max_iter=2)
    assert calls == [1, 1]


def test_results_that_are_no_numbers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'a/b' is 'good'"):
        Idle(EvalHook(0, lambda: {"a": {"b": "good"}})).train(0, 1)
