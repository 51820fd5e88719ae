"""The command `hooktrain`: what it runs, and what comes with an installed package."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import hooktrain
from hooktrain.__main__ import main

ROOT = Path(__file__).parent.parent


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What the command has put in the place of its process; run in an empty folder."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: commands.append(arguments))
    monkeypatch.setenv("HOOKTRAIN_COMMAND", "")  # to be as it was at the end
    monkeypatch.chdir(tmp_path)
    return commands


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["hooktrain", *arguments])
    main()


def test_a_script_takes_the_place_of_the_process(
    command: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, "eval", "--config-file", "mine.py", "--resume")
    script = str(ROOT / "tools" / "train_net.py")
    assert command == [
        [sys.executable, script, "--eval-only", "--config-file", "mine.py", "--resume"]
    ]


def test_the_configurations_of_the_package_are_found(
    command: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(monkeypatch, "train")
    find = runpy.run_path(command[0][1], run_name="shown")["find_config"]
    name = "configs/digits_cnn.py"
    assert find(name, "hooktrain train") == str(ROOT / name)
    Path("configs").mkdir()
    Path(name).touch()
    assert find(name, "hooktrain train") == name
    with pytest.raises(
        SystemExit, match=r"'configs/digit_cnn.py'; did you .*digits_cnn"
    ):
        find("configs/digit_cnn.py", "hooktrain train")


def test_the_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "--version")
    assert capsys.readouterr().out == f"hooktrain {hooktrain.__version__}\n"


def test_the_help_names_the_first_page_of_the_guide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "--help")
    page = Path(capsys.readouterr().out.rpartition(" the guide: ")[2].strip())
    assert page.read_text().startswith("# Guide")


@pytest.mark.parametrize("name", ["train", "eval"])
def test_the_helps_name_all_configurations_and_the_command(
    command: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    call(monkeypatch, "--help")
    call(monkeypatch, name, "--help")
    usage = capsys.readouterr().out
    script = Path(command[0][1])
    names = runpy.run_path(str(script), run_name="shown")
    text = names["argument_parser"]().format_help()
    for path in ROOT.glob("configs/*.py"):
        assert f"configs/{path.name}" in usage
        assert f"configs/{path.name}\n" in text
    assert text.startswith(f"usage: hooktrain {name} [-h]")
    assert script.name not in text


@pytest.mark.parametrize("name", ["plot", "checkpoint", "new"])
def test_the_errors_of_a_script_name_the_command(
    command: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    call(monkeypatch, name)
    names = runpy.run_path(command[0][1], run_name="shown")
    with pytest.raises(SystemExit):
        names["main"]([])
    assert f"hooktrain {name}: error: " in capsys.readouterr().err


def test_a_new_project_has_the_script_of_the_readme(
    command: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call(monkeypatch, "new", "mine")
    names = runpy.run_path(command[0][1], run_name="shown")
    names["main"](["mine"])
    script = Path("mine", "train.py").read_text()
    readme = (ROOT / "README.md").read_text()
    assert script.replace('"output"', '"output/readme"') in readme
    with pytest.raises(SystemExit):
        names["main"](["mine"])
    path = Path("mine", "train.py")
    assert f"hooktrain new: error: {path} already exists" in capsys.readouterr().err


def test_an_installed_package_has_the_tools_of_users_only(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    setup = [sys.executable, "-W", "ignore", "setup.py", "-q"]
    build = [*setup, "build_py", "--build-lib", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True)
    package = tmp_path / "hooktrain"
    shipped = ("README.md", "configs/common/train.py", "demos/digits_data/README.md")
    for name in shipped:
        assert (package / name).is_file(), name
    assert {path.name for path in (package / "tools").iterdir()} == {
        "train_net.py",
        "plot.py",
        "checkpoint.py",
        "compare.py",
        "compare_trace.py",
        "follow.py",
        "estimate.py",
        "estimate_rank.py",
        "estimate_watch.py",
        "new.py",
        "from_detectron2.sed",
        "from_mmengine.sed",
    }
