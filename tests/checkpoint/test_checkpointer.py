import argparse
import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_toys import Counter, equal, messages, model_of
from torch import nn

from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    PeriodicCheckpointer,
    load_file,
)
from hooktrain.engine.hooks import BestCheckpointer, Preemption


def test_a_save_comes_back_from_files_as_in_detectron2_and_the_rest_is_returned(
    tmp_path: Path,
) -> None:
    saved = model_of(3)
    Checkpointer(saved, tmp_path, trainer=Counter(5)).save(
        "a", iteration=9, note=[1, "x"]
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pth", "last_checkpoint"]
    assert (tmp_path / "last_checkpoint").read_text() == "a.pth"
    state = torch.load(tmp_path / "a.pth", weights_only=True)
    assert list(state) == ["model", "trainer", "iteration", "note"]
    assert torch.equal(state["model"]["weight"], saved.weight)
    model, trainer = model_of(0), Counter()
    rest = Checkpointer(model, trainer=trainer).load(tmp_path / "a.pth")
    assert torch.equal(model.weight, saved.weight)
    assert (trainer.value, trainer.only) == (5, None)
    assert rest == {"iteration": 9, "note": [1, "x"]}


@pytest.mark.parametrize(
    "content", [[1, 2], {"iteration": 3}, {"model": 3}, {}, torch.ones(1)]
)
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
    assert "save_dir is empty" in messages(caplog)
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


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "sub/model", "/tmp/model", "../model"]
)
def test_a_name_with_a_folder_or_a_hidden_one_is_refused(
    name: str, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path)
    for use in (
        checkpointer.save,
        lambda prefix: PeriodicCheckpointer(checkpointer, 1, file_prefix=prefix),
        lambda prefix: BestCheckpointer(
            1, checkpointer, "accuracy", file_prefix=prefix
        ),
        lambda prefix: Preemption(checkpointer, file_prefix=prefix),
    ):
        with pytest.raises(
            ValueError, match=f"visible file name without a folder, got '{name}'"
        ):
            use(name)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    extra = {"lr": [np.float64(0.5)], "flag": np.bool_(True)}
    Checkpointer(model_of(3), tmp_path, trainer=Counter(np.int64(5))).save("a", **extra)
    loaded = load_file(tmp_path / "a.pth")
    assert equal(loaded["trainer"], {"value": 5, "optimizer": 7})
    assert equal([loaded["lr"], loaded["flag"]], [[0.5], True])


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


def test_a_save_without_tag_leaves_the_resume_point_and_only_a_file_of_the_folder_can_be_it(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path / "out")
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.save("model_best", tag=False, iteration=4)
    assert checkpointer.get_checkpoint_file() == str(
        tmp_path / "out" / "model_0000009.pth"
    )
    (tmp_path / "b.pth").touch()
    for name in ("b.pth", "../b.pth"):
        with pytest.raises(FileNotFoundError, match=r"b\.pth"):
            checkpointer.tag_last_checkpoint(name)
    assert checkpointer.resume_or_load("") == {"iteration": 9}
    checkpointer.tag_last_checkpoint("model_best.pth")
    assert checkpointer.resume_or_load("") == {"iteration": 4}


def test_a_process_that_does_not_write_still_gathers_the_states(tmp_path: Path) -> None:
    class Asked(Counter):
        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return super().state_dict()

    asked = Asked()
    checkpointer = Checkpointer(
        model_of(3), tmp_path, save_to_disk=False, trainer=asked
    )
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
    with pytest.raises(
        TypeError, match="'x' has no state_dict or no load_state_dict: <object"
    ):
        checkpointer.add_checkpointable("x", object())
    with pytest.raises(ValueError, match=r"'a\.b'"):
        checkpointer.add_checkpointable("a.b", Counter())
    with pytest.raises(TypeError, match="'bad'"):
        Checkpointer(model_of(3), bad=3)
    checkpointer.add_checkpointable("ema", Counter())
    assert list(checkpointer.checkpointables) == ["trainer", "ema"]


@pytest.mark.parametrize("saves", [True, False])
def test_leftover_temporary_files_are_swept_as_a_run_begins_or_saves(
    tmp_path: Path, saves: bool
) -> None:
    stale = tmp_path / ".model_0000009.pth.tmp-999999999-0a1b2c3d"
    stale.write_bytes(b"half a checkpoint")
    checkpointer = Checkpointer(model_of(3), tmp_path)
    checkpointer.resume_or_load("")
    assert (
        stale.exists()
    )  # looking at a folder, perhaps of a living run, changes nothing in it
    if saves:
        checkpointer.save("a")
    else:
        checkpointer.begin_run()
    assert (
        sorted(p.name for p in tmp_path.iterdir())
        == ["a.pth", "last_checkpoint"][: 2 * saves]
    )


class Plain(Counter):
    def load_state_dict(self, state: dict[str, int]) -> None:  # type: ignore[override]
        self.value = state["value"]


def test_a_load_tells_what_is_missing_and_what_was_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save(
        "a", iteration=9, note=1
    )
    ema = Counter(1)
    with caplog.at_level(logging.INFO):
        rest = Checkpointer(model_of(0), ema=ema).load(tmp_path / "a.pth")
    assert "holds no ['ema']" in messages(caplog)
    assert "not loaded: trainer, note" in messages(caplog, logging.INFO)
    assert "iteration" not in messages(caplog, logging.INFO)
    assert sorted(rest) == ["iteration", "note", "trainer"]
    assert ema.value == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Checkpointer(model_of(0), trainer=Counter(1)).load(
            tmp_path / "a.pth", checkpointables=[]
        )
    assert messages(caplog, logging.INFO).endswith("not loaded: note")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Checkpointer(model_of(0)).load(tmp_path / "a.pth")
    assert "not loaded" not in messages(caplog, logging.INFO)


def test_a_resume_refuses_a_file_that_lacks_a_state_unless_told_what_to_load(
    tmp_path: Path,
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a", iteration=9)
    model, trainer = model_of(0), Counter()
    checkpointer = Checkpointer(model, tmp_path, trainer=trainer, ema=Counter())
    with pytest.raises(ValueError, match=r"checkpointables: 'ema' is not in .*a\.pth"):
        checkpointer.resume_or_load("")
    assert trainer.value == 0
    assert torch.equal(model.weight, torch.zeros(1, 2))
    assert checkpointer.resume_or_load("", checkpointables=["trainer"]) == {
        "iteration": 9
    }
    assert trainer.value == 5
    assert torch.equal(model.weight, torch.full((1, 2), 3.0))


@pytest.mark.parametrize(
    ("names", "value", "only"),
    [
        ([], 0, None),
        (["model"], 0, None),
        (["model", "trainer"], 5, None),
        (["trainer.optimizer"], 5, {"optimizer"}),
        (["model", "trainer.optimizer", "trainer.value"], 5, {"optimizer", "value"}),
        (["trainer.optimizer", "trainer"], 5, None),
        (["trainer", "trainer.optimizer"], 5, None),
    ],
)
def test_components_are_selected_by_name(
    names: list[str], value: int, only: set[str] | None, tmp_path: Path
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a")
    model, trainer = model_of(0), Counter()
    Checkpointer(model, trainer=trainer).load(tmp_path / "a.pth", checkpointables=names)
    assert torch.equal(model.weight, torch.full((1, 2), 3.0))
    assert (trainer.value, trainer.only) == (value, only)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["trainr"], "'trainr' is not among .*did you mean 'trainer'"),
        (
            ["trainer.optimiser"],
            "'trainer.optimiser' is not in .*did you mean 'optimizer'",
        ),
        (["ema"], r"'ema' is not in .*a\.pth; there is"),
        (["zzz"], r"'zzz' is not among .*there is 'ema', 'trainer'"),
        (["model.weight"], "'model.weight' is not among"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    names: list[str], message: str, tmp_path: Path
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a")
    model = model_of(0)
    checkpointer = Checkpointer(model, trainer=Counter(), ema=Counter())
    with pytest.raises(ValueError, match=message):
        checkpointer.load(tmp_path / "a.pth", checkpointables=names)
    assert torch.equal(model.weight, torch.zeros(1, 2))


def test_a_component_of_what_loads_only_as_a_whole_is_refused_beforehand(
    tmp_path: Path,
) -> None:
    Checkpointer(model_of(3), tmp_path, plain=Plain(5)).save("a")
    model = model_of(0)
    with pytest.raises(TypeError, match=r"'plain\.optimizer' alone"):
        Checkpointer(model, plain=Plain()).load(tmp_path / "a.pth", ["plain.optimizer"])
    assert torch.equal(model.weight, torch.zeros(1, 2))


def test_a_file_of_which_nothing_fits_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    wrapped = nn.ModuleDict({"backbone": model_of(3)})
    Checkpointer(wrapped, tmp_path, trainer=Counter(5)).save("a")
    trainer = Counter()
    checkpointer = Checkpointer(model_of(0), tmp_path, trainer=trainer)
    expected = (
        r"nothing .* fits the model: it has {'backbone.weight': \(1, 2\), .*prefix="
    )
    for load in (
        checkpointer.resume_or_load,
        lambda _: checkpointer.load(tmp_path / "a.pth"),
    ):
        with pytest.raises(ValueError, match=expected):
            load("")
    assert trainer.value == 0


def test_an_empty_path_starts_from_scratch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert Checkpointer(model_of(0)).load("") == {}
    assert "initial weights" in messages(caplog, logging.INFO)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"/nowhere/a\.pth"):
        Checkpointer(model_of(0)).load("/nowhere/a.pth")
    with pytest.raises(FileNotFoundError, match=r"/nowhere/a\.pth"):
        Checkpointer(model_of(0)).resume_or_load("/nowhere/a.pth")


def test_a_broken_file_changes_nothing_and_the_next_load_works(tmp_path: Path) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a")
    good = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "broken.pth").write_bytes(good[:-100])
    model, trainer = model_of(0), Counter()
    checkpointer = Checkpointer(model, trainer=trainer)
    with pytest.raises(CorruptCheckpointError, match=r"broken\.pth"):
        checkpointer.load(tmp_path / "broken.pth")
    assert (trainer.value, model.weight.tolist()) == (0, [[0.0, 0.0]])
    checkpointer.load(tmp_path / "a.pth")
    assert (trainer.value, model.weight.tolist()) == (5, [[3.0, 3.0]])


def test_without_resume_only_the_model_of_the_given_file_is_loaded(
    tmp_path: Path,
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save(
        "model_0000009", iteration=9
    )
    Checkpointer(model_of(8), tmp_path / "pre", trainer=Counter(6)).save("a")
    for folder, resume in ((tmp_path, False), (tmp_path / "fresh", True)):
        model, trainer = model_of(0), Counter()
        checkpointer = Checkpointer(model, folder, trainer=trainer)
        checkpointer.resume_or_load(tmp_path / "pre" / "a.pth", resume=resume)
        assert (trainer.value, model.weight.tolist()) == (0, [[8.0, 8.0]])


def test_all_files_are_listed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path)
    assert checkpointer.get_all_checkpoint_files() == []
    for name in ("b", "a"):
        checkpointer.save(name)
    (tmp_path / "metrics.json").touch()
    (tmp_path / "folder.pth").mkdir()
    expected = [str(tmp_path / "a.pth"), str(tmp_path / "b.pth")]
    assert checkpointer.get_all_checkpoint_files() == expected


@pytest.mark.parametrize(
    "overwrite", [False, True], ids=["a new file", "the same file"]
)
def test_a_failure_at_any_step_of_a_save_leaves_the_old_or_the_new_state(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_name = "model_0000009" if overwrite else "model_0000019"
    for failing_call in range(1, 7):
        folder = tmp_path / str(failing_call)
        Checkpointer(model_of(1), folder).save("model_0000009", iteration=9)
        left = failing_call

        def fails_once(real: Any) -> Any:
            def call(*args: Any) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise OSError(errno.EIO, "the disk failed")
                real(*args)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails_once(os.fsync))
            patch.setattr(os, "replace", fails_once(os.replace))
            with pytest.raises(
                OSError, match=f"the disk failed: '{folder}/{new_name}.pth'"
            ):
                Checkpointer(model_of(2), folder).save(new_name, iteration=19)
        model = model_of(0)
        iteration = Checkpointer(model, folder).resume_or_load("")["iteration"]
        assert (iteration, model.weight[0, 0].item()) in [(9, 1.0), (19, 2.0)]
        assert not [p for p in folder.iterdir() if ".tmp-" in p.name]
