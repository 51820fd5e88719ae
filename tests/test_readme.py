"""The README's programs run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


LOGGED = "import logging; logging.basicConfig(level=logging.INFO)\n"
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(folder: Path, program: str) -> str:
    script = folder / "train_net.py"
    script.write_text(program)
    result = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=folder, capture_output=True, text=True
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
    assert "Starting training" in run(tmp_path, LOGGED + PROGRAMS[1])
    assert len(PROGRAMS) == 2


@pytest.mark.parametrize(
    "name", re.findall(r"`((?:hooktrain|tools|configs|tests)/[\w/.]+)`", README)
)
def test_files_that_the_readme_names_exist(name: str) -> None:
    assert (ROOT / name).exists()
