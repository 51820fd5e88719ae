import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, checkpointer, load_checkpoint
from hooktrain.checkpoint.files import write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.engine.hooks import (
    EMA,
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    HookBase,
)
from hooktrain.engine.hooks.evaluation import better_by_name
from hooktrain.utils import comm
from toys import LinearLoss, linear_trainer


def run(
    folder: Path,
    values: list[float],
    mode: str = "max",
    state: Any = None,
    **options: Any,
) -> tuple[BestCheckpointer, Any]:
    """Train one iteration a value, each evaluated to that value."""
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, folder, **options, trainer=trainer)
    hook = BestCheckpointer(1, checkpointer, "acc", mode)

    def put(t: Any) -> None:
        if t.start_iter <= t.iter < t.start_iter + len(values):
            t.storage.put_scalar(
                "acc", values[t.iter - t.start_iter], smoothing_hint=False
            )

    trainer.register_hooks([CallbackHook(after_step=put), hook])
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(max_iter=trainer.state_dict()["iteration"] + 1 + len(values) + 1)
    return hook, trainer


def saved_iteration(folder: Path) -> int:
    (name,) = {"model_best", "model_best.pth"} & {
        path.name for path in folder.iterdir()
    }
    file = read_checkpoint(str(folder / name))
    assert file["trainer"]["iteration"] == file["iteration"]
    return int(file["iteration"])


@pytest.mark.parametrize(("mode", "best"), [("max", 1), ("min", 2)])
def test_the_best_value_decides_what_is_in_the_file(
    tmp_path: Path, mode: str, best: int
) -> None:
    hook, _ = run(tmp_path, [0.5, 0.75, 0.25, 0.5], mode)
    assert saved_iteration(tmp_path) == best == hook.best_iter


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_the_best(
    tmp_path: Path, value: float
) -> None:
    hook, _ = run(tmp_path, [value, 0.5, value])
    assert saved_iteration(tmp_path) == 1
    assert hook.best_metric == 0.5


def test_the_best_file_is_not_what_a_run_resumes_from(tmp_path: Path) -> None:
    _, trainer = run(tmp_path, [0.5])
    assert not Checkpointer(trainer.model, str(tmp_path)).has_checkpoint()


def test_the_best_value_survives_a_resume(tmp_path: Path) -> None:
    _, trainer = run(tmp_path, [0.9])
    run(tmp_path, [0.5, 0.6], state=trainer.state_dict())
    assert saved_iteration(tmp_path) == 0


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_does_not_end_the_run_and_the_next_best_is_saved(
    background: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def full_at_first(state: dict[str, Any], path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(state, path)

    monkeypatch.setattr(checkpointer, "write_file", full_at_first)
    hook, _ = run(tmp_path, [0.5, 0.25], background=background)
    assert caplog.text.count("NOT SAVED") == 1
    assert saved_iteration(tmp_path) == 1
    assert hook.best_metric == 0.25


@pytest.mark.parametrize(
    "options", [{}, {"background": True}, {"background": True, "sharded": True}]
)
def test_the_best_of_the_final_evaluation_is_there_when_the_run_has_ended(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, tmp_path, **options, trainer=trainer)
    put = CallbackHook(after_train=lambda t: t.storage.put_scalar("acc", 1))
    trainer.register_hooks([put, BestCheckpointer(0, checkpointer, "acc")])
    trainer.train(0, 3)
    assert saved_iteration(tmp_path) == 2
    assert not (tmp_path / "last_checkpoint").exists()


def test_weights_that_were_not_evaluated_are_not_the_best(tmp_path: Path) -> None:
    trainer = linear_trainer(EvalHook(3, lambda: {"acc": trainer.iter}))
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([BestCheckpointer(4, checkpointer, "acc")])
    with pytest.raises(
        ValueError, match="due at iteration 3, but 'acc' was measured at 2"
    ):
        trainer.train(0, 9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_was_measured_is_what_is_saved_wherever_the_hook_was_registered(
    tmp_path: Path, place: int
) -> None:
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    measured = []

    def evaluate() -> dict[str, float]:
        measured.append(trainer.model.fc.bias.clone())
        return {"acc": [1.0, 3.0, 2.0][len(measured) - 1]}

    found = [EvalHook(2, evaluate), HookBase()]
    found.insert(place, BestCheckpointer(2, checkpointer, "acc"))
    trainer.register_hooks(found)
    trainer.train(0, 6)
    assert torch.equal(
        torch.load(tmp_path / "model_best.pth")["model"]["fc.bias"], measured[1]
    )


def test_the_best_of_an_average_holds_the_average_as_the_model(tmp_path: Path) -> None:
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    ema, value = EMA(trainer.model, 0.5), iter([2.0, 1.0, 3.0])
    evaluation = EvalHook(1, lambda: {"ema": {"val_loss": next(value)}})
    trainer.register_hooks(
        [ema, evaluation, BestCheckpointer(1, checkpointer, "ema/val_loss")]
    )
    averages = []
    copy = lambda _: averages.append(ema.average.module.fc.bias.clone())  # noqa: E731
    trainer.register_hooks([CallbackHook(after_step=copy)])
    trainer.train(0, 3)
    model = LinearLoss()
    load_checkpoint(model, tmp_path / "model_best.pth")
    assert torch.equal(model.fc.bias, averages[1])
    assert not torch.equal(trainer.model.fc.bias, averages[1])


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        ("loss val/total_loss val_error RMSE test.ppl fid", "min"),
        ("acc top1_accuracy bbox/AP50 mAP seg/mIoU mask_iou F1", "max"),
        ("sharpness lossless ema accuracy_loss", None),
    ],
)
def test_the_name_of_a_metric_tells_which_direction_is_better(
    names: str, mode: str | None
) -> None:
    assert [better_by_name(name) for name in names.split()] == [mode] * len(
        names.split()
    )


def metric_on_main_only(folder: Path) -> Any:
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
    hook = BestCheckpointer(1, checkpointer, "acc")
    put = CallbackHook(
        after_step=lambda t: (
            comm.is_main_process() and t.storage.put_scalar("acc", t.iter)
        )
    )
    trainer.register_hooks([put, hook])
    trainer.train(0, 4)
    return hook.best_metric


def test_all_ranks_follow_the_main_one_that_alone_knows_the_metric(
    tmp_path: Path,
) -> None:
    assert run_ranks(metric_on_main_only, 2, tmp_path) == [3.0, 3.0]
    assert torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"] == 3


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("saved_after", [True, False])
def test_a_better_model_saved_after_the_resumed_checkpoint_is_kept(
    tmp_path: Path, saved_after: bool, sharded: bool
) -> None:
    _, first = run(tmp_path, [0.5], sharded=sharded)
    state = first.state_dict()
    state["hooks"] = {}  # as in a checkpoint from before the evaluation
    if not saved_after:
        state["iteration"] = -1  # a run from the start knows of no other
    run(tmp_path, [0.25, 0.125], state=state, sharded=sharded)
    assert saved_iteration(tmp_path) == 0
    best = read_checkpoint(
        str(tmp_path / ("model_best" if sharded else "model_best.pth"))
    )["best"]
    assert best == {
        "metric": "acc",
        "best_metric": 0.5 if saved_after else 0.25,
        "best_iter": 0,
    }


def test_a_broken_best_file_is_told_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, first = run(tmp_path, [0.5])
    state = first.state_dict()
    state["hooks"] = {}
    (tmp_path / "model_best.pth").write_bytes(b"broken")
    run(tmp_path, [0.25], state=state)
    assert "model_best.pth" in caplog.text
    assert saved_iteration(tmp_path) == 2
