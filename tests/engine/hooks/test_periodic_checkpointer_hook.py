import errno
import math
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    PeriodicCheckpointer,
    Preemption,
)
from hooktrain.utils import comm
from toys import Idle, linear_trainer


@pytest.fixture(params=[False, True], ids=["at once", "in the background"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the checkpointer."""
    return {"background": request.param}


def run(
    folder: Path,
    max_iter: int,
    *hooks: Any,
    options: Any = None,
    resume: bool = True,
    parts: list[str] | None = None,
    **kwargs: Any,
) -> Any:
    trainer = linear_trainer(*hooks, gather_metric_period=1)
    checkpointer = Checkpointer(
        trainer.model, folder, **(options or {}), trainer=trainer
    )
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, **kwargs)])
    checkpointer.resume_or_load("", resume=resume, checkpointables=parts)
    trainer.train(max_iter=max_iter)
    return trainer


def fail_at(iteration: int) -> CallbackHook:
    return CallbackHook(before_step=lambda trainer: 1 // (trainer.iter != iteration))


def run_and_fail(folder: Path, iteration: int, *hooks: Any, **kwargs: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        run(folder, 6, fail_at(iteration), *hooks, **{"period": 2, **kwargs})


def names(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.name != "last_checkpoint"
    )


def pointer(folder: Path) -> str:
    return (folder / "last_checkpoint").read_text()


def test_it_saves_each_period_and_model_final_at_the_end(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path, 6, options=options, period=2)
    assert names(tmp_path) == [
        "model_0000001.pth",
        "model_0000003.pth",
        "model_final.pth",
    ]
    assert pointer(tmp_path) == "model_final.pth"
    final = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert final["iteration"] == final["trainer"]["iteration"] == 5


def test_a_run_that_begins_anew_is_never_resumed_from_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 4, period=2)
    run_and_fail(tmp_path, 1, resume=False)  # before its first checkpoint
    assert (
        "moved ['model_0000001.pth', 'model_final.pth', 'last_checkpoint']"
        in caplog.text
    )
    assert [path.name for path in tmp_path.iterdir()] == ["earlier-1"]
    resumed = run(tmp_path, 3, period=2)
    assert resumed.start_iter == 0
    assert "Not resuming from ['earlier-1']" in caplog.text
    run_and_fail(tmp_path, 3, resume=False)
    assert names(tmp_path) == ["earlier-1", "earlier-2", "model_0000001.pth"]
    assert run(tmp_path, 6, period=2).start_iter == 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_new_run_in_a_used_folder_leaves_the_earlier_one_complete(
    sharded: bool, tmp_path: Path
) -> None:
    def train(max_iter: int, failing: int = -1) -> None:
        accuracy = CallbackHook(
            after_step=lambda t: t.storage.put_scalar("accuracy", 9 * max_iter - t.iter)
        )
        trainer = linear_trainer(accuracy, fail_at(failing))
        checkpointer = Checkpointer(
            trainer.model, tmp_path, sharded=sharded, trainer=trainer
        )
        other = Checkpointer(
            trainer.model, tmp_path, sharded=sharded
        )  # as for a second model
        trainer.register_hooks(
            [
                BestCheckpointer(1, checkpointer, "accuracy"),
                PeriodicCheckpointer(checkpointer, 1, max_to_keep=1),
                PeriodicCheckpointer(other, 1, max_to_keep=1, file_prefix="second"),
            ]
        )
        trainer.train(max_iter=max_iter)

    end = "" if sharded else ".pth"
    run = [f"{name}{end}" for name in ("model_best", "model_final", "second_final")]
    numbered = [f"{name}_0000002{end}" for name in ("model", "second")]
    torch.save({}, tmp_path / "embeddings.pth")
    train(4)
    assert names(tmp_path) == sorted(["embeddings.pth", *run, *numbered])
    old = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    with pytest.raises(ZeroDivisionError):
        train(3, failing=2)
    mine = [f"{name}_0000001{end}" for name in ("model", "second")]
    assert names(tmp_path) == sorted(["earlier-1", "embeddings.pth", run[0], *mine])
    moved = {
        path.name: path.stat().st_ino for path in (tmp_path / "earlier-1").iterdir()
    }
    assert moved.items() == old.items() - {("embeddings.pth", old["embeddings.pth"])}


def test_a_run_from_parts_of_an_earlier_one_begins_with_the_same_until_it_has_saved(
    tmp_path: Path,
) -> None:
    earlier = run(tmp_path, 4, period=2).model.fc.weight
    seen: list[torch.Tensor] = []
    for _ in range(3):
        look = CallbackHook(
            before_train=lambda t: seen.append(t.model.fc.weight.clone())
        )
        run_and_fail(tmp_path, 1, look, parts=["model"])
        assert names(tmp_path) == ["earlier-1", "model_final.pth"]
        assert torch.equal(seen[-1], earlier)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "harm", ["the folder is gone", "a file is in the way", "a folder is"]
)
def test_a_run_goes_on_when_its_folder_is_gone_or_something_is_in_the_way(
    harm: str, sharded: bool, options: dict[str, Any], tmp_path: Path, caplog: Any
) -> None:
    folder = tmp_path / "out"
    in_the_way = [folder / ("model_0000003" if sharded else "model_0000003.pth")]
    in_the_way.append(folder / "last_checkpoint")

    def strike(trainer: Any) -> None:
        if trainer.iter != 3:
            return
        if harm == "the folder is gone":
            folder.rename(tmp_path / "gone")  # perhaps while it is being saved to
            return
        trainer._hooks[-1].checkpointer.wait()
        in_the_way[1].unlink()
        for path in in_the_way[: 1 if harm == "a file is in the way" else 2]:
            if harm == "a file is in the way" and sharded:
                path.write_text("mine")
            else:
                path.mkdir()
                (path / "mine").touch()

    options = {**options, "sharded": sharded}
    run(folder, 6, CallbackHook(before_step=strike), options=options, period=2)
    assert run(folder, 6, options=options, period=2).start_iter == 6
    if harm != "the folder is gone":
        assert (folder / "earlier-1" / in_the_way[0].name).exists()
        assert f"Something else has the name of {in_the_way[0]}" in caplog.text


def test_a_run_that_is_stopped_early_has_its_final_checkpoint(
    options: dict[str, Any], tmp_path: Path
) -> None:
    stop = CallbackHook(after_step=lambda t: t.iter == 2 and t.request_stop("enough"))
    run(tmp_path, 10, stop, options=options, period=100)
    assert names(tmp_path) == ["model_final.pth"]
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["iteration"] == 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_failed_run_leaves_no_final_checkpoint_but_the_one_that_was_under_way(
    options: dict[str, Any], sharded: bool, tmp_path: Path
) -> None:
    run_and_fail(tmp_path, 3, options={**options, "sharded": sharded}, period=3)
    assert names(tmp_path) == ["model_0000002" if sharded else "model_0000002.pth"]
    assert pointer(tmp_path) == names(tmp_path)[0]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_in_the_background_is_told_while_the_run_goes_on(
    sharded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    told = []

    def see(trainer: Any) -> None:
        while any("checkpoint" in thread.name for thread in threading.enumerate()):
            pass
        told.append("NOT SAVED" in caplog.text)

    monkeypatch.setattr("hooktrain.checkpoint.checkpointer.write_file", full)
    monkeypatch.setattr("hooktrain.checkpoint.folders.write_file", full)
    hook = CallbackHook(before_step=see)
    with pytest.raises(OSError, match="no space"):
        run(
            tmp_path,
            7,
            hook,
            options={"background": True, "sharded": sharded},
            period=4,
        )
    assert told == [False] * 4 + [True] * 3  # saved, in vain, after the fourth step
    assert names(tmp_path) == []


class Windows(Idle):
    """A trainer with a window of accumulation open after some iterations."""

    open_after: tuple[int, ...] = ()

    @property
    def can_save(self) -> bool:
        return self.iter not in self.open_after


@pytest.mark.parametrize(
    ("open_after", "saved"),
    [((1,), [2, 3]), ((3, 4), [1]), ((1, 2, 3), [3]), ((1, 2), [3])],
    ids=["put off", "until the end", "for a period at most", "to the next"],
)
def test_inside_a_window_a_save_is_put_off(
    open_after: tuple[int, ...], saved: list[int], tmp_path: Path
) -> None:
    trainer = Windows(
        PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), tmp_path), period=2)
    )
    trainer.open_after = open_after
    trainer.train(max_iter=6)
    assert names(tmp_path) == [
        *(f"model_{i:07d}.pth" for i in saved),
        "model_final.pth",
    ]


@pytest.mark.parametrize("max_iter", [6, 4], ids=["a period", "the end"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["fc.bias", "statistic"])
def test_what_has_become_infinite_or_nan_is_never_saved(
    name: str, value: float, max_iter: int, tmp_path: Path
) -> None:
    def begin(trainer: Any) -> None:
        trainer.model.register_buffer("statistic", torch.zeros(2))
        trainer.model.register_buffer(
            "mask", torch.tensor([0.0, -math.inf])
        )  # meant so

    def spoil(trainer: Any) -> None:  # the losses are finite
        if trainer.iter == 3:
            model = trainer.model
            spoilt = model.statistic if name == "statistic" else model.fc.bias.grad
            spoilt[0] = value

    hook = CallbackHook(before_train=begin)
    hook.after_backward = lambda: spoil(hook.trainer)  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match=rf"iteration=3, .*'{name}'"):
        run(tmp_path, max_iter, hook, period=2, max_to_keep=1)
    assert names(tmp_path) == ["model_0000001.pth"]


class WithState(HookBase):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


def test_a_state_that_could_not_be_saved_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        TypeError, match=r"trainer\.hooks\.WithState\.state of type .*deque"
    ):
        run(tmp_path, 2, WithState(deque()), IterationFails(), period=2)


class IterationFails(HookBase):
    def before_step(self) -> None:
        raise AssertionError("a step was begun")


def test_a_hook_with_state_behind_the_checkpointer_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer(WithState(1))
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2), CallbackHook()])
    trainer.train(max_iter=1)
    assert "an iteration before" not in caplog.text
    trainer.register_hooks([WithState(2)])
    trainer.train(max_iter=2)
    assert "['WithState'] come after PeriodicCheckpointer" in caplog.text


def on_main_only(folder: Path) -> Any:
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
    hook = PeriodicCheckpointer(checkpointer, 2) if comm.is_main_process() else None
    trainer.register_hooks([hook])
    trainer.train(0, 4)
    comm.synchronize()
    return torch.load(folder / "model_final.pth", weights_only=True)["trainer"][
        "iteration"
    ]


def test_it_works_registered_on_the_main_rank_only(tmp_path: Path) -> None:
    assert run_ranks(on_main_only, 2, tmp_path) == [3, 3]


def shards_on_main_only(folder: Path) -> str:
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, folder, sharded=True, trainer=trainer)
    saving = [
        PeriodicCheckpointer(checkpointer, 2),
        BestCheckpointer(2, checkpointer, "accuracy"),
        Preemption(checkpointer),
    ]
    trainer.register_hooks(saving if comm.is_main_process() else [])
    with pytest.raises(RuntimeError, match="register on every rank") as caught:
        trainer.train(0, 4)
    return str(caught.value).partition(": ")[2]


def test_shards_are_saved_by_every_rank_or_not_at_all(tmp_path: Path) -> None:
    names = "['BestCheckpointer', 'PeriodicCheckpointer', 'Preemption']"
    assert run_ranks(shards_on_main_only, 2, tmp_path) == [names, names]
