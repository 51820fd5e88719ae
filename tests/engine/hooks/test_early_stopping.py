import math
from typing import Any

import pytest

from hooktrain.engine.hooks import CallbackHook, EarlyStopping
from hooktrain.utils.events import EventStorage
from toys import Idle


def trainer_of(values: list[float], **kwargs: Any) -> Idle:
    """Put a value of "loss" in each iteration, as long as there are values."""

    def put(trainer: Any) -> None:
        if trainer.iter < len(values):
            trainer.storage.put_scalar("loss", values[trainer.iter])

    return Idle(CallbackHook(after_step=put), EarlyStopping("loss", **kwargs))


@pytest.mark.parametrize(
    ("values", "options", "end", "reason"),
    [
        (
            [3.0, 2.0, 2.5, 2.0, 1.0],
            {"patience": 2},
            4,
            "loss has not improved on 2.0 in 2 ev",
        ),
        # An improvement resets the patience, and must exceed min_delta.
        ([3.0, 3.5, 2.0, 1.9, 1.8, 1.7], {"patience": 2, "min_delta": 0.15}, 9, None),
        (
            [1.0, 2.0, 1.5],
            {"mode": "max", "patience": 1},
            3,
            "not improved on 2.0 in 1",
        ),
        ([math.nan, math.nan], {"patience": 2}, 2, "not improved on None in 2"),
        (
            [1.0, 2.0],
            {"patience": 2},
            9,
            None,
        ),  # iterations without a new value do not count
    ],
)
def test_training_stops_after_so_many_values_without_improvement(
    values: list[float], options: dict[str, Any], end: int, reason: str | None
) -> None:
    trainer = trainer_of(values, **options)
    trainer.train(0, 9)
    assert trainer.iter == end
    assert (
        trainer.stop_reason is None
        if reason is None
        else reason in str(trainer.stop_reason)
    )


def test_the_patience_survives_a_resume_and_a_stopped_run_stays_stopped() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    first = trainer_of(values, patience=3)
    first.train(0, 2)
    second = trainer_of(values, patience=3)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=9)
    assert second.iter == 4
    third = trainer_of(values, patience=3)
    third.load_state_dict(second.state_dict())
    third.train(max_iter=9)
    assert third.iter == 4


@pytest.mark.parametrize("kwargs", [{"mode": "best"}, {"patience": 0}])
def test_wrong_arguments_are_refused(kwargs: Any) -> None:
    with pytest.raises(ValueError, match=str(next(iter(kwargs.values())))):
        EarlyStopping("loss", **kwargs)


def test_no_metric_is_read_before_there_is_a_new_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = []
    real = EventStorage._fetch_pending
    monkeypatch.setattr(
        EventStorage,
        "_fetch_pending",
        lambda self: reads.append(self.iter) or real(self),
    )

    def put(trainer: Any) -> None:
        trainer.storage.put_scalar("often", 1.0)
        if trainer.iter in (3, 6):
            trainer.storage.put_scalar("loss", 1.0)

    Idle(CallbackHook(after_step=put), EarlyStopping("loss")).train(0, 9)
    assert reads == [3, 6]
