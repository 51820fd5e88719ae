import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from hooktrain.events import CommonMetricPrinter, EventStorage
from hooktrain.utils import comm
from hooktrain.utils.logger import close_logger


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_the_line_has_all_fields_over_their_windows(
    log: pytest.LogCaptureFixture,
) -> None:
    with EventStorage() as storage:
        for storage.iter in range(5):
            storage.put_scalar("data_time", 0.1 * storage.iter)
            storage.put_scalar("time", 0.5 if storage.iter else 1.0)
            storage.put_scalar("total_loss", 3.0 - storage.iter)
            storage.put_scalar("loss_cls", 10.0 * storage.iter)
            storage.put_scalar("lr", 0.123456789, smoothing_hint=False)
            storage.put_scalar("generator.lr", 0.25, smoothing_hint=False)
            storage.put_scalar("grad_norm", 2.0 * storage.iter)
            storage.put_scalar("[metric]val/loss", 1024.0)
            storage.put_scalar("rpn/num_anchors", 7)
        CommonMetricPrinter(max_iter=3605, window_size=3).write()
    assert log.messages == [
        "iter: 4  total_loss: 0  loss_cls: 30  [metric]val/loss: 1024  grad_norm: 6"
        "  time: 0.5  data_time: 0.3  lr: 0.1235  generator.lr: 0.25"
    ]


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ("loss rpn/loss_box lossG", "loss rpn/loss_box lossG"),
        ("accuracy a/accuracy total_loss", "total_loss accuracy"),
        ("a/accuracy [metric]a/score", "[metric]a/score"),
    ],
)
def test_losses_are_shown_first(
    metrics: str, shown: str, log: pytest.LogCaptureFixture
) -> None:
    class Printer(CommonMetricPrinter):
        logger = logging.getLogger("my.project")

    with EventStorage(3) as storage:
        storage.put_scalars(**dict.fromkeys(metrics.split(), 1.0))
        Printer().write()
    fields = "".join(f"  {name}: 1" for name in shown.split())
    assert log.record_tuples == [("my.project", logging.INFO, f"iter: 3{fields}")]


def test_results_have_lines_of_their_own(log: pytest.LogCaptureFixture) -> None:
    with EventStorage(3) as storage:
        storage.put_scalars(total_loss=0.25, loss_cls=0.25, loss_box=0.0)
        names = [f"coco/segmentation/AP-of class_{i}" for i in range(4)]
        storage.put_scalars(**dict.fromkeys(names, 0.25), smoothing_hint=False)
        CommonMetricPrinter(max_iter=9).write()
    assert log.messages == [
        *[f"iter: 3  {name}: 0.25" for name in names],
        "iter: 3  total_loss: 0.25  loss_cls: 0.25  loss_box: 0",
    ]


def test_every_result_of_an_evaluation_is_shown_once(
    log: pytest.LogCaptureFixture,
) -> None:
    def run(storage: EventStorage, start: int) -> list[str]:
        log.clear()
        printer = CommonMetricPrinter(max_iter=12)
        with storage:
            printer.rewind(start)
            for storage.iter in range(start, 12):
                storage.put_scalar("total_loss", 1.0)
                if storage.iter % 3 == 2:
                    storage.put_scalar("box/AP", storage.iter, smoothing_hint=False)
                if storage.iter % 4 == 3:
                    printer.write()
                if storage.iter == 5:
                    saved.append(storage.state_dict())
            storage.iter = 12
            storage.put_scalar("box/AP", 12, smoothing_hint=False)
            printer.write()
            printer.write()
        return [re.sub("eta: .*?  ", "", message) for message in log.messages]

    saved: list[dict[str, Any]] = []
    expected = [
        "iter: 2  box/AP: 2",
        "iter: 3  total_loss: 1",
        "iter: 5  box/AP: 5",
        "iter: 7  total_loss: 1",
        "iter: 8  box/AP: 8",
        "iter: 11  box/AP: 11",
        "iter: 11  total_loss: 1",
        "iter: 12  box/AP: 12",
    ]
    assert run(EventStorage(), 0) == expected
    resumed = EventStorage()
    resumed.load_state_dict(saved[0])
    assert run(resumed, 6) == expected[2:]


def test_the_eta_is_the_mean_since_the_first_line_of_a_run(
    log: pytest.LogCaptureFixture, clock: SimpleNamespace
) -> None:
    printer = CommonMetricPrinter(max_iter=100_000)
    with EventStorage() as storage:
        for iteration, now in ((9, 100.0), (19, 120.0), (49, 126.0)):
            storage.iter, clock.now = iteration, now
            printer.write()
        assert storage.latest()["eta_seconds"] == (0.65 * 99_950, 49)
        assert storage.smoothing_hints()["eta_seconds"] is False
        printer.rewind(50)
        storage.iter = 60
        printer.write()
    assert [message.split("  ")[0] for message in log.messages] == [
        "iter: 9",
        "eta: 2 days, 7:32:40",  # 2 seconds for each
        "eta: 18:02:47",  # 0.65 seconds for each
        "iter: 60",
    ]


@pytest.mark.parametrize("has_handler", [True, False])
def test_who_has_not_set_up_logging_sees_lines(
    has_handler: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    close_logger()
    theirs = [logging.NullHandler()] if has_handler else []
    monkeypatch.setattr(logging.getLogger(), "handlers", theirs)
    try:
        with EventStorage(3) as storage:
            storage.put_scalar("loss", 2.5)
            CommonMetricPrinter().write()
    finally:
        close_logger()
    assert ("iter: 3  loss: 2.5\n" in capsys.readouterr().out) == (not has_handler)


@pytest.mark.parametrize(
    ("iteration", "is_main", "shown"),
    [(99, True, True), (100, True, False), (101, True, False), (0, False, False)],
)
def test_a_line_comes_from_the_main_process_up_to_the_last_iteration(
    iteration: int,
    is_main: bool,
    shown: bool,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comm, "is_main_process", lambda: is_main)
    with EventStorage(iteration):
        CommonMetricPrinter(max_iter=100).write()
    assert len(log.messages) == shown
