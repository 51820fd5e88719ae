"""Periods in iterations, in epochs and in time."""

from types import SimpleNamespace

import pytest

from hooktrain.utils.periods import Period, in_iterations


@pytest.mark.parametrize(
    ("number", "length", "expected"),
    [
        (20, None, 20),
        (0, 7, 0),
        ("1 epoch", 23, 23),
        ("3 epochs", 23, 69),
        ("0.5 epochs", 23, 12),
        (".1 epochs", 30, 3),  # in floating point it would be 3.0000000000000004
        ("2.0 epochs", 5, 10),
    ],
)
def test_epochs_become_iterations(
    number: int | str, length: int | None, expected: int
) -> None:
    assert in_iterations(number, length) == expected


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("20", 10, "'20'"),
        ("-1 epochs", 10, "'-1 epochs'"),
        ("2 epochs", None, "'2 epochs'"),
        ("10 minutes", 10, "'10 minutes'"),
    ],
)
def test_another_text_and_an_unknown_length_are_refused(
    text: str, length: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        in_iterations(text, length)


@pytest.mark.parametrize(
    ("every", "length", "due"),
    [
        (20, None, [20, 40, 60]),
        ("1 epoch", 23, [23, 46]),
        ("0.5 epochs", 23, [12, 24, 36, 48, 60]),
        (1.0, None, [*range(1, 61)]),
        (0, 23, []),
    ],
)
def test_a_period_is_due_where_it_ends(
    every: int | str, length: int | None, due: list[int]
) -> None:
    trainers = [SimpleNamespace(done=n, epoch_length=length) for n in range(1, 61)]
    assert [t.done for t in trainers if Period(every).is_due(t)] == due


@pytest.mark.parametrize(
    "every", [-1, 0.5, "10 days", "10", "", "0 minutes", "0.0 epochs"]
)
def test_an_impossible_period_is_refused_at_once(every: int | str) -> None:
    with pytest.raises(ValueError, match="iterations") as caught:
        Period(every)
    assert repr(every) in str(caught.value)


def test_periods_of_equal_length_are_equal() -> None:
    assert Period("1 epoch") == Period("1 epoch") != Period(1)
