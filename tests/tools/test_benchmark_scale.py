"""tools/benchmark_scale.py, run in this process at a small size: what it counts and prints."""

from pathlib import Path
from types import ModuleType

import pytest
from loading import load_tool

from hooktrain.utils import comm
from processes import run_program


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("benchmark_scale")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_messages_are_counted_with_their_bytes(
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
    # There are four maxima and one for each iteration. The sums are two in each iteration for each
    # of three losses and their sum.
    size = 8 * (4 + 20) + 8 * 2 * 20 * 4
    assert rows[2:] == [
        ["1", "3", "0", "0"],
        ["8", "3", "1", str(size)],
        ["4,096", "3", "1", str(size)],
    ]
    assert comm.object_group is real


def test_a_checkpoint_is_measured(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--gigabytes 0.001 --rounds 1 --folder {tmp_path}"
    tool.main(["checkpoint", *options.split()])
    rows = [cells(line) for line in capsys.readouterr().out.splitlines()]
    speeds = [row for row in rows if len(row) == 3 and "." in row[1]]
    assert len(speeds) == 12
    assert all(float(speed) >= 0 for row in speeds for speed in row[1:])
    assert ["1", "8", "12", "1.5"] in [row[:4] for row in rows]
    assert list(tmp_path.iterdir()) == []


def test_costs_follow_from_the_speeds(tool: ModuleType) -> None:
    speeds = {
        "copy into kept memory": (7.0, 10.0),
        "save_folder (checksums, fsync)": (0.3, 0.5),
        "read_folder (verified)": (1.0, 2.0),
    }
    # 12 bytes of each of a billion parameters, on 8 ranks.
    assert tool.costs(speeds, 1, 8) == [1, 8, 12, 1.5, 0.15, 3.0, 0.75]


def test_the_index_of_many_ranks_is_read(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.main(["index", "--worlds", "512", "--tensors", "30"])
    row = cells(capsys.readouterr().out.splitlines()[-1])
    assert row[0] == "512"
    numbers = 512 * 30 * (2 * 2 + 4)
    assert 1 < float(row[1]) * 1e6 / (8 * numbers) < 1.2
    assert all(float(each) > 0 for each in row[2:])


def test_choosing_samples_is_measured(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.main(["sampler", "--samples", "1000000"])
    _, _, row = [cells(line) for line in capsys.readouterr().out.splitlines()]
    assert row[0] == "1,000,000"
    assert int(row[3]) < 256  # MiB


def test_ranks_that_connect_where_they_talk_open_fewer_files() -> None:
    # A process of its own: copies of one with threads may hang.
    done = run_program("tools/benchmark_scale.py", "connections", "--worlds", "8")
    assert done.returncode == 0, done.stdout
    # Before torch 2.11 gloo's lines of several ranks may be mixed up.
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    _, _, full, lazy = map(cells, rows[:4])
    assert full[:2] == ["8", "all"]
    assert lazy[:2] == ["8", "where they talk"]
    for every, few in zip(full[2:], lazy[2:], strict=True):
        first, others = every.split(" / ")
        assert int(few.split(" / ")[0]) < int(first)
        assert int(few.split(" / ")[1]) < int(others)
