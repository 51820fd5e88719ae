"""Folders of shards, written and read by one process, and what happens to broken ones."""

import errno
import json
import os
import pickle
import re
import resource
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import equal, overwrite

from hooktrain.checkpoint import folders
from hooktrain.checkpoint.files import CorruptCheckpointError, is_folder
from hooktrain.checkpoint.folders import read_folder, save_folder, verify_folder
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.utils.file_io import is_disk_full, sweep

FILES = [".metadata", "__0_0.distcp", "manifest.json", "state.pth"]


def state_of(value: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((3, 4), float(value)), "n": torch.tensor(value)},
        "trainer": {
            "iteration": value,
            "hooks": [1, (2.5, "x", torch.arange(3))],
            5: None,
        },
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
    state["model"].update(
        turned=weights.t(), rows=weights[2:4], empty=torch.empty(0, 3)
    )
    state["more"] = OrderedDict(
        half=torch.randn(2).half(), z=torch.randn(2) * 1j, none=None
    )
    state["sparse"] = torch.eye(3).to_sparse()
    state["sets"] = {1, "a"}
    state["norm"] = torch.nn.BatchNorm1d(2).state_dict()
    save_folder(state, tmp_path / "a")
    loaded = read_checkpoint(tmp_path / "a")
    assert loaded["norm"]._metadata == {"": {"version": 2}}
    assert equal(loaded.pop("sparse").to_dense(), torch.eye(3))
    del state["sparse"]
    assert equal(loaded, state)


def test_the_layout_of_tensors_comes_back(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    save_folder({"model": {"weight": weight}}, tmp_path / "a")
    assert (
        read_checkpoint(tmp_path / "a")["model"]["weight"].stride() == weight.stride()
    )


def test_the_folder_holds_its_files_and_nothing_is_left_beside_it(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path / "a", 1)
    assert names(folder) == FILES
    assert names(tmp_path) == ["a"]
    assert is_folder(folder)
    assert not is_folder(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest) == [".metadata", "__0_0.distcp", "state.pth"]


def test_without_data_the_structure_has_the_shapes(tmp_path: Path) -> None:
    structure = read_folder(save(tmp_path / "a", 3), map_location="meta")
    weight = structure["model"].pop("w")
    assert (weight.device.type, weight.shape, weight.dtype) == (
        "meta",
        (3, 4),
        torch.float32,
    )
    assert structure["trainer"]["iteration"] == 3


def test_two_tensors_of_one_dotted_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"both named 'a\.b'"):
        save_folder({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, tmp_path / "a")


def test_a_sharded_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    save(tmp_path / "a", 2)
    assert equal(read_checkpoint(tmp_path / "a"), state_of(2))
    assert names(tmp_path) == ["a"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="no sharded checkpoint"):
        save(tmp_path / "mine", 1)
    assert names(tmp_path) == ["mine"]
    assert names(tmp_path / "mine") == ["thesis.txt"]


def must_not_read(*args: Any) -> None:
    raise AssertionError("a tensor was read before the files were verified")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "hole", "empty", "remove"])
def test_a_damaged_file_is_named_before_anything_is_read(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a", 1) / name
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "hole":
        path.write_bytes(data[:100] + bytes(100) + data[200:])
    else:
        path.write_bytes(data[:-1] if damage == "truncate" else b"")
    monkeypatch.setattr(folders, "_read_tensors", must_not_read)
    monkeypatch.setattr(torch, "load", must_not_read)
    for read in (read_checkpoint, verify_folder):
        # A name that is wrong in the manifest is that of a missing file.
        with pytest.raises(
            CorruptCheckpointError, match=r"missing|altered|" + re.escape(name)
        ):
            read(tmp_path / "a")


def test_every_flipped_bit_of_the_manifest_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "a", 1) / "manifest.json"
    good = path.read_bytes()
    for position, byte in enumerate(good):
        for bit in (1, 4, 32):
            overwrite(
                path, good[:position] + bytes([byte ^ bit]) + good[position + 1 :]
            )
            with pytest.raises(CorruptCheckpointError):
                verify_folder(tmp_path / "a")


def test_no_folder_is_told_from_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        verify_folder(tmp_path / "a")
    with pytest.raises(CorruptCheckpointError, match=r"has no manifest\.json"):
        verify_folder(tmp_path)


def forge(folder: Path, name: str, content: Any) -> Path:
    """Replace a file by a pickle or by what torch saves, and make the manifest fit it."""
    if isinstance(content, dict):
        torch.save(content, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    digests = {
        n: folders._digest(folder / n) for n in names(folder) if n != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps(digests))
    return folder


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    code = Malicious(tmp_path / "ran")
    for name, content in [("state.pth", {"code": code}), ("__0_0.distcp", code)]:
        folder = forge(save(tmp_path / "a", 1), name, content)
        with pytest.raises(
            (CorruptCheckpointError, pickle.UnpicklingError), match="mkdir"
        ):
            read_checkpoint(folder)
    # torch's own description of the folder is not read.
    assert equal(
        read_checkpoint(forge(save(tmp_path / "a", 1), ".metadata", code)), state_of(1)
    )
    assert names(tmp_path) == ["a"]


def test_a_folder_says_where_all_of_its_tensors_are(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 1)
    content = torch.load(folder / "state.pth", weights_only=True)
    del content["parts"]["model.w"]
    with pytest.raises(
        CorruptCheckpointError, match=r"lacks the tensors \['model\.w'\]"
    ):
        read_checkpoint(forge(folder, "state.pth", content))
    for other in (content["state"], {"a": 1}):
        with pytest.raises(
            CorruptCheckpointError, match="does not say where the parts"
        ):
            read_checkpoint(forge(folder, "state.pth", other))


def test_a_manifest_cannot_refer_to_files_elsewhere(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 1)
    files = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps({"../a/state.pth": files["state.pth"]})
    )
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        verify_folder(folder)


class Killed(BaseException):
    """As a kill: nobody catches it to clean up."""


def break_at(patch: pytest.MonkeyPatch, n: int, error: BaseException) -> list[str]:
    """Let the n-th of the calls that change a folder raise, and the later ones if it is a kill."""
    made: list[str] = []

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) == n or (len(made) > n and isinstance(error, Killed)):
                raise error
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "unlink"):
        patch.setattr(os, name, faulty(name, getattr(os, name)))
    patch.setattr(shutil, "rmtree", faulty("rmtree", shutil.rmtree))
    return made


@pytest.mark.parametrize("replace", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken"), Killed()], ids=["fails", "killed"]
)
def test_whatever_call_breaks_the_old_or_the_new_one_is_there(
    error: BaseException, replace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    for n in range(1, 100):
        parent = tmp_path / str(n)
        parent.mkdir()
        target = parent / "a"
        if replace:
            save(target, 1)
        with monkeypatch.context() as patch:
            made = break_at(patch, n, error)
            try:
                save(target, 2)
                broke = False
            except (OSError, Killed):
                broke = True
        if n > len(made):
            break
        if isinstance(error, OSError):
            assert target.exists() or not replace
        sweep(parent)
        assert names(parent) in ([], ["a"])
        found = read_checkpoint(target)["iteration"] if target.exists() else None
        assert found is None or equal(read_checkpoint(target), state_of(found))
        assert found in ({1, 2} if replace else {None, 2})
        assert broke or found == 2
        outcomes.add((broke, found))
    assert not broke
    assert n > 8
    assert {(True, 1 if replace else None), (True, 2)} <= outcomes


def test_an_error_leaves_nothing_to_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 1)
    with monkeypatch.context() as patch:
        break_at(patch, 2, OSError(errno.EIO, "broken"))
        with pytest.raises(OSError, match="broken"):
            save(tmp_path / "b", 2)
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("limit", [500, 3_000])
def test_a_full_disk_says_so_and_keeps_the_old_folder(
    limit: int, tmp_path: Path
) -> None:
    save(tmp_path / "a", 1)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(OSError, match=r"no space to write .*bytes free") as caught:
            save(tmp_path / "a", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert is_disk_full(caught.value)
    assert names(tmp_path) == ["a"]
    assert equal(read_checkpoint(tmp_path / "a"), state_of(1))


def test_all_is_on_the_disk_before_the_folder_gets_its_name_and_then_the_name(
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
    kinds = [re.sub(r"tmp-\d+-\w+", "tmp", name) for name in trace]
    assert kinds == [
        "__0_0.distcp",
        ".metadata.tmp",
        ".state.pth.tmp",
        ".a.tmp",
        ".manifest.json.tmp",
        ".a.tmp",
        "renamed",
        tmp_path.name,
    ]
