"""tools/benchmark_scale.py, run in this process at a small size: what it counts and prints."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from loading import load_tool

from hooktrain.utils import comm


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("benchmark_scale")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_collectives_are_counted_with_their_bytes(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--worlds 8 4096 --losses 3 --rounds 1 --iterations 40"
    real = comm.object_group
    tool.main(["ranks", *options.split()])
    rows = [
        cells(line)[:4]
        for line in capsys.readouterr().out.splitlines()
        if line[:1] == "|"
    ]
    # The maximum has two numbers and one of each iteration. The sum has two of each iteration for
    # each of three losses and their sum.
    size = str(8 * (2 + 20) + 8 * 2 * 20 * 4)
    assert rows[2:] == [
        ["1", "3", "0", "0"],
        ["8", "3", "2", size],
        ["4,096", "3", "2", size],
    ]
    assert comm.object_group is real


def test_a_collective_that_somebody_adds_to_a_period_is_counted(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tool.traffic(512, 1)[0] == 2
    synchronize = tool.SimpleTrainer.synchronize
    monkeypatch.setattr(
        tool.SimpleTrainer,
        "synchronize",
        lambda self: comm.any_rank(False) or synchronize(self),
    )
    assert tool.traffic(512, 1)[0] == 3


def test_the_costs_of_a_checkpoint_follow_from_its_size(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    tool.main(
        [
            "checkpoint",
            "--gigabytes",
            "0.001",
            "--rounds",
            "1",
            "--folder",
            str(tmp_path),
        ]
    )
    assert torch.get_num_threads() == threads
    lines = [
        cells(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "|"
    ]
    names = [line[0] for line in lines]
    assert "copy into kept memory" in names
    assert "read_folder (verified)" in names
    assert list(tmp_path.iterdir()) == []
    speed = {
        "copy into kept memory": 10.0,
        "save_folder (checksums, fsync)": 0.5,
        "read_folder (verified)": 1.0,
    }
    # 12 bytes a parameter; a hundredth of 120 GB for each of 100 ranks.
    assert tool.costs(speed, 10, 100) == pytest.approx(
        [10, 100, 120, 1.2, 0.12, 2.4, 1.2]
    )
