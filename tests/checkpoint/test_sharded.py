"""Sharded folders, written and read by one process."""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_toys import FILES, names, save, state_of
from storage_toys import equal

from hooktrain.checkpoint import sharded
from hooktrain.checkpoint.folder import is_sharded
from hooktrain.checkpoint.manifest import verify_folder
from hooktrain.checkpoint.sharded import ShardedSaver, save_sharded
from hooktrain.checkpoint.sharded_loading import load_sharded, read_sharded
from hooktrain.checkpoint.storage import save_file

LIMIT = 20.0


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    state = state_of(3)
    weights = torch.randn(6, 4)
    state["model"].update(turned=weights.t(), rows=weights[2:4], empty=torch.empty(0, 3))
    state["more"] = OrderedDict(half=torch.randn(2).half(), z=torch.randn(2) * 1j, none=None)
    state["sparse"] = torch.eye(3).to_sparse()
    state["sets"] = {1, "a"}
    save_sharded(state, tmp_path / "a")
    loaded = load_sharded(tmp_path / "a")
    assert equal(loaded.pop("sparse").to_dense(), torch.eye(3))
    del state["sparse"]
    assert equal(loaded, state)


def test_versions_of_modules_come_back(tmp_path: Path) -> None:
    state = {"model": torch.nn.BatchNorm1d(2).state_dict()}
    save_sharded(state, tmp_path / "a")
    assert load_sharded(tmp_path / "a")["model"]._metadata == {"": {"version": 2}}


def test_the_folder_holds_its_files_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "new" / "a", 1)
    assert names(folder) == FILES
    assert names(tmp_path / "new") == ["a"]
    assert is_sharded(folder)
    assert not is_sharded(tmp_path)
    manifest = verify_folder(folder)
    assert (manifest["world_size"], manifest["torch"]) == (1, torch.__version__)
    assert sorted(manifest["files"]) == [".metadata", "__0_0.distcp", "state.pth"]


def test_tensors_are_read_into_those_that_are_there(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 3)
    into = {"model": {"w": torch.zeros(3, 4, dtype=torch.float64)}}
    loaded = load_sharded(folder, into)
    assert loaded["model"]["w"] is into["model"]["w"]
    assert equal(into["model"]["w"], torch.full((3, 4), 3.0, dtype=torch.float64))
    assert equal(loaded["model"]["n"], torch.tensor(3))


@pytest.mark.parametrize(
    ("into", "problem"),
    [
        ({"model": {"w": torch.zeros(3, 5)}}, r"model\.w has the shape \(3, 4\) .*\(3, 5\)"),
        (
            {"model": {"v": torch.zeros(3, 4)}},
            r"lacks 1 .* as 'model\.v'; .* 'model\.[wn]'",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_read(
    into: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "a", 3)
    into["model"]["n"] = torch.tensor(0)
    with pytest.raises(ValueError, match=problem):
        load_sharded(folder, into)
    assert into["model"]["n"] == 0


def test_the_structure_has_shapes_without_data(tmp_path: Path) -> None:
    structure = read_sharded(save(tmp_path / "a", 3), "meta")
    weight = structure["model"].pop("w")
    assert (weight.device.type, weight.shape, weight.dtype) == ("meta", (3, 4), torch.float32)
    assert structure["trainer"]["iteration"] == 3


@pytest.mark.parametrize(
    ("value", "key"),
    [(object(), "trainer.x"), (torch.empty(2, device="meta"), "trainer.x")],
    ids=["object", "meta"],
)
def test_what_cannot_be_loaded_is_refused_by_its_key(value: Any, key: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"cannot save .*{key}"):
        save_sharded({"trainer": {"x": value}}, tmp_path / "a")
    assert names(tmp_path) == []


def test_two_tensors_of_one_dotted_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"both named 'a\.b'"):
        save_sharded({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, tmp_path / "a")


def test_a_sharded_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    save(tmp_path / "a", 2)
    assert equal(load_sharded(tmp_path / "a"), state_of(2))
    assert names(tmp_path) == ["a"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="no sharded checkpoint"):
        save(tmp_path / "mine", 1)
    assert names(tmp_path) == ["mine"]
    assert names(tmp_path / "mine") == ["thesis.txt"]


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing in the background goes on when it is set."""
    go = threading.Event()

    def wait_and_save(*args: Any) -> None:
        assert go.wait(LIMIT)
        save_file(*args)

    monkeypatch.setattr(sharded, "save_file", wait_and_save)
    return go


def test_in_the_background_the_state_of_the_call_is_saved(
    go: threading.Event, tmp_path: Path
) -> None:
    saver, state = ShardedSaver(), state_of(1)
    saver.save(state, tmp_path / "a")
    state["model"]["w"].zero_()
    state["trainer"]["hooks"].append(3)
    assert not saver.poll()
    assert not (tmp_path / "a").exists()
    go.set()
    saver.finish()
    assert equal(load_sharded(tmp_path / "a"), state_of(1))
    assert saver.poll()


def test_a_poll_finishes_what_has_been_written(tmp_path: Path) -> None:
    saver = ShardedSaver()
    saver.save(state_of(1), tmp_path / "a")
    while not saver.poll():
        pass
    assert equal(load_sharded(tmp_path / "a"), state_of(1))


def test_the_next_save_finishes_the_one_before(go: threading.Event, tmp_path: Path) -> None:
    saver = ShardedSaver()
    go.set()
    saver.save(state_of(1), tmp_path / "a")
    saver.save(state_of(2), tmp_path / "b")
    assert equal(load_sharded(tmp_path / "a"), state_of(1))
    saver.finish()
    assert equal(load_sharded(tmp_path / "b"), state_of(2))


def test_what_failed_in_the_background_is_raised_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("disk gone")

    saver = ShardedSaver()
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "save_file", fail)
        saver.save(state_of(1), tmp_path / "a")
        with pytest.raises(OSError, match="disk gone"):
            saver.save(state_of(2), tmp_path / "b")
    assert names(tmp_path) == []
    saver.save(state_of(2), tmp_path / "b")
    saver.finish()
    assert names(tmp_path) == ["b"]
