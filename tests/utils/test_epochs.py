"""Numbers of iterations that are given in epochs."""

import pytest

from hooktrain.utils.epochs import in_iterations


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
        ("20", 10, "a number of iterations, or a text like '1 epoch', not '20'"),
        ("-1 epochs", 10, "a number of iterations"),
        ("1 epoch ", 10, "a number of iterations"),
        ("2 epochs", None, "'2 epochs' are: the loader has no length"),
    ],
)
def test_another_text_and_an_unknown_length_are_refused(
    text: str, length: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        in_iterations(text, length)
