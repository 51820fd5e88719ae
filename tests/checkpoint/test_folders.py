"""Folders of shards: what one process and several ranks write and read, and broken ones."""

import errno
import os
import pickle
import re
import shutil
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from equality import assert_equal
from faults import RunsCode
from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, folders
from hooktrain.checkpoint.files import CorruptCheckpointError, is_folder, write_file
from hooktrain.checkpoint.folders import CheckpointFolder, copy_to_host, save_folder
from hooktrain.checkpoint.loading import read_checkpoint, read_on_all_ranks
from hooktrain.compat.detectron2 import PeriodicCheckpointer
from hooktrain.model.sharding import shard_model
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensors, map_leaves

# Of torch's own tools: without a process group, and of a call of its own in torch 2.9.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage"
)

FILES = [".metadata", "__0_0.distcp", "manifest.pth", "state.pth"]


def state_of(value: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((3, 4), float(value)), "n": torch.tensor(value)},
        "trainer": {"hooks": [1, (2.5, "x", torch.arange(3))], 5: None},
        "iteration": value,
    }


def save(path: Path, value: int) -> Path:
    save_folder(state_of(value), path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    state = state_of(3)
    weights = torch.randn(6, 4)
    state["model"].update(turned=weights.t(), empty=torch.empty(0, 3))
    state["more"] = OrderedDict(half=torch.randn(2).half(), none=None)
    state["norm"] = torch.nn.BatchNorm1d(2).state_dict()
    save_folder(state, tmp_path / "a")
    loaded = read_checkpoint(str(tmp_path / "a"))
    assert loaded["norm"]._metadata == {"": {"version": 2}}
    assert loaded["model"]["turned"].stride() == weights.t().stride()
    assert_equal(loaded, state)
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == FILES
    assert is_folder(tmp_path / "a")
    assert not is_folder(tmp_path)


def test_numbers_of_every_kind_come_back_and_views_as_what_they_show(
    tmp_path: Path,
) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    flags = torch.tensor([True, False, True])
    views = {"conj": numbers.conj(), "imag": numbers.conj().imag, "every": flags[::2]}
    kinds = (torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.uint8)
    converted = [flags.to(kind) for kind in kinds]
    save_folder({"model": views, "kinds": converted}, tmp_path / "a")
    found = CheckpointFolder(tmp_path / "a").read(None)
    assert found["model"]["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["model"]["imag"].tolist() == [-2, 4]
    assert found["model"]["every"].tolist() == [True, True]
    assert [each.dtype for each in found["kinds"]] == list(kinds)
    assert [each.tolist() for each in found["kinds"]] == [[1, 0, 1]] * 4


def test_a_folder_is_saved_and_read_whatever_the_default_device_is(
    tmp_path: Path,
) -> None:
    state = state_of(1)
    folders._container.cache_clear()
    with torch.device("meta"):
        save_folder(state, tmp_path / "a")
        found = read_checkpoint(str(tmp_path / "a"))
    assert_equal(found, state)


def test_a_folder_on_a_file_system_that_cannot_map_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("unable to mmap")

    save(tmp_path / "a", 1)
    monkeypatch.setattr(torch, "from_file", fail)
    assert_equal(CheckpointFolder(tmp_path / "a").read(None), state_of(1))


def test_two_tensors_of_one_dotted_name_are_refused(tmp_path: Path) -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"both named 'a\.b'"):
        save_folder(state, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="mine"):
        save(tmp_path / "mine", 1)
    assert names(tmp_path / "mine") == ["thesis.txt"]


def forge(folder: Path, name: str, content: Any) -> Path:
    """Replace a file by a pickle or by what torch saves, and make the manifest fit it."""
    manifest = torch.load(folder / "manifest.pth", weights_only=True)
    if name.endswith(".pth"):
        torch.save(content, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    if name != "manifest.pth":
        manifest["files"][name] = folders._digest(folder / name)
        write_file(manifest, folder / "manifest.pth")
    return folder


def test_a_folder_of_an_earlier_revision_is_told_how_to_convert_it(
    tmp_path: Path,
) -> None:
    manifest = {"files": {"state.pth": (3, "6ab1")}}
    folder = forge(save(tmp_path / "model_0000009", 9), "manifest.pth", manifest)
    command = re.escape(f"`hooktrain checkpoint upgrade {folder}`")
    with pytest.raises(CorruptCheckpointError, match=command):
        read_checkpoint(str(folder))
    with pytest.raises(CorruptCheckpointError, match=command):
        Checkpointer(nn.Linear(1, 1), tmp_path).resume_or_load("")


@pytest.mark.parametrize("name", ["manifest.pth", "state.pth"])
def test_code_in_a_folder_is_not_run(name: str, tmp_path: Path) -> None:
    folder = forge(save(tmp_path / "a", 1), name, {"code": RunsCode(tmp_path / "ran")})
    with pytest.raises(CorruptCheckpointError, match="mkdir"):
        read_checkpoint(str(folder))
    assert names(tmp_path) == ["a"]


Tables = Callable[[torch.Tensor, torch.Tensor], Any]

# What is changed in the tables of a weight of 3 by 4, which has one part: its offsets and sizes;
# the number of its file, where its container begins and how long it is, and where its numbers are.
TABLES: dict[str, Tables] = {
    "a dimension is missing": lambda boxes, places: (boxes[..., 1:], places),
    "a dimension more": lambda boxes, places: (boxes[..., [0, 1, 1]], places),
    "a column is missing": lambda boxes, places: (boxes, places[:, 1:]),
    "no part": lambda boxes, places: (boxes[:0], places[:0]),
    "no table": lambda boxes, places: ("text", places),
    "a hole at the top": lambda boxes, places: (boxes + box(1, 0, -1, 0), places),
    "a hole at the right": lambda boxes, places: (boxes + box(0, 0, 0, -1), places),
    "a part beyond the end": lambda boxes, places: (boxes + box(1, 0, 0, 0), places),
    "a part twice": lambda boxes, places: (boxes[[0, 0]], places[[0, 0]]),
    "fractions": lambda boxes, places: (boxes + 0.5, places),
    "no such file": lambda boxes, places: (boxes, places + torch.tensor([9, 0, 0, 0])),
    "beyond the end": lambda boxes, places: (
        boxes,
        places + torch.tensor([0, 0, 0, 9999]),
    ),
    "not aligned": lambda boxes, places: (boxes, places + torch.tensor([0, 0, 0, 1])),
}


def box(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).view(2, 2)


STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no state": lambda content: content.pop("state"),
    "no dict": lambda content: content.update(state=[1]),
    "a state without end": lambda content: content["state"].update(deep=DEEP),
}
DEEP: list[Any] = []
for _ in range(600):
    DEEP = [DEEP]


def is_passed_over(folder: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=folder.name):
        read_checkpoint(str(folder))
    model = nn.ParameterDict({"w": torch.zeros(3, 4), "n": torch.zeros(())})
    found = Checkpointer(model, folder.parent).resume_or_load("")
    assert found["iteration"] == 9


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES.keys())
def test_a_crafted_table_is_passed_over_for_an_older_folder(
    change: Tables, tmp_path: Path
) -> None:
    save(tmp_path / "model_0000009", 9)
    folder = save(tmp_path / "model_0000019", 19)
    manifest = torch.load(folder / "manifest.pth", weights_only=True)
    manifest["tensors"]["model.w"] = change(*manifest["tensors"]["model.w"])
    is_passed_over(forge(folder, "manifest.pth", manifest))


@pytest.mark.parametrize("change", STATES.values(), ids=STATES.keys())
def test_a_crafted_state_is_passed_over_for_an_older_folder(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    save(tmp_path / "model_0000009", 9)
    folder = save(tmp_path / "model_0000019", 19)
    content = torch.load(folder / "state.pth", weights_only=True)
    change(content)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    forge(folder, "state.pth", content)
    sys.setrecursionlimit(limit)
    is_passed_over(folder)


CRAFTED = [[], {}, {"files": 3, "tensors": {}}, {"files": {3: (1, 1)}, "tensors": {}}]


@pytest.mark.parametrize("content", CRAFTED)
def test_a_crafted_manifest_is_refused(content: Any, tmp_path: Path) -> None:
    folder = forge(save(tmp_path / "a", 1), "manifest.pth", content)
    with pytest.raises(CorruptCheckpointError, match="intact"):
        CheckpointFolder(folder).verify()


def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    digest = folders._digest(save(tmp_path / "b", 1) / "state.pth")
    content = {"files": {"../b/state.pth": digest}, "tensors": {}}
    folder = forge(save(tmp_path / "a", 1), "manifest.pth", content)
    with pytest.raises(CorruptCheckpointError, match=r"'\.\./b/state\.pth'"):
        CheckpointFolder(folder).verify()


def test_the_metadata_that_torch_has_pickled_is_not_read(tmp_path: Path) -> None:
    code = RunsCode(tmp_path / "ran")
    folder = forge(save(tmp_path / "a", 1), ".metadata", code)
    assert_equal(read_checkpoint(str(folder)), state_of(1))
    assert names(tmp_path) == ["a"]


def test_all_is_on_the_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = []

    def fsync(descriptor: int) -> None:
        trace.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        if Path(target).parent == tmp_path:
            trace.append("renamed")

    real = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path / "a", 1)
    kinds = [re.sub(r"tmp-hooktrain-\d+-.+", "tmp", name) for name in trace]
    files = []
    for name in ("__0_0.distcp", ".metadata", "state.pth", "manifest.pth"):
        files += [f".{name}.tmp", ".a.tmp"]
    assert kinds == [*files, "renamed", tmp_path.name]


def test_parts_of_which_one_hides_a_hole_are_refused(
    sharded: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(sharded, folder)
    manifest = torch.load(folder / "manifest.pth", weights_only=True)
    boxes, _ = manifest["tensors"]["model.weight"]
    assert boxes.tolist() == [[[0, 0], [4, 5]], [[4, 0], [3, 5]]]
    boxes[1, 0, 0] = 3
    forge(folder, "manifest.pth", manifest)
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        read_checkpoint(str(folder))


def write_wrongly(folder: Path) -> list[str]:
    """Rank 1's disk gives back another byte than was written; what each rank has read again."""
    read = []
    real = folders._digest

    def digest(path: Path) -> Any:
        read.append(path.name)
        if path.name == "__1_0.distcp" and "wrong" in path.parent.name:
            data = path.read_bytes()
            path.write_bytes(data[:-1] + b"x")
        return real(path)

    folders._digest = digest
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ParameterDict({"w": distribute_tensor(torch.zeros(2), mesh, [Shard(0)])})
    checkpointer = Checkpointer(model, folder, sharded=True)
    periodic = PeriodicCheckpointer(checkpointer, 1, max_to_keep=1)
    periodic.step(0)
    read.clear()
    periodic.step(1)
    again = sorted(read)
    wrong = outcome(checkpointer.save, "wrong")
    return [wrong, *again]


def test_each_rank_reads_its_own_shard_again_and_no_other(tmp_path: Path) -> None:
    main, other = run_ranks(write_wrongly, 2, tmp_path)
    assert main[0] == other[0]
    assert "wrong/__1_0.distcp does not have the bytes written to it" in main[0]
    assert other[1:] == ["__1_0.distcp"]
    assert main.count("__0_0.distcp") == 1
    assert "__1_0.distcp" not in main
    assert names(tmp_path) == [".lock", "last_checkpoint", "model_0000001"]


def save_on_two_ranks(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0)])
    save_folder({"model": {"weight": weight}, "iteration": 3}, folder)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which each of two ranks has written a part."""
    folder = tmp_path_factory.mktemp("sharded") / "a"
    run_ranks(save_on_two_ranks, 2, folder)
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert sizes[0] >= sizes[1] > sizes[0] / 2
    return folder


@pytest.mark.parametrize("name", [*FILES, "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "hole", "remove"])
def test_a_damaged_file_is_named_before_anything_is_read(
    name: str,
    damage: str,
    sharded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(sharded, folder)
    path = folder / name
    data = path.read_bytes()
    middle = len(data) // 2
    if name == "manifest.pth":
        middle = data.index(b"distcp")
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "hole":
        path.write_bytes(data[:40] + bytes(200) + data[240:])
    else:
        path.write_bytes(data[:-1])
    monkeypatch.setattr(CheckpointFolder, "read", None)
    for verify in (read_checkpoint, lambda path: CheckpointFolder(path).verify()):
        with pytest.raises(CorruptCheckpointError, match=re.escape(name)):
            verify(str(folder))


def test_code_in_a_shard_is_not_run(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 1)
    forge(folder, "__0_0.distcp", RunsCode(tmp_path / "ran"))
    with pytest.raises(CorruptCheckpointError, match=str(folder)):
        read_checkpoint(str(folder))
    assert names(tmp_path) == ["a"]


def test_a_copy_takes_the_memory_of_the_copy_before() -> None:
    weight = nn.Parameter(torch.arange(4.0).view(2, 2))
    state = {"w": weight, "tied": weight, "turned": weight.t(), "empty": torch.ones(0)}
    first, memory = copy_to_host({"model": state, "n": [1, weight[1]]}, {})
    with torch.no_grad():
        weight += 1
    assert_equal(first["model"]["w"], torch.arange(4.0).view(2, 2))
    second, _ = copy_to_host({"model": state, "n": [1, weight[1]]}, memory)
    model, (one, row) = second["model"], second["n"]
    assert model["w"] is model["tied"] is first["model"]["w"]
    assert row is first["n"][1]
    assert not model["w"].requires_grad
    assert_equal(model["w"], torch.arange(1.0, 5.0).view(2, 2))
    assert_equal(model["turned"], torch.arange(1.0, 5.0).view(2, 2).t())
    assert_equal([one, row], [1, torch.tensor([3.0, 4.0])])


def test_what_has_changed_its_type_or_left_the_state_takes_no_memory_of_others() -> (
    None
):
    tensors = [torch.ones(2), torch.ones(2)]
    _, memory = copy_to_host(tensors, {})
    half = tensors[0].view(torch.int32)
    (first, second), memory = copy_to_host([half, tensors[1]], memory)
    assert_equal([first, second], [half, tensors[1]])
    assert len(memory) == 2


def test_files_of_several_megabytes_are_verified_to_their_end(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(400_000.0).double()}}
    save_folder(state, tmp_path / "a")
    assert_equal(read_checkpoint(str(tmp_path / "a")), state)
    (file,) = (tmp_path / "a").glob("*.distcp")
    for place in (1000, 3_000_000):
        raw = bytearray(file.read_bytes())
        raw[place] ^= 1
        file.write_bytes(raw)
        with pytest.raises(CorruptCheckpointError, match="altered"):
            CheckpointFolder(tmp_path / "a").verify()
        raw[place] ^= 1
        file.write_bytes(raw)


def test_sparse_tensors_and_views_of_other_tensors_are_saved_as_they_are(
    tmp_path: Path,
) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"sparse": torch.eye(3).to_sparse(), "turned": numbers.conj().imag}
    state["one"] = numbers[:1].conj().imag
    state["conjugate"] = numbers.conj()
    state["second"] = torch.arange(6.0).view(3, 2)[1:2, 1]
    save_folder({"model": state}, tmp_path / "a")
    loaded = read_checkpoint(str(tmp_path / "a"))["model"]
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert loaded["turned"].tolist() == [-2, 4]
    assert loaded["one"].tolist() == [-2]
    assert loaded["second"].tolist() == [3]
    assert loaded["conjugate"].tolist() == [1 - 2j, 3 + 4j]


def test_each_part_of_a_folder_is_verified_on_its_own(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 1)
    (folder / "__0_0.distcp").write_bytes(b"")
    found = []
    for part in range(3):
        try:
            CheckpointFolder(folder).verify(part, 3)
        except CorruptCheckpointError:
            found.append(part)
    assert found == [1]


def test_a_folder_without_a_part_of_a_tensor_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        folders, "_is_to_be_written", lambda name, tensor: name != "model.w"
    )
    with pytest.raises(ValueError, match=r"model\.w"):
        save(tmp_path / "a", 1)
    assert names(tmp_path) == []


def test_a_sparse_tensor_that_changes_later_does_not_change_its_copy() -> None:
    sparse = torch.eye(2).to_sparse()
    (copied,), _ = copy_to_host([sparse], {})
    sparse.mul_(2)
    assert torch.equal(copied.to_dense(), torch.eye(2))


def test_a_part_with_the_address_of_the_whole_has_memory_of_its_own() -> None:
    whole = torch.arange(6.0)
    copied, memory = copy_to_host([whole, whole[:2]], {})
    again, _ = copy_to_host([whole, whole[:2]], memory)
    for each in (copied, again):
        assert_equal(each, [torch.arange(6.0), torch.arange(2.0)])


def test_views_of_one_memory_and_sparse_tensors_are_copied_as_they_are() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = [
        numbers,
        numbers.conj(),
        numbers.imag,
        numbers.conj().imag,
        torch.eye(3).to_sparse(),
    ]
    expected = [torch.clone(each.resolve_conj().resolve_neg()) for each in state]
    first, memory = copy_to_host(state, {})
    second, _ = copy_to_host(state, memory)
    numbers.zero_()
    for copied in (first, second):
        for mine, theirs in zip(copied, expected, strict=True):
            assert torch.equal(mine.to_dense(), theirs.to_dense())


class OnFirst(torch.Tensor):
    """As one on a device, for a machine without one."""

    device = torch.device("cuda", 0)


class OnSecond(torch.Tensor):
    device = torch.device("cuda", 1)


def copy_tensors_of_one_row() -> list[Any]:
    """Of a tensor of one row, the second rank has an empty shard, which has no address."""
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {
        name: distribute_tensor(torch.full((1, 3), value), mesh, [Shard(0)])
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    copied, _ = copy_to_host(state, {})
    return [copied[name].full_tensor().tolist() for name in state]


def test_tensors_of_which_a_rank_has_no_part_are_copied_each_by_itself() -> None:
    assert run_ranks(copy_tensors_of_one_row, 2) == [[[[1.0] * 3], [[2.0] * 3]]] * 2


def test_a_copy_waits_once_for_each_device_also_if_that_is_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    kinds: list[type[torch.Tensor]] = [OnFirst, OnSecond, OnSecond]
    state = [torch.ones(2).as_subclass(kind) for kind in kinds]
    copy_to_host([*state, torch.ones(2)], {})
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def copy_shards() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.arange(6.0), torch.arange(6.0, 12.0)]
    shards = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
    copied, memory = copy_to_host(shards, {})
    again, _ = copy_to_host(shards, memory)
    for new, old, shard, tensor in zip(again, copied, shards, whole, strict=True):
        assert new.placements == (Shard(0),)
        assert new.to_local().data_ptr() == old.to_local().data_ptr()
        assert new.to_local().data_ptr() != shard.to_local().data_ptr()
        assert_equal(new.full_tensor(), tensor)


def test_shards_are_copied_as_they_are() -> None:
    run_ranks(copy_shards, 2)


def train_shards(folder: Path) -> tuple[Any, Any]:
    """Save a sharded model and its optimizer; what torch reads of it into another model."""
    model = shard_model(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "moments": optimizer.state_dict()["state"]}
    save_folder(state, folder)
    other = map_leaves(lambda _, leaf: torch.zeros_like(leaf), state)
    dcp.load(other, checkpoint_id=folder)
    return full_tensors(state), full_tensors(other)


def test_torch_reads_what_two_ranks_have_written(tmp_path: Path) -> None:
    """dcp.load on the ranks and in one process, and dcp_to_torch_save."""
    (expected, on_ranks), _ = run_ranks(train_shards, 2, tmp_path / "a")
    assert_equal(on_ranks, expected)
    alone = map_leaves(lambda _, leaf: torch.zeros_like(leaf), expected)
    dcp.load(alone, checkpoint_id=tmp_path / "a")
    assert_equal(alone, expected)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pth")
    found = torch.load(tmp_path / "a.pth", weights_only=True)
    named: dict[str, Any] = {}

    def take(keys: tuple[Any, ...], leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            named[".".join(map(str, keys))] = leaf

    map_leaves(take, expected)
    assert len(named) == 7 + 4 * 3
    assert_equal(found, named)


def read_on_two_axes(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {
        "replicated": [Replicate(), Replicate()],
        "hybrid": [Replicate(), Shard(0)],
        "columns": [Shard(0), Shard(1)],
        "twice": [Shard(0), Shard(0)],
    }
    full = torch.arange(15.0).reshape(3, 5)  # fewer rows than ranks
    model = nn.ParameterDict(
        {n: distribute_tensor(full, mesh, p) for n, p in placements.items()}
    )
    save_folder({"model": dict(model)}, folder)
    whole = folder.with_name("whole")
    save_folder({"model": dict.fromkeys(placements, full)}, whole)
    halves = nn.ParameterDict({n: p.detach().half() for n, p in model.items()})
    for path, reader in ((folder, model), (whole, model), (folder, halves)):
        for name, tensor in CheckpointFolder(path).read(reader)["model"].items():
            assert tensor.placements == tuple(placements[name])
            assert torch.equal(tensor.full_tensor(), full)


def test_shards_of_a_mesh_of_two_axes_are_put_together(tmp_path: Path) -> None:
    run_ranks(read_on_two_axes, 4, tmp_path / "a")
    tables = torch.load(tmp_path / "a" / "manifest.pth", weights_only=True)["tensors"]
    # Of equal shards one rank writes one, and not always the same rank. Empty ones count.
    parts = {
        name.removeprefix("model."): places for name, (_, places) in tables.items()
    }
    assert {name: len(places) for name, places in parts.items()} == {
        "replicated": 1,
        "hybrid": 2,
        "columns": 4,
        "twice": 4,
    }
    assert parts["replicated"][0, 0] != parts["hybrid"][0, 0]
    state = read_checkpoint(str(tmp_path / "a"))["model"]
    assert len(state) == 4
    for tensor in state.values():
        assert torch.equal(tensor, torch.arange(15.0).reshape(3, 5))


def outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail_on_rank_1(folder: Path) -> list[str]:
    """What each of several saves and loads raises, where rank 1 alone has a problem."""
    is_main = dist.get_rank() == 0
    background = Checkpointer(nn.Linear(1, 1), folder, sharded=True, background=True)
    found = []
    real = folders._digest
    if not is_main:
        folders._digest = disk_full
    found.append(outcome(save_folder, state_of(1), folder / "a"))
    background.save("a")
    found.append(outcome(background.wait))
    folders._digest = real
    mesh = init_device_mesh("cpu", (2,))
    shards = {"x": distribute_tensor(torch.zeros(2), mesh, [Shard(0)])}
    found.append(outcome(save_folder, {} if is_main else shards, folder / "a"))
    save_folder(state_of(1 if is_main else 2), folder / "main")
    save_folder(state_of(1), folder / "good")
    if is_main:
        (folder / "good" / "manifest.pth").write_bytes(b"")
    comm.synchronize()
    found.append(outcome(read_on_all_ranks, str(folder / "good"), nn.Linear(1, 1)))
    return found


def save_to_another_disk(folder: Path) -> str:
    """What a save raises, where rank 1 has a disk of its own and does not see the folder."""
    real = folders.on_main_process
    if dist.get_rank() == 1:
        folders.on_main_process = lambda *args: Path("/other") / str(real(*args))[1:]
    return outcome(save_folder, state_of(1), folder / "a")


def test_ranks_that_do_not_share_the_disk_are_told(tmp_path: Path) -> None:
    main, other = run_ranks(save_to_another_disk, 2, tmp_path)
    assert main == other
    assert re.match(r"OSError: /other\S+ is missing.* share the disk", main)
    assert names(tmp_path) == []


def test_a_folder_that_vanishes_before_its_files_are_written_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folders.on_main_process

    def vanish(function: Any, group: Any) -> Any:
        result = real(function, group)
        (tmp_path / "out").rename(tmp_path / "gone")
        return result

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(folders, "on_main_process", vanish)
    with pytest.raises(FileNotFoundError):
        save_folder(state_of(1), tmp_path / "out" / "model")


def disk_full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "no space to write on rank 1")


def test_what_fails_on_one_rank_is_raised_on_all_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    main, other = run_ranks(fail_on_rank_1, 2, tmp_path)
    assert main[2:] == other[2:]
    full, full_in_background, lacking, altered = main
    assert "OSError: [Errno 28] no space to write on rank 1" in full
    assert "no space to write on rank 1" in full_in_background
    assert "ValueError: a rank has {'x'}" in lacking
    assert "CorruptCheckpointError" in altered
    assert "manifest.pth" in altered
    assert names(tmp_path) == ["good", "main"]
    # Of what is not sharded, the main process's is saved.
    assert_equal(read_checkpoint(str(tmp_path / "main")), state_of(1))


def die_in_a_save(folder: Path) -> None:
    if dist.get_rank() == 1:
        folders._digest = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    save_folder(state_of(2), folder / "a")


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    save_folder(state_of(1), tmp_path / "a")
    with pytest.raises(RuntimeError):
        run_ranks(die_in_a_save, 2, tmp_path)
    assert_equal(read_checkpoint(str(tmp_path / "a")), state_of(1))
    Checkpointer(nn.Linear(1, 1), tmp_path).begin_run()
    assert names(tmp_path) == [".lock", "a"]
