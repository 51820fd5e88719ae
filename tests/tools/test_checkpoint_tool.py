"""tools/checkpoint.py, run in this process: what it prints, converts and refuses."""

import hashlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loading import load_tool
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from equality import assert_equal
from hooktrain.checkpoint.files import load_file, save_file, write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.utils.file_io import lock_folder, unlock_folder
from hooktrain.utils.tensors import map_leaves

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
    assert capsys.readouterr().err.count("already exists") == 2
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


def write_earlier(path: Path) -> dict[str, Any]:
    """Write a folder as earlier revisions did, whose files torch has written; return its state."""
    state = {
        "model": {"w": torch.full((3, 4), 3.0), "n": torch.tensor(3)},
        "trainer": {"hooks": [1, (2.5, "x", torch.arange(3))], 5: None},
        "iteration": 3,
    }
    named: dict[str, Any] = {}
    skeleton = map_leaves(lambda keys, leaf: take(named, keys, leaf), state)
    dcp.save(named, checkpoint_id=path)
    metadata: Any = dcp.FileSystemReader(path).read_metadata()
    parts = {}
    for name, tensor in metadata.state_dict_metadata.items():
        (chunk,) = tensor.chunks
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        box = (tuple(chunk.offsets), tuple(chunk.sizes))
        parts[name] = [(*box, place.relative_path, place.offset, place.length)]
    write_file({"state": skeleton, "parts": parts}, path / "state.pth")
    write_earlier_manifest(path)
    return state


def take(named: dict[str, Any], keys: tuple[Any, ...], leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    named[".".join(map(str, keys))] = leaf
    return leaf.to("meta")


def write_earlier_manifest(folder: Path) -> None:
    files = {}
    for file in folder.iterdir():
        data = file.read_bytes()
        if file.name != "manifest.pth":
            files[file.name] = (len(data), hashlib.sha256(data).hexdigest())
    write_file({"files": files}, folder / "manifest.pth")


# Of a process group, which these tools do not need.
without_group = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage"
)


@without_group
def test_a_folder_of_an_earlier_revision_is_converted_in_its_place(
    tool: Tool, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "model_0000003"
    state = write_earlier(folder)
    assert tool("verify", folder) == 1
    assert f"`hooktrain checkpoint upgrade {folder}`" in capsys.readouterr().err
    assert tool("upgrade", folder) == 0
    assert_equal(read_checkpoint(str(folder)), state)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert tool("upgrade", folder) == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", folder.name]
    assert tool("upgrade", tmp_path) == 1
    assert f"{tmp_path} is not a sharded folder" in capsys.readouterr().err


@without_group
def test_a_folder_that_a_run_uses_is_not_converted(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write_earlier(tmp_path / "a")
    lock_folder(tmp_path)
    try:
        monkeypatch.setattr("hooktrain.utils.file_io._locks", {})
        assert tool("upgrade", tmp_path / "a") == 1
    finally:
        monkeypatch.undo()
        unlock_folder(tmp_path)
    assert "in use by another run" in capsys.readouterr().err


Change = Callable[[dict[str, Any], list[Any]], object]

# What is changed in a folder of an earlier revision: in state.pth, and in the place of the weight's
# only part, which has its offsets, sizes, file, and where it begins and how long it is.
EARLIER: dict[str, Change] = {
    "no parts": lambda content, part: content.pop("parts"),
    "offsets of another dimension": lambda content, part: part.__setitem__(0, (0,)),
    "a part of more dimensions": lambda content, part: part.__setitem__(
        slice(2), [(0, 0, 0), (1, 1, 12)]
    ),
    "a hole at the beginning": lambda content, part: part.__setitem__(
        slice(2), [(1, 0), (2, 4)]
    ),
    "a part beyond the end": lambda content, part: part.__setitem__(0, (1, 0)),
    "no part": lambda content, part: part.clear(),
    "no part of a scalar": lambda content, _: content["parts"].update({"model.n": []}),
    "a part twice": lambda content, _: content["parts"].update(
        {"model.n": content["parts"]["model.n"] * 2}
    ),
    "text for an offset": lambda content, part: part.__setitem__(0, "text"),
    "a beginning beyond the end": lambda content, part: part.__setitem__(3, 1 << 40),
    "a beginning that overflows": lambda content, part: part.__setitem__(3, 1 << 70),
    "a length of nothing": lambda content, part: part.__setitem__(4, 0),
    "a file that the manifest lacks": lambda content, part: part.__setitem__(2, "lost"),
    "a file outside": lambda content, part: part.__setitem__(
        2, "../other/__0_0.distcp"
    ),
}


@without_group
@pytest.mark.parametrize("change", EARLIER.values(), ids=EARLIER.keys())
def test_a_crafted_folder_of_an_earlier_revision_is_not_converted(
    change: Change, tool: Tool, tmp_path: Path, capsys: Capture
) -> None:
    write_earlier(tmp_path / "other")
    folder = tmp_path / "a"
    write_earlier(folder)
    content = torch.load(folder / "state.pth", weights_only=True)
    part = list(content["parts"]["model.w"][0])
    change(content, part)
    if "parts" in content:
        content["parts"]["model.w"] = [part] if part else []
    write_file(content, folder / "state.pth")
    write_earlier_manifest(folder)
    shutil.copy(folder / "__0_0.distcp", folder / "lost")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert tool("upgrade", folder) == 1
    assert capsys.readouterr().err.startswith(f"error: {folder} is not an intact")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@without_group
def test_an_altered_folder_of_an_earlier_revision_is_not_converted(
    tool: Tool, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "a"
    write_earlier(folder)
    shard = folder / "__0_0.distcp"
    raw = shard.read_bytes()
    altered = bytearray(raw)
    altered[len(raw) // 2] ^= 1
    shard.write_bytes(altered)
    assert tool("upgrade", folder) == 1
    assert f"{shard} was altered" in capsys.readouterr().err
    # Of a record that is marked as a folder torch would read nothing.
    altered = bytearray(raw)
    for entry in re.finditer(rb"PK\x01\x02", raw):
        altered[entry.start() + 38] |= 0x10
    shard.write_bytes(altered)
    write_earlier_manifest(folder)
    assert tool("upgrade", folder) == 1
    assert "marked as a folder" in capsys.readouterr().err
