"""Copies of states in kept memory, and states that are written in the background from them."""

import copy
import io
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_toys import equal
from torch import nn

from hooktrain.checkpoint.background_saver import BackgroundSaver
from hooktrain.checkpoint.staging import StagingBuffers
from hooktrain.checkpoint.storage import load_file, save_file

LIMIT = 20.0


def nested_state() -> dict[str, Any]:
    weight = torch.randn(4, 5)
    model = OrderedDict(weight=weight, rows=weight[1:3], turned=weight.t())
    model._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return {
        "model": model,
        "half": torch.randn(3).half(),
        "list": [torch.arange(3), (torch.empty(0), torch.tensor(7), "text")],
        "sparse": torch.eye(3).to_sparse(),
        "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
        "settings": {"betas": [0.9, 0.99], "names": {"a"}, "raw": bytearray(b"xy")},
    }


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_staged_state_is_written_byte_for_byte_as_the_state_itself() -> None:
    state = nested_state()
    del state["conjugated"]  # its copy has the conjugated values, and no mark for later
    assert saved(StagingBuffers().stage(state)) == saved(state)


def test_a_staged_state_does_not_see_what_happens_afterwards() -> None:
    state = nested_state()
    before = copy.deepcopy(state)
    staged = StagingBuffers().stage(state)
    state["model"]["weight"].zero_()
    state["half"].zero_()
    state["sparse"].values().zero_()
    state["conjugated"].zero_()
    state["list"][1][1].zero_()
    state["settings"]["betas"].append(1.0)
    state["settings"]["names"].add("b")
    state["settings"]["raw"].extend(b"z")
    for copied in (staged, before):
        assert equal(copied.pop("sparse").to_dense(), torch.eye(3))
    assert equal(staged, before)
    assert not equal(staged, state)


def test_tensors_that_share_memory_are_copied_once_and_share_the_copy() -> None:
    model = StagingBuffers().stage(nested_state())["model"]
    model["weight"][1, 0] = 42
    assert model["rows"][0, 0] == 42
    assert model["turned"][0, 1] == 42


def test_tensors_of_one_address_and_different_lengths_are_told_apart() -> None:
    data = bytearray(range(8))
    state = [torch.frombuffer(data, dtype=torch.uint8, count=n) for n in (2, 8, 4)]
    assert equal(StagingBuffers().stage(state), state)


def addresses(state: dict[str, Any]) -> list[int]:
    return [tensor.data_ptr() for tensor in state.values()]


def test_memory_is_kept_for_the_next_state_of_the_same_shape() -> None:
    buffers = StagingBuffers()
    first = addresses(buffers.stage({"a": torch.zeros(1000), "b": torch.zeros(3)}))
    again = buffers.stage({"a": torch.ones(1000), "b": torch.ones(3)})
    assert addresses(again) == first
    assert equal(again, {"a": torch.ones(1000), "b": torch.ones(3)})


def test_memory_is_replaced_only_where_a_size_has_changed() -> None:
    buffers = StagingBuffers()
    first = buffers.stage({"a": torch.zeros(1000), "b": torch.zeros(3)})
    then = buffers.stage({"a": torch.ones(1000), "b": torch.ones(5)})
    assert addresses(then)[0] == addresses(first)[0]
    assert equal(then["b"], torch.ones(5))
    assert equal(first["b"], torch.zeros(3))


def test_parameters_become_tensors_without_a_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    staged = StagingBuffers().stage([parameter, (parameter * 2).unsqueeze(0)])
    assert equal(staged, [torch.ones(2), torch.full((1, 2), 2.0)])
    assert not any(tensor.requires_grad for tensor in staged)


def test_a_state_is_written_in_the_background_as_it_was_when_it_was_saved(tmp_path: Path) -> None:
    saver, go = BackgroundSaver(), threading.Event()
    weight = torch.ones(3)

    def write(state: dict[str, Any]) -> None:
        assert go.wait(LIMIT)
        save_file(state, tmp_path / "a.pth")

    saver.save({"w": weight, "iteration": 1}, write)
    weight.zero_()
    assert saver.is_busy
    assert not (tmp_path / "a.pth").exists()
    go.set()
    saver.wait()
    assert equal(load_file(tmp_path / "a.pth"), {"w": torch.ones(3), "iteration": 1})


def test_the_kept_memory_is_not_touched_before_the_save_before_has_ended() -> None:
    saver, go, seen = BackgroundSaver(), threading.Event(), []

    def write(state: dict[str, Any]) -> None:
        assert go.wait(LIMIT)
        seen.append(state["w"].clone())

    saver.save({"w": torch.ones(3)}, write)
    second = threading.Thread(target=saver.save, args=({"w": torch.zeros(3)}, write))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go.set()
    second.join()
    saver.wait()
    assert equal(seen, [torch.ones(3), torch.zeros(3)])


def test_what_fails_in_the_background_comes_back_at_the_next_save(tmp_path: Path) -> None:
    saver, path = BackgroundSaver(), tmp_path / "missing" / "a.pth"
    saver.save({"iteration": 1}, lambda state: save_file(state, path))
    with pytest.raises(FileNotFoundError, match="missing"):
        saver.save({"iteration": 2}, lambda state: save_file(state, tmp_path / "b.pth"))
    saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_is_refused_at_once_by_its_key() -> None:
    saver = BackgroundSaver()
    with pytest.raises(TypeError, match=r"trainer\.loader"):
        saver.save({"trainer": {"loader": object()}}, print)
    assert not saver.is_busy
