"""tools/checkpoint.py, run in this process: what it prints, converts and refuses."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from loading import load_tool
from torch import nn

from equality import assert_equal
from hooktrain.checkpoint.files import load_file, save_file

Tool = Callable[..., int]  # the script with its arguments; gives the exit code
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tool() -> Tool:
    module = load_tool("checkpoint")
    return lambda *arguments: module.main([str(argument) for argument in arguments])


@pytest.fixture
def state() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 3)).sum().backward()
    optimizer.step()
    trainer = {
        "iteration": 9,
        "optimizer": optimizer.state_dict(),
        "hooks": {"EvalHook": {"best": (0.5, None)}},
        "seed": 1,
    }
    return {"model": model.state_dict(), "trainer": trainer, "iteration": 9}


@pytest.fixture
def file(state: dict[str, Any], tmp_path: Path) -> Path:
    save_file(state, tmp_path / "a.pth")
    return tmp_path / "a.pth"


@pytest.fixture
def folder(file: Path, tool: Tool, tmp_path: Path) -> Path:
    assert tool("to-sharded", file, tmp_path / "a") == 0
    return tmp_path / "a"


def test_there_and_back_the_file_is_the_same_to_the_byte(
    file: Path, folder: Path, tool: Tool, tmp_path: Path
) -> None:
    assert tool("to-file", folder, tmp_path / "b.pth") == 0
    assert (tmp_path / "b.pth").read_bytes() == file.read_bytes()


def test_inspect_prints_the_same_tables_for_file_and_folder(
    file: Path, folder: Path, tool: Tool, capsys: Capture
) -> None:
    assert tool("inspect", file) == 0
    printed = capsys.readouterr().out
    assert tool("inspect", folder) == 0
    assert capsys.readouterr().out == printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["model.0.weight", "(4,", "3)", "float32", "48"] in lines
    assert ["trainer.optimizer.state.3.step", "()", "float32", "4"] in lines
    assert ["19", "tensors,", "344", "bytes"] in lines
    assert ["trainer.hooks.EvalHook.best", "(0.5,", "None)"] in lines
    assert ["iteration", "9"] in lines


def test_verify_says_what_is_intact(
    file: Path, folder: Path, tool: Tool, capsys: Capture
) -> None:
    assert tool("verify", file) == 0
    assert tool("verify", folder) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{file} is intact: {file.stat().st_size:,} bytes"
    assert second.startswith(f"{folder} is intact: 4 files, ")


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("broken", ["file", "folder"])
def test_what_is_broken_gives_exit_code_1(
    command: str, broken: str, file: Path, folder: Path, tool: Tool, capsys: Capture
) -> None:
    path = file if broken == "file" else folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert tool(command, file if broken == "file" else folder) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {path}")


def test_a_conversion_replaces_nothing(
    file: Path, folder: Path, tool: Tool, capsys: Capture
) -> None:
    before = file.read_bytes()
    assert tool("to-file", folder, file) == 1
    assert tool("to-sharded", file, folder) == 1
    assert capsys.readouterr().err.count("exists already") == 2
    assert file.read_bytes() == before


def test_what_is_read_may_be_at_an_address(
    file: Path,
    tool: Tool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert tool("weights", f"file://{file}", tmp_path / "b.pth") == 0
    assert torch.load(tmp_path / "b.pth").keys() == load_file(file)["model"].keys()
    assert tool("verify", "s3://bucket/a.pth") == 1
    assert tool("weights", file, "s3://bucket/a.pth") == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "Install s3fs" in first
    assert "cannot write to 's3://bucket/a.pth'" in second


@pytest.mark.parametrize("command", ["weights", "average"])
def test_the_model_alone_loads_into_a_plain_model(
    command: str,
    state: dict[str, Any],
    file: Path,
    tool: Tool,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    assert tool("average", file, tmp_path / "none.pth") == 1
    message = "has no averaged model, only the states of ['EvalHook']"
    assert message in capsys.readouterr().err
    averaged = {f"module.{name}": 2 * tensor for name, tensor in state["model"].items()}
    state["trainer"]["hooks"]["EMA"] = {**averaged, "steps": torch.tensor(3)}
    save_file(state, file)
    assert tool(command, file, tmp_path / "alone.pth") == 0
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.load_state_dict(torch.load(tmp_path / "alone.pth"))
    factor = 2 if command == "average" else 1
    assert torch.equal(model[0].weight, factor * state["model"]["0.weight"])


def test_of_several_averages_one_is_chosen_and_a_counter_is_none(
    state: dict[str, Any], file: Path, tool: Tool, tmp_path: Path, capsys: Capture
) -> None:
    hooks = state["trainer"]["hooks"]
    hooks |= {"Counter": {"steps": 5}, "Number": 5}
    hooks["EMA"] = {"module.a": torch.tensor(1.0), "steps": torch.tensor(3)}
    save_file(state, file)
    assert tool("average", file, tmp_path / "only.pth") == 0
    hooks["EMA_2"] = {"module.a": torch.tensor(2.0), "steps": torch.tensor(3)}
    save_file(state, file)
    assert tool("average", file, tmp_path / "none.pth") == 1
    assert tool("average", file, tmp_path / "none.pth", "--hook", "Counter") == 1
    which, wrong = capsys.readouterr().err.splitlines()
    assert "averaged models of ['EMA', 'EMA_2']: choose one by --hook" in which
    assert "one of ['EMA', 'EMA_2'], not 'Counter'" in wrong
    assert tool("average", file, tmp_path / "second.pth", "--hook", "EMA_2") == 0
    found = [torch.load(tmp_path / f"{name}.pth") for name in ("only", "second")]
    assert_equal(found, [{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}])


def test_safetensors_get_every_tensor_of_the_model(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    written: list[dict[str, torch.Tensor]] = []

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        """Refuses what the package's ``save_file`` does."""
        memory = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
        assert len(set(memory)) == len(memory), "some share memory"
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        written.append(tensors)

    package: Any = ModuleType("safetensors")
    package.torch = SimpleNamespace(save_file=save)
    monkeypatch.setitem(sys.modules, "safetensors", package)
    image_weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    shared = torch.ones(3)
    tensors = {"conv": image_weight, "embedding": shared, "head": shared}
    model = {**tensors, "norm._extra_state": {"seen": 5}}
    save_file({"model": model}, tmp_path / "a.pth")
    assert tool("weights", tmp_path / "a.pth", tmp_path / "a.safetensors") == 0
    assert_equal(written, [tensors])
    assert "['norm._extra_state']" in capsys.readouterr().out
