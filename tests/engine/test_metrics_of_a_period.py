"""Losses that are checked at the end of a period, as on an accelerator."""

import math
from typing import Any

import pytest
import torch

from hooktrain.engine.metrics import LossRecorder, merge_periods, read_period
from hooktrain.utils.events import EventStorage


def test_all_tensors_of_a_period_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = []
    stack = torch.stack
    monkeypatch.setattr(
        torch, "stack", lambda tensors: stacks.append(len(tensors)) or stack(tensors)
    )
    period = [(i, {"a": torch.tensor(float(i)), "b": 2.0}) for i in range(3)]
    assert read_period(period) == [(i, {"a": float(i), "b": 2.0}) for i in range(3)]
    assert stacks == [3]


def test_ranks_with_different_metrics_are_merged() -> None:
    reports: list[Any] = [
        [(0, {"loss": 1.0, "data_time": 0.1})],
        [(0, {"loss": 3.0, "data_time": 0.3, "extra": 7.0}), (1, {"loss": 5.0})],
    ]
    assert merge_periods(reports) == [
        (0, {"loss": 2.0, "data_time": 0.3, "extra": 7.0}),
        (1, {"loss": 5.0}),
    ]


def test_a_loss_that_is_not_finite_is_found_when_the_period_is_checked() -> None:
    recorder, storage = LossRecorder(check_at_once=False), EventStorage()
    for i, value in enumerate([1.0, math.nan, 2.0]):
        recorder.record(storage, i, {"loss": torch.tensor(value)}, 0.0)
    with pytest.raises(FloatingPointError, match=r"iteration=1!\nloss_dict = .*'loss': nan"):
        recorder.check(storage)


def test_a_finite_period_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, storage = LossRecorder(check_at_once=False), EventStorage()
    recorder.record(storage, 0, {"loss": torch.tensor(1.0)}, 0.0)
    recorder.check(storage)
    monkeypatch.setattr(storage, "histories", lambda: pytest.fail("read again"))
    recorder.check(storage)


def test_a_metric_that_is_no_loss_may_be_infinite() -> None:
    recorder, storage = LossRecorder(check_at_once=False), EventStorage()
    recorder.record(storage, 0, {"loss": torch.tensor(1.0)}, 0.0)
    storage.put_scalar("ratio", math.inf)
    recorder.check(storage)
    assert storage.latest()["ratio"] == (math.inf, 0)
