"""The README's programs run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import run_program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


LOGGED = "import logging; logging.basicConfig(level=logging.INFO)\n"
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def write(folder: Path, program: str) -> Path:
    script = folder / "train_net.py"
    script.write_text(program)
    return script


def run(folder: Path, program: str) -> str:
    strict = "import warnings; warnings.simplefilter('error')\n"
    done = run_program(write(folder, strict + program), folder=folder)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_alone(folder: Path, program: str, *launcher: str) -> str:
    """The same as `run`, by a new interpreter, or several."""
    result = subprocess.run(
        [sys.executable, "-W", "error", *launcher, write(folder, program)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_the_program_of_the_readme_trains_and_goes_on_when_started_again(tmp_path: Path) -> None:
    run_alone(tmp_path, PROGRAMS[0])
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


def test_the_program_with_a_strategy_trains_on_any_number_of_processes(tmp_path: Path) -> None:
    ranks = r"rank (\d) of {} on cpu: loss 0\.00\d+"
    assert re.findall(ranks.format(1), run(tmp_path, PROGRAMS[1])) == ["0"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = run_alone(tmp_path, PROGRAMS[1], *torchrun)
    assert sorted(re.findall(ranks.format(2), printed)) == ["0", "1"]
    assert "Warning" not in printed


@pytest.mark.parametrize(
    "name", re.findall(r"`((?:hooktrain|tools|configs|tests)/[\w/.]+)`", README)
)
def test_files_that_the_readme_names_exist(name: str) -> None:
    assert (ROOT / name).exists()
