"""The README's programs run as they stand there."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


LOGGED = "import logging; logging.basicConfig(level=logging.INFO)\n"
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(folder: Path, program: str, launcher: Sequence[str] = ()) -> str:
    script = folder / "train_net.py"
    script.write_text(program)
    result = subprocess.run(
        [sys.executable, "-W", "error", *launcher, script],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_the_program_of_the_readme_trains_and_goes_on_when_started_again(tmp_path: Path) -> None:
    run(tmp_path, PROGRAMS[0])
    output = tmp_path / "output" / "readme"
    assert {"model_0000099.pth", "model_final.pth", "last_checkpoint", "metrics.json"} <= {
        path.name for path in output.iterdir()
    }
    final = (output / "model_final.pth").read_bytes()
    run(tmp_path, PROGRAMS[0])
    assert (output / "model_final.pth").read_bytes() == final


def test_the_program_with_a_model_that_owns_its_step_trains(tmp_path: Path) -> None:
    assert "Starting training" in run(tmp_path, LOGGED + PROGRAMS[2])
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize("processes", [1, 2])
def test_the_program_with_a_strategy_trains_on_any_number_of_processes(
    processes: int, tmp_path: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    printed = run(tmp_path, PROGRAMS[1], launcher if processes > 1 else [])
    found = re.findall(rf"rank (\d) of {processes} on cpu: loss 0\.00\d+", printed)
    assert sorted(found) == ["0", "1"][:processes]


@pytest.mark.parametrize(
    "name", re.findall(r"`((?:hooktrain|tools|configs|tests)/[\w/.]+)`", README)
)
def test_files_that_the_readme_names_exist(name: str) -> None:
    assert (ROOT / name).exists()
