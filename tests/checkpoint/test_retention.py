import pytest

from hooktrain.checkpoint.retention import files_to_delete, iteration_in_name


def names(*iterations: int, prefix: str = "model") -> list[str]:
    return [f"{prefix}_{i:07d}.pth" for i in iterations]


def test_the_oldest_files_beyond_the_count_go_oldest_first() -> None:
    assert files_to_delete(names(29, 9, 39, 19), "model", 2) == names(9, 19)


def test_nothing_goes_while_there_are_few() -> None:
    assert files_to_delete(names(9, 19), "model", 2) == []
    assert files_to_delete([], "model", 1) == []


def test_the_order_is_that_of_the_numbers_and_not_of_the_letters() -> None:
    assert files_to_delete(names(9_999_999, 10_000_009), "model", 1) == names(9_999_999)


def test_only_numbered_files_of_the_prefix_are_looked_at() -> None:
    others = [
        "model_final.pth",
        "model_best.pth",
        "last_checkpoint",
        "metrics.json",
        "model_123456.pth",  # six digits
        "model_0000001.pt",
        "model_0000001.pth.bak",
        ".model_0000001.pth.tmp-1-aaaaaaaa",
        "model_ema_0000001.pth",
        "xmodel_0000001.pth",
        *names(1, 2, 3, prefix="other"),
    ]
    assert files_to_delete([*others, *names(1, 2)], "model", 1) == names(1)
    assert files_to_delete(others, "other", 2) == names(1, prefix="other")


def test_protected_files_stay() -> None:
    assert files_to_delete(names(1, 2, 3, 4), "model", 1, protected=names(2)) == names(1, 3)


def test_files_of_another_longer_run_are_neither_counted_nor_deleted() -> None:
    files = names(9, 19, 29, 90_009, 90_019)
    assert files_to_delete(files, "model", 2, newest=29) == names(9)
    assert files_to_delete(files, "model", 2) == names(9, 19, 29)


@pytest.mark.parametrize("max_to_keep", [0, -1])
def test_keeping_none_is_refused(max_to_keep: int) -> None:
    with pytest.raises(ValueError, match=f"max_to_keep must be at least 1, got {max_to_keep}"):
        files_to_delete(names(1), "model", max_to_keep)


@pytest.mark.parametrize(
    ("name", "iteration"),
    [
        ("model_0000099.pth", 99),
        ("a_b_12345678.pth", 12_345_678),
        ("model_final.pth", None),
        ("model_000099.pth", None),
        ("model_" + 7 * "\N{ARABIC-INDIC DIGIT ONE}" + ".pth", None),
        ("", None),
    ],
)
def test_the_iteration_in_a_name(name: str, iteration: int | None) -> None:
    assert iteration_in_name(name) == iteration
