"""Which checkpoint a resume takes, whatever happened to the folder, and which ones are deleted."""

import logging
import os
import shutil
import time
from collections import OrderedDict
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, save_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import (
    archive_folder,
    checkpoint_names,
    delete_after_verifying,
    files_to_delete,
    names_to_resume,
    pointed_iteration,
    put_aside,
    write_iteration,
)
from hooktrain.compat.detectron2 import PeriodicCheckpointer
from hooktrain.engine import SimpleTrainer, hooks
from hooktrain.solver import LinearParamScheduler
from hooktrain.utils.file_io import lock_folder
from processes import LIMIT_SECONDS, end, start, wait_until


def save(folder: Path, name: str, iteration: int, sharded: bool = False) -> Path:
    """Save a model whose weight is the iteration."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, iteration)
    Checkpointer(model, folder, sharded=sharded).save(name, iteration=iteration)
    return folder / (name if sharded else f"{name}.pth")


def resumed(folder: Path) -> int | None:
    """The iteration that a resume arrives at, None if it starts from scratch."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, -1)
    checkpointer = Checkpointer(model, folder)
    iteration = checkpointer.resume_or_load("").get("iteration")
    assert model.weight.item() == (-1 if iteration is None else iteration)
    assert checkpointer.has_checkpoint() == (iteration is not None)
    return iteration


def names(*iterations: int, prefix: str = "model") -> list[str]:
    return [f"{prefix}_{i:07d}.pth" for i in iterations]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints and a best one, the pointer at the newest."""
    save(tmp_path, "model_best", 14)
    for iteration in (9, 19, 29):
        save(tmp_path, f"model_{iteration:07d}", iteration)
    return tmp_path


def flip(path: Path) -> None:
    """Flip one bit in the middle of a weight."""
    raw = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["model"]["weight"]
    raw[raw.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(raw)


def test_the_file_of_the_pointer_is_taken_in_silence(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(folder) == 29
    # Others write whole paths, and the folder may have been moved since.
    for path in ("model_0000019.pth\n", "/moved/from/model_0000019.pth"):
        (folder / "last_checkpoint").write_text(path)
        assert resumed(folder) == 19
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "pointer",
    [
        None,
        b"",
        b"\x00\xff\xfe garbage",
        b"model_0000039.pth",
        b"/elsewhere/model_0000039.pth",
        b".",
        b"x" * 10_000,
    ],
)
def test_without_a_good_pointer_the_newest_file_is_taken(
    pointer: bytes | None, folder: Path
) -> None:
    if pointer is None:
        (folder / "last_checkpoint").unlink()
    else:
        (folder / "last_checkpoint").write_bytes(pointer)
    os.utime(folder / "model_0000009.pth")  # the clock has no say
    assert resumed(folder) == 29
    assert Checkpointer(nn.Linear(1, 1), folder).get_checkpoint_file() == str(
        folder / "model_0000029.pth"
    )


def test_a_pointer_to_what_is_not_there_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "last_checkpoint").write_text("/elsewhere/model_0000039.pth")
    assert resumed(folder) == 29
    assert "'model_0000039.pth', which is not in" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign", "no model"])
def test_every_kind_of_damage_is_passed_over(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "model_0000029.pth"
    if damage == "flip":
        flip(path)
    elif damage == "cut":
        os.truncate(path, 100)
    elif damage == "foreign":
        path.write_bytes(b"GIF89a")
    else:
        torch.save({"iteration": 29}, path)
    assert resumed(folder) == 19
    assert str(path) in caplog.text


def test_if_no_file_is_intact_every_one_is_named_with_its_reason(folder: Path) -> None:
    flip(folder / "model_0000009.pth")
    (folder / "model_0000019.pth").write_bytes(b"")
    (folder / "model_0000029.pth").write_bytes(b"hello")
    with pytest.raises(CorruptCheckpointError) as caught:
        resumed(folder)
    found = [line.partition(":") for line in str(caught.value).splitlines()[1:]]
    assert [name.strip() for name, _, _ in found] == names(29, 19, 9)
    reasons = ["not a zip file", "not a zip file", "checksum"]
    for (_, _, text), reason in zip(found, reasons, strict=True):
        assert reason in text


def test_a_lone_broken_final_file_without_a_pointer_does_not_start_the_run_anew(
    tmp_path: Path,
) -> None:
    flip(save(tmp_path, "model_final", 99))
    (tmp_path / "last_checkpoint").unlink()
    with pytest.raises(CorruptCheckpointError, match="model_final"):
        resumed(tmp_path)


def test_the_final_file_is_compared_by_the_iteration_in_it(folder: Path) -> None:
    save(folder, "model_final", 99)
    assert resumed(folder) == 99
    (folder / "last_checkpoint").unlink()
    assert resumed(folder) == 99
    save(folder, "model_0000149", 149)  # the run was made longer
    assert resumed(folder) == 149
    (folder / "last_checkpoint").unlink()
    assert resumed(folder) == 149


@pytest.mark.parametrize("sharded", [False, True])
def test_after_a_broken_final_file_comes_the_newest_one_of_its_run(
    sharded: bool, folder: Path
) -> None:
    save(folder, "model_0090009", 90_009)  # of an earlier run, which was longer
    path = save(folder, "model_final", 39, sharded)
    os.truncate(path / "state.pth" if sharded else path, 100)
    assert resumed(folder) == 29
    # The run was made longer then.
    save(folder, "model_0000049", 49)
    save(folder, "model_0000059", 59)
    flip(folder / "model_0000059.pth")
    assert resumed(folder) == 49
    (folder / "last_checkpoint").unlink()
    assert resumed(folder) == 90_009


def test_after_a_broken_file_comes_an_older_one(folder: Path) -> None:
    save(folder, "model_0090009", 90_009)
    twin = save(folder, "model_0000019", 19, sharded=True)
    (folder / "last_checkpoint").write_text("model_0000019.pth")
    flip(folder / "model_0000019.pth")
    assert resumed(folder) == 19  # the folder of that name
    shutil.rmtree(twin)
    assert resumed(folder) == 9
    flip(folder / "model_0000009.pth")
    assert resumed(folder) == 90_009


@pytest.mark.parametrize("name", ["embeddings.pth", "glove_300.pth", "web"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_what_somebody_else_has_put_there_is_left_out(
    name: str, is_alone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_alone:
        save(tmp_path, "model_0000009", 9)
        (tmp_path / "last_checkpoint").unlink()
    if name.endswith(".pth"):
        (tmp_path / name).write_bytes(b"word2vec")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pth").write_text("{}")
    assert resumed(tmp_path) == (None if is_alone else 9)
    assert name in caplog.text or not is_alone
    assert resumed(save(tmp_path, "model_0000019", 19).parent) == 19


def test_a_folder_with_the_name_of_a_file_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, "model_0000009", 9)
    for name in ("model_0000019.pth", "model_0000029"):
        (tmp_path / name).mkdir()
    (tmp_path / "last_checkpoint").write_text("model_0000019.pth")
    assert names_to_resume(tmp_path) == ["model_0000009.pth"]
    assert resumed(tmp_path) == 9


def hold(folder: Path) -> None:
    lock_folder(folder)
    (folder / "held").touch()
    time.sleep(LIMIT_SECONDS)


def test_what_a_run_that_still_trains_has_is_not_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    save(folder, "model_best", 9)
    save(folder, "model_0000009", 9)
    other = start(hold, folder)
    try:
        wait_until((folder / "held").exists)
        for rename in (partial(put_aside, names=["model_best.pth"]), archive_folder):
            with pytest.raises(RuntimeError, match=f"hooktrain-{other.pid}-"):
                rename(folder)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert checkpoint_names(folder) == ["model_0000009.pth", "model_best.pth"]
    finally:
        other.kill()
        end(other)


@pytest.mark.parametrize("iteration", [torch.tensor(9), "9", None])
def test_weights_without_a_number_of_an_iteration_are_left_out(
    iteration: Any, tmp_path: Path
) -> None:
    content = {"model": nn.Linear(1, 1).state_dict(), "iteration": iteration}
    save_file(content, tmp_path / "model_final.pth")
    assert resumed(tmp_path) is None


def test_an_empty_or_missing_folder_starts_from_scratch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(tmp_path) is None
    assert resumed(tmp_path / "none") is None
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


OTHERS = [
    *("model_final.pth", "model_best.pth", "metrics.json"),
    "model_123456.pth",  # six digits
    *(
        "model_0000001.pt",
        "model_0000001.pth.bak",
        ".model_0000001.pth.tmp-hooktrain-1-a",
    ),
    *("model_ema_0000001.pth", "xmodel_0000001.pth", *names(1, 2, 3, prefix="other")),
]


@pytest.mark.parametrize(
    ("there", "prefix", "keep", "newest", "deleted"),
    [
        (names(29, 9, 39, 19), "model", 2, 39, names(9, 19)),  # oldest first
        (names(9, 19), "model", 2, 19, []),
        ([], "model", 1, 19, []),
        # In the order of the numbers, not of the letters.
        (names(9_999_999, 10_000_009), "model", 1, 10_000_009, names(9_999_999)),
        # Only numbered files of the prefix.
        ([*OTHERS, *names(1, 2)], "model", 1, 2, names(1)),
        (OTHERS, "other", 2, 3, names(1, prefix="other")),
        # Some are of a longer run.
        (names(9, 19, 29, 90_009, 90_019), "model", 2, 29, names(9)),
    ],
)
def test_the_oldest_files_beyond_the_count_are_deleted(
    there: list[str],
    prefix: str,
    keep: int,
    newest: int,
    deleted: list[str],
    tmp_path: Path,
) -> None:
    for name in there:
        (tmp_path / name).touch()
    assert files_to_delete(tmp_path, prefix, keep, newest) == deleted


def test_the_file_to_resume_from_is_not_deleted(folder: Path) -> None:
    (folder / "last_checkpoint").write_text("model_0000009.pth")
    assert files_to_delete(folder, "model", 1, 29) == names(19)


def test_a_used_folder_is_renamed_whole(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for iteration, aside in [(9, "out.1"), (19, "out.2")]:
        save(folder, "model_0000009", iteration)
        (folder / "metrics.json").write_text(str(iteration))
        assert archive_folder(folder) == tmp_path / aside
        assert list(folder.iterdir()) == []
        assert (tmp_path / aside / "metrics.json").read_text() == str(iteration)
        assert resumed(tmp_path / aside) == iteration
    lock_folder(folder)
    assert (folder / ".lock").exists()  # the lock is not that of the renamed folder


@pytest.mark.parametrize("initial", ["~/out/model_0000009.pth", "out/../out/x.pth"])
def test_a_folder_with_the_weights_to_start_from_is_not_renamed(
    initial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "out", "model_0000009", 9)
    with pytest.raises(ValueError, match=f"init_checkpoint='{initial}'"):
        archive_folder(tmp_path / "out", initial)
    assert resumed(tmp_path / "out") == 9


def test_a_checkpoint_that_cannot_be_deleted_is_told_and_the_others_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = Path.unlink

    def refuse(path: Path, **options: bool) -> None:
        if path.name == "model_0000009.pth":
            raise OSError("is busy")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    delete_after_verifying(str(folder / "model_0000029.pth"), names(9, 19))
    assert checkpoint_names(folder) == [*names(9, 29), "model_best.pth"]
    assert "is busy" in caplog.text


def test_files_that_mmengine_numbers_by_epochs_are_resumed(tmp_path: Path) -> None:
    for epoch in (9, 10):
        save(tmp_path, f"epoch_{epoch}", epoch)
    (tmp_path / "last_checkpoint").unlink()
    assert names_to_resume(tmp_path) == ["epoch_10.pth", "epoch_9.pth"]
    assert resumed(tmp_path) == 10


def test_the_names_of_a_run_have_seven_digits_and_are_sorted(tmp_path: Path) -> None:
    for name in ("model_000009.pth", *names(19, 9, 12345678, 29)):
        (tmp_path / name).touch()
    ours = names(9, 19, 29, 12345678)
    assert checkpoint_names(tmp_path) == sorted(["model_000009.pth", *ours])
    assert names_to_resume(tmp_path) == ours[::-1]


def test_a_broken_newest_file_keeps_the_older_ones(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = folder / "model_0000029.pth"
    flip(newest)
    delete_after_verifying(str(newest), names(9, 19))
    newest.unlink()
    delete_after_verifying(str(newest), names(9, 19))
    assert checkpoint_names(folder) == [*names(9, 19), "model_best.pth"]
    assert caplog.text.count("Keeping all older checkpoints") == 2


def test_a_broken_final_file_is_tried_after_all_others(folder: Path) -> None:
    path = save(folder, "model_final", 39)
    path.write_bytes(path.read_bytes()[:100])
    (folder / "last_checkpoint").unlink()
    assert names_to_resume(folder) == [*names(29, 19, 9), "model_final.pth"]


def test_a_final_checkpoint_without_an_iteration_has_no_limit(tmp_path: Path) -> None:
    assert pointed_iteration(tmp_path, "model_final.pth") is None
    write_iteration(tmp_path, None)
    assert pointed_iteration(tmp_path, "model_final.pth") is None
    write_iteration(tmp_path, 39)
    assert pointed_iteration(tmp_path, "model_final.pth") == 39
    assert pointed_iteration(tmp_path, "") is None


def test_a_folder_without_checkpoints_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    save_file({"weight": torch.ones(1)}, tmp_path / "out" / "pretrained.pth")
    assert archive_folder(tmp_path / "out") is None
    assert archive_folder(tmp_path / "none") is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_current_folder_is_not_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "model_0000009", 9)
    (tmp_path / "inside").mkdir()
    for current in (tmp_path, tmp_path / "inside"):
        monkeypatch.chdir(current)
        with pytest.raises(ValueError, match="output folder"):
            archive_folder(tmp_path)
    assert resumed(tmp_path) == 9


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Files and folders of shards in turn; the pointer at the newest, a folder."""
    for iteration in (9, 19):
        save(tmp_path, f"model_{iteration:07d}", iteration)
        save(tmp_path, f"model_{iteration + 5:07d}", iteration + 5, sharded=True)
    return tmp_path


def test_the_newest_good_one_is_resumed_be_it_a_file_or_a_folder(mixed: Path) -> None:
    assert resumed(mixed) == 24
    for name, before in [
        ("model_0000024/__0_0.distcp", 19),
        ("model_0000019.pth", 14),
        ("model_0000014/state.pth", 9),
    ]:
        os.truncate(mixed / name, 100)
        assert resumed(mixed) == before
    os.truncate(mixed / "model_0000009.pth", 100)
    with pytest.raises(CorruptCheckpointError, match="intact"):
        resumed(mixed)


def test_files_and_folders_are_counted_together(mixed: Path) -> None:
    checkpointer = Checkpointer(nn.Linear(1, 1), mixed, sharded=True)
    PeriodicCheckpointer(checkpointer, 10, max_to_keep=2).step(29)
    assert checkpoint_names(mixed) == ["model_0000024", "model_0000029"]


def test_a_folder_that_was_moved_aside_counts_until_it_is_put_back(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, "model_final", 9, sharded=True)
    aside = path.rename(
        tmp_path / "model_final.old-hooktrain-99999-host"
    )  # and killed then
    assert resumed(tmp_path) == 9
    Checkpointer(nn.Linear(1, 1), tmp_path).begin_run()
    assert not aside.exists()
    assert resumed(tmp_path) == 9


def test_a_copy_that_somebody_has_put_aside_is_neither_resumed_nor_deleted(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, "model_0000009", 9, sharded=True)
    path.rename(tmp_path / "model_0000009.old-2026-11-23")
    assert resumed(tmp_path) is None
    save(tmp_path, "model_0000019", 19)
    assert files_to_delete(tmp_path, "model", 1, 29) == []


def test_a_folder_that_is_being_written_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, "model_0000009", 9, sharded=True)
    path.rename(tmp_path / ".model_0000009.tmp-hooktrain-1-host")
    assert resumed(tmp_path) is None


class Slope(nn.Module):
    """Its gradient is the batch, so that all numbers are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).sum()}


def history(values: list[float], iterations: list[int], hint: bool) -> dict[str, Any]:
    return {
        "count": len(values),
        "finite_sum": sum(values),
        "iterations": torch.tensor(iterations),
        "non_finite_count": 0,
        "smoothing_hint": hint,
        "values": torch.tensor(values, dtype=torch.float64),
        "written": {},
    }


# What the trainer of the test below wrote after 4 of 8 iterations, with the hooks' states of before
# an evaluation was an event: hooks that polled for metrics kept the iterations of those.
EARLIER = {
    "iteration": 3,
    "model": OrderedDict(weight=torch.tensor([-1.3984375, -2.796875])),
    "trainer": {
        "data": {"epoch": 0},
        "hooks": {
            "BestCheckpointer": {
                "best_iter": 3,
                "best_metric": 1.3984375,
                "metric": "acc",
            },
            "EMA": {
                "steps": torch.tensor(4),
                "module.weight": torch.tensor([-1.1577906608581543, -2.315581321716]),
            },
            "EarlyStopping": {"best": 1.3984375, "seen_iter": 3, "waited": 0},
            "LRScheduler": {
                "schedulers": {"": [{"base_lrs": [0.5], "last_epoch": 4}]},
                "seen_iters": {},
            },
        },
        "iteration": 3,
        "meta": {"hooktrain": "0.1.0", "torch": "2.13.0+cpu", "world_size": 1},
        "optimizer": {
            "inner_count": 4,
            "kind": "SGD",
            "param_groups": [
                {
                    "dampening": 0,
                    "differentiable": False,
                    "foreach": None,
                    "fused": None,
                    "initial_lr": 0.5,
                    "lr": 0.25,
                    "maximize": False,
                    "momentum": 0.5,
                    "nesterov": False,
                    "params": ["weight"],
                    "weight_decay": 0,
                }
            ],
            "skipped_updates": 0,
            "state": {"weight": {"momentum_buffer": torch.tensor([1.875, 3.75])}},
        },
        "seed": 3,
        "storage": {
            "file_sizes": {},
            "info": {},
            "iteration": 3,
            "metrics": {
                "acc": history([0.15625, 1.3984375], [1, 3], False),
                "loss": history([5.0, 2.5, -0.78125, -4.0625], [0, 1, 2, 3], True),
                "lr": history([0.5, 0.4375, 0.375, 0.3125], [0, 1, 2, 3], False),
            },
        },
    },
}


def test_a_run_with_the_hooks_of_an_earlier_version_goes_on_exactly(
    tmp_path: Path,
) -> None:
    save_file(EARLIER, tmp_path / "model_0000003.pth")
    (tmp_path / "last_checkpoint").write_text("model_0000003.pth")
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    trainer = SimpleTrainer(model, repeat(torch.tensor([1.0, 2.0])), optimizer)
    saver = Checkpointer(model, tmp_path, trainer=trainer)
    early = hooks.EarlyStopping("acc", "max", patience=2)
    ema = hooks.EMA(model, decay=0.5)
    trainer.register_hooks(
        [
            ema,
            hooks.LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)),
            hooks.EvalHook(2, lambda: {"acc": -model.weight[0].item()}),
            early,
            hooks.BestCheckpointer(saver, "acc", "max"),
            hooks.PeriodicCheckpointer(saver, 4),
        ]
    )
    assert saver.resume_or_load("") == {"iteration": 3}
    trainer.train(max_iter=8)
    # What that version itself arrived at.
    assert model.weight.tolist() == [-2.62451171875, -5.2490234375]
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert momentum.tolist() == [1.9921875, 3.984375]
    assert ema.state_dict()["steps"] == 8
    assert early.state_dict() == {"best": 2.62451171875, "waited": 0}
    best = read_checkpoint(str(tmp_path / "model_best.pth"))["best"]
    assert best["best_metric"] == 2.62451171875
    losses = [loss for loss, _ in trainer.storage.history("loss").values()]
    assert losses[:4] == [5.0, 2.5, -0.78125, -4.0625]
    assert losses[4:] == [-6.9921875, -9.4140625, -11.259765625, -12.5]
