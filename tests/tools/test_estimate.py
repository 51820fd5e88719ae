"""tools/estimate.py: sizes in words, the largest batch, and what the command prints."""

import re
from typing import Any

import pytest
from estimating import configuration, samples, sharded
from loading import TOOLS, load_tool

from processes import run_program

tool = load_tool("estimate")


def test_the_largest_batch_is_the_last_that_fits() -> None:
    cfg = configuration("Transformer", "+model.depth=2")
    with tool.pretended(1, "cpu") as (fakes, watch):
        rank = tool.Rank(cfg, fakes, watch)
        peak = sum(rank.parts_at_peak().values())
        limit = peak * 3
        largest = tool.largest_batch(rank, limit, peak)
        peaks = [
            rank.step(tool.resized(rank.batch, 32, size, fakes))
            for size in (largest, largest + 1)
        ]
    assert 64 < largest < 256
    assert peaks[0] <= limit < peaks[1]


def test_not_even_one_sample_may_fit() -> None:
    with tool.pretended(1, "cpu") as (fakes, watch):
        rank = tool.Rank(configuration("MLP"), fakes, watch)
        peak = sum(rank.parts_at_peak().values())
        assert tool.largest_batch(rank, 1000, peak) == 0


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_a_batch_that_does_not_fit_is_made_smaller(share: float) -> None:
    with tool.pretended(1, "cpu") as (fakes, watch):
        rank = tool.Rank(configuration("CNN"), fakes, watch)
        peak = sum(rank.parts_at_peak().values())
        limit = share * peak
        largest = tool.largest_batch(rank, limit, peak)
        stays = sum(tensor.nbytes for tensor in rank.batch)  # beside the other batch
        peaks = [
            rank.step(tool.resized(rank.batch, 16, size, fakes)) - stays
            for size in (largest, largest + 1)
        ]
    assert 0 < largest < 16
    assert peaks[0] <= limit < peaks[1]


def test_a_model_that_is_too_large_to_be_built_fits_with_no_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cfg = configuration("MLP", samples("MLP", 8), sharded("Linear"))
    tool.estimate(cfg, 8, "0.004GiB")
    printed = capsys.readouterr().out
    assert "It does not fit into 4.10 MiB" in printed
    assert "too large before the first step" in printed
    assert "The largest that fits" not in printed


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("512MiB", 2**29),
    ],
)
def test_a_size_of_memory_has_a_unit(text: str, size: int) -> None:
    assert tool.parse_size(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "GiB", "-1GiB"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"not '{text}'"):
        tool.parse_size(text)


def train(*arguments: str) -> Any:
    config = str(TOOLS.parent / "configs/digits_cnn.py")
    return run_program(TOOLS / "train_net.py", "--config-file", config, *arguments)


def test_the_command_prints_parts_messages_and_whether_it_fits() -> None:
    done = train(
        "--dry-run", "--ranks", "4", "--device-memory", "1GiB", "train.device=cpu"
    )
    assert done.returncode == 0, done.stdout
    assert "One of 4 ranks on cpu" in done.stdout
    for pattern in (
        r"\nweights +\d+\.\d+ KiB\n",
        r"\npeak +\d\.\d+ MiB\n",
        r"\nallreduce +1 +\d+\.\d+ KiB\n",
        r"It fits into 1\.00 GiB: 0%\nThe batch of a rank has 16 samples; the largest .* \d+,\d+",
    ):
        assert re.search(pattern, done.stdout), (pattern, done.stdout)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "4"], "--ranks is for an estimate: add --dry-run"),
        (["--dry-run", "--device-memory", "1GiB"], "needs --dry-run --ranks"),
        (["--dry-run", "--ranks", "0"], "--ranks must be at least 1, not 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_a_line(
    options: list[str], said: str
) -> None:
    done = train(*options)
    assert done.returncode != 0
    assert said in done.stdout
    assert "estimate.py, line" not in done.stdout
