from pathlib import Path
from typing import Any

import pytest
import torch

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine.hooks import CallbackHook, PeriodicCheckpointer
from hooktrain.utils import comm
from toy import linear_trainer


def run(folder: Path, max_iter: int, *hooks: Any, **kwargs: Any) -> Any:
    trainer = linear_trainer(*hooks)
    checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, **kwargs)])
    checkpointer.resume_or_load("", resume=True)
    trainer.train(max_iter=max_iter)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.pth"))


def test_it_saves_each_period_and_model_final_at_the_end(tmp_path: Path) -> None:
    run(tmp_path, 6, period=2)
    assert names(tmp_path) == ["model_0000001.pth", "model_0000003.pth", "model_final.pth"]
    assert (tmp_path / "last_checkpoint").read_text().strip() == "model_final.pth"
    final = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert final["iteration"] == final["trainer"]["iteration"] == 5


def test_only_the_newest_are_kept_also_across_a_resume(tmp_path: Path) -> None:
    run(tmp_path, 5, period=1, max_to_keep=2)
    run(tmp_path, 8, period=1, max_to_keep=2)
    assert names(tmp_path) == ["model_0000005.pth", "model_0000006.pth", "model_final.pth"]


def test_a_run_that_is_stopped_early_has_its_final_checkpoint(tmp_path: Path) -> None:
    stop = CallbackHook(after_step=lambda t: t.iter == 2 and t.request_stop("enough"))
    run(tmp_path, 10, stop, period=100)
    assert names(tmp_path) == ["model_final.pth"]
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["iteration"] == 2


def test_a_failed_run_leaves_no_final_checkpoint(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        if trainer.iter == 3:
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        run(tmp_path, 4, CallbackHook(before_step=fail), period=2)
    assert names(tmp_path) == ["model_0000001.pth"]


@pytest.mark.parametrize("period", [0, -1])
def test_a_period_below_one_is_refused(tmp_path: Path, period: int) -> None:
    with pytest.raises(ValueError, match=str(period)):
        run(tmp_path, 1, period=period)


def on_main_only(folder: Path) -> list[int]:
    trainer = linear_trainer()
    checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
    hook = PeriodicCheckpointer(checkpointer, 2) if comm.is_main_process() else None
    trainer.register_hooks([hook])
    trainer.train(0, 4)
    comm.synchronize()
    return sorted(torch.load(folder / "model_final.pth", weights_only=True)["trainer"]["rng"])


def test_registered_on_the_main_rank_only_it_works_with_that_ranks_random_state(
    tmp_path: Path,
) -> None:
    assert run_ranks(on_main_only, 2, tmp_path) == [[0], [0]]
