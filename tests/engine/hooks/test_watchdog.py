import logging
import math
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gloo import run_ranks
from hooktrain.engine.hooks import CallbackHook
from hooktrain.engine.hooks.bad_runs import Watchdog, describe
from hooktrain.evaluation import inference_on_dataset
from hooktrain.utils import comm
from processes import wait_until
from toys import Idle

LIMIT_SECONDS = 30


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ((s,), f"above 0 seconds, but got {s}")
            for s in (0, -1.0, math.nan, math.inf)
        ),
        ((1, "kill"), "must be 'report' or 'abort', but got 'kill'"),
    ],
)
def test_a_limit_or_an_action_that_cannot_be_is_refused(
    arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Watchdog(*arguments)


def test_a_hang_is_reported_once_with_the_stack_of_every_thread(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def a_place_to_hang(trainer: Any) -> None:
        if trainer.iter == 3:
            wait_until(
                lambda: "rank 0 has made no progress" in "".join(reports(caplog))
            )
            time.sleep(0.2)  # several times the limit

    Idle(Watchdog(0.05), CallbackHook(after_backward=a_place_to_hang)).train(0, 5)
    assert len(reports(caplog)) == 1
    assert re.search(r"\n *0 +3 +0 +\w+ \(\w+.py:\d+\)", reports(caplog)[0])
    printed = capsys.readouterr().err
    assert "Stack of thread 'MainThread' of rank 0:" in printed
    assert "in a_place_to_hang" in printed
    assert "Stack of thread 'watchdog'" in printed


@pytest.mark.parametrize("fail_at", [-1, 1])
def test_a_run_that_makes_progress_is_left_alone_and_its_end_or_failure_ends_the_thread(
    fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = Watchdog(LIMIT_SECONDS), CallbackHook(after_step=lambda _: time.sleep(0.01))
    with (
        pytest.raises(ValueError, match="broken at 1") if fail_at > 0 else nullcontext()
    ):
        Idle(*hooks, fail_at=fail_at).train(0, 3)
    assert reports(caplog) == []
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows whenever the watchdog looks for progress."""
    looks: list[None] = []
    share = Watchdog._share_progress
    monkeypatch.setattr(
        Watchdog, "_share_progress", lambda hook: looks.append(share(hook))
    )
    return looks


def test_each_batch_of_an_evaluation_is_progress(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count_looks(monkeypatch)

    def model(batch: int) -> None:
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 1)

    def evaluate(_: Any) -> None:
        inference_on_dataset(model, range(3), None)

    Idle(Watchdog(0.6), CallbackHook(after_step=evaluate)).train(0, 1)
    assert len(looks) > 4
    assert reports(caplog) == []


def test_a_process_that_was_suspended_is_not_taken_for_one_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog, waits = Watchdog(8.0), iter([False, True])

    def wait(_: float) -> bool:
        monkeypatch.setattr(time, "monotonic", lambda: 1e9)  # years pass meanwhile
        return next(waits)

    Idle(watchdog).train(0, 1)
    watchdog._end = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    watchdog._watch()
    assert reports(caplog) == []


def test_the_rank_with_fewer_collectives_is_behind_and_equals_are_not_blamed() -> None:
    progress = {0: [7, 31, "wait"], 1: [7, 30, "sleep"], 2: [7, 31, "wait"]}
    assert "Behind: rank 1." in describe(progress)
    assert re.search(r"1 +7 +30 +sleep", describe(progress))
    progress[1] = [7, 31, "wait"]
    assert "All ranks have come equally far." in describe(progress)


def hang_in_rank_1(folder: Path) -> str:
    """Rank 1 hangs in the forward pass of iteration 2 until both ranks have reported."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            (folder / f"reported{comm.get_rank()}").touch()

    def forward(trainer: Any) -> None:
        if trainer.iter == 2 and comm.get_rank() == 1:
            wait_until(lambda: len(list(folder.iterdir())) == 2)
        dist.all_reduce(torch.ones(1))

    log = logging.getLogger("hooktrain.engine.hooks.bad_runs")
    log.addHandler(Keep(logging.CRITICAL))
    Idle(Watchdog(0.5), CallbackHook(after_backward=forward)).train(0, 4)
    return messages[0]


def test_every_rank_names_the_one_that_hangs_and_where(tmp_path: Path) -> None:
    for rank, message in enumerate(run_ranks(hang_in_rank_1, 2, tmp_path)):
        assert f"rank {rank} has made no progress" in message
        assert "Behind: rank 1." in message
        assert re.search(
            r"\n *0 +2 +\d+ +all_reduce \(distributed_c10d.py:\d+\)", message
        )
        assert re.search(r"\n *1 +2 +\d+ +wait_until \(processes.py:\d+\)", message)
