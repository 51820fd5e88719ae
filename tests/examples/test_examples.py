"""Each script of examples/ is killed and started again, and ends as if it had not been killed.

`make examples` installs what they need, and runs this.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from equality import assert_same_end
from processes import run_program

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]

# Kills the process inside of an iteration. The import of torchvision is tests/vision.py's.
KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import vision
from hooktrain import SimpleTrainer

step = SimpleTrainer.run_step

def run_step(trainer):
    if trainer.iter == {iteration}:
        os.kill(os.getpid(), signal.SIGKILL)
    step(trainer)

SimpleTrainer.run_step = run_step
"""


def run(example: Path, folder: Path, kill_at: int) -> int:
    folder.mkdir(exist_ok=True)
    script = folder / example.name
    first = KILLED.format(tests=str(ROOT / "tests"), iteration=kill_at)
    script.write_text(first + example.read_text())
    done = run_program(script, folder=folder)
    assert done.returncode in (0, -9), done.stdout
    return done.returncode


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_that_is_killed_ends_as_one_that_is_not(
    example: Path, tmp_path: Path
) -> None:
    for line in re.findall(r"^pip install (.+)$", example.read_text(), re.M):
        # They are not imported, since gymnasium would change the environment.
        missing = [name for name in line.split() if find_spec(name) is None]
        if missing:
            pytest.skip(f"{example.name} needs {missing}")
    assert run(example, tmp_path / "whole", kill_at=-1) == 0
    assert run(example, tmp_path / "killed", kill_at=125) == -9
    assert run(example, tmp_path / "killed", kill_at=-1) == 0
    ends = sorted((tmp_path / "whole").rglob("last_checkpoint"))
    assert ends
    for end in ends:
        folder = end.parent.relative_to(tmp_path / "whole")
        assert_same_end(tmp_path / "killed" / folder, tmp_path / "whole" / folder)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example: Path) -> None:
    lines = [line for line in example.read_text().splitlines() if line.strip()]
    assert len(lines) <= 60
