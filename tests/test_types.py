"""What a user writes passes pyright too: `make types` installs it. `make lint` runs mypy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_readme import README, programs

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright")


def errors(script: Path) -> list[str]:
    """What pyright finds in a script that imports hooktrain from this repository."""
    settings = script.with_name("pyrightconfig.json")
    settings.write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, script.name]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return [
        found["message"]
        for found in report["generalDiagnostics"]
        if found["severity"] == "error"
    ]


def test_the_script_of_the_readme_has_no_errors(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(programs(README)[0])
    assert errors(script) == []


def test_the_script_of_hooktrain_new_has_no_errors(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hooktrain", "new", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    assert errors(tmp_path / "train.py") == []


def test_mistakes_in_it_are_errors(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    program = programs(README)[0]
    script.write_text(
        program.replace("max_iter=200", 'max_iter="200"')
        .replace("build_strategy\n", "build_strategies\n")
        .replace("self.trainer.storage", "self.trainer.storag")
    )
    found = errors(script)
    for wrong in ("build_strategies", "storag", "max_iter"):
        assert any(wrong in message for message in found), found
