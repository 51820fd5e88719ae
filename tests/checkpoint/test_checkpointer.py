import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointer_toys import Counter, messages, model_of
from torch import nn

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, load_file


def test_a_save_comes_back_and_the_rest_is_returned(tmp_path: Path) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a", iteration=9, note=[1, "x"])
    model, trainer = model_of(0), Counter()
    rest = Checkpointer(model, trainer=trainer).load(tmp_path / "a.pth")
    assert torch.equal(model.weight, torch.full((1, 2), 3.0))
    assert (trainer.value, trainer.only) == (5, None)
    assert rest == {"iteration": 9, "note": [1, "x"]}


def test_the_files_are_as_in_detectron2(tmp_path: Path) -> None:
    model = model_of(3)
    Checkpointer(model, tmp_path, trainer=Counter(5)).save("model_0000009", iteration=9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last_checkpoint", "model_0000009.pth"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000009.pth"
    state = torch.load(tmp_path / "model_0000009.pth", weights_only=True)
    assert list(state) == ["model", "trainer", "iteration"]
    assert torch.equal(state["model"]["weight"], model.weight)


def test_a_bare_state_dict_is_taken_as_the_model(tmp_path: Path) -> None:
    torch.save(model_of(4).state_dict(), tmp_path / "weights.pth")
    model = model_of(0)
    assert Checkpointer(model).load(tmp_path / "weights.pth") == {}
    assert torch.equal(model.weight, torch.full((1, 2), 4.0))


@pytest.mark.parametrize("content", [[1, 2], {"iteration": 3}, {"model": 3}, {}, torch.ones(1)])
def test_a_file_without_a_model_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(CorruptCheckpointError, match=r"a\.pth is no checkpoint"):
        Checkpointer(model_of(0)).load(tmp_path / "a.pth")


def test_the_wrapper_is_taken_off_on_both_sides(tmp_path: Path) -> None:
    model = model_of(3)
    checkpointer = Checkpointer(nn.DataParallel(model), tmp_path)
    assert checkpointer.model is model
    checkpointer.save("a")
    assert list(load_file(tmp_path / "a.pth")["model"]) == ["weight", "bias"]
    torch.save({"model": nn.DataParallel(model).state_dict()}, tmp_path / "wrapped.pth")
    for name in ("a.pth", "wrapped.pth"):
        target = model_of(0)
        Checkpointer(nn.DataParallel(target)).load(tmp_path / name)
        assert torch.equal(target.weight, model.weight)


def test_without_a_folder_nothing_is_saved_or_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Checkpointer(model_of(3), tmp_path).save("a", iteration=1)
    monkeypatch.chdir(tmp_path)
    model = model_of(0)
    checkpointer = Checkpointer(model, "")
    checkpointer.save("b")
    checkpointer.save("c")
    assert sorted(os.listdir()) == ["a.pth", "last_checkpoint"]
    assert messages(caplog).count("save_dir is empty") == 1
    assert not checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() == ""
    assert checkpointer.get_all_checkpoint_files() == []
    assert checkpointer.resume_or_load("") == {}
    assert torch.equal(model.weight, torch.zeros(1, 2))
    monkeypatch.undo()


def test_the_folder_is_made_at_the_first_save(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path / "out" / "run")
    assert not (tmp_path / "out").exists()
    assert not checkpointer.has_checkpoint()
    checkpointer.save("a")
    assert checkpointer.get_checkpoint_file() == str(tmp_path / "out" / "run" / "a.pth")


@pytest.mark.parametrize("name", ["", ".", "..", "sub/model", "/tmp/model", "../model"])
def test_a_name_with_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be a file name without a folder"):
        Checkpointer(model_of(3), tmp_path).save(name)
    assert list(tmp_path.iterdir()) == []


def test_extra_entries_do_not_replace_states(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path, trainer=Counter())
    with pytest.raises(ValueError, match=r"\['model', 'trainer'\]"):
        checkpointer.save("a", trainer=1, model=2, iteration=3)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_come_back_is_refused_by_its_key(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path)
    checkpointer.save("a", iteration=1)
    with pytest.raises(TypeError, match=r"args of type argparse\.Namespace"):
        checkpointer.save("a", iteration=2, args=argparse.Namespace())
    assert load_file(tmp_path / "a.pth")["iteration"] == 1


def test_a_save_without_tag_leaves_the_resume_point(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path)
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.save("model_best", tag=False, iteration=4)
    assert checkpointer.get_checkpoint_file() == str(tmp_path / "model_0000009.pth")
    assert checkpointer.resume_or_load("") == {"iteration": 9}
    checkpointer.tag_last_checkpoint("model_best.pth")
    assert checkpointer.resume_or_load("") == {"iteration": 4}


def test_only_a_file_of_the_folder_can_be_tagged(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path / "out")
    checkpointer.save("a")
    (tmp_path / "b.pth").touch()
    for name in ("b.pth", "../b.pth"):
        with pytest.raises(FileNotFoundError, match=r"b\.pth"):
            checkpointer.tag_last_checkpoint(name)
    assert (tmp_path / "out" / "last_checkpoint").read_text() == "a.pth"


def test_a_process_that_does_not_write_still_gathers_the_states(tmp_path: Path) -> None:
    class Asked(Counter):
        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return super().state_dict()

    asked = Asked()
    checkpointer = Checkpointer(model_of(3), tmp_path, save_to_disk=False, trainer=asked)
    checkpointer.save("a")
    assert asked.asked == 1
    assert list(tmp_path.iterdir()) == []
    assert not checkpointer.save_to_disk
    assert Checkpointer(model_of(3)).save_to_disk


def test_checkpointables_are_checked_when_added() -> None:
    checkpointer = Checkpointer(model_of(3), trainer=Counter())
    for taken in ("trainer", "model"):
        with pytest.raises(KeyError, match=taken):
            checkpointer.add_checkpointable(taken, Counter())
    with pytest.raises(TypeError, match=r"'x' of type object has no state_dict\(\)"):
        checkpointer.add_checkpointable("x", object())
    with pytest.raises(ValueError, match=r"'a\.b'"):
        checkpointer.add_checkpointable("a.b", Counter())
    with pytest.raises(TypeError, match="'bad'"):
        Checkpointer(model_of(3), bad=3)
    checkpointer.add_checkpointable("ema", Counter())
    assert list(checkpointer.checkpointables) == ["trainer", "ema"]


def test_leftover_temporary_files_are_swept_at_the_first_save(tmp_path: Path) -> None:
    stale = tmp_path / ".model_0000009.pth.tmp-999999999-0a1b2c3d"
    stale.write_bytes(b"half a checkpoint")
    checkpointer = Checkpointer(model_of(3), tmp_path)
    checkpointer.resume_or_load("")
    assert stale.exists()  # looking at a folder, perhaps of a living run, changes nothing in it
    checkpointer.save("a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pth", "last_checkpoint"]
