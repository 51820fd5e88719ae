import logging
from types import SimpleNamespace

import pytest

from hooktrain.utils import comm
from hooktrain.utils.events import CommonMetricPrinter, EventStorage, EventWriter, printer


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_the_line_has_all_fields_over_their_windows(log: pytest.LogCaptureFixture) -> None:
    with EventStorage() as storage:
        for storage.iter in range(5):
            storage.put_scalar("total_loss", 3.0 - storage.iter)
            storage.put_scalar("loss_cls", 10.0 * storage.iter)
            storage.put_scalar("[metric]val_loss", 1024.0)
            storage.put_scalar("time", 0.5 if storage.iter else 1.0)
            storage.put_scalar("data_time", 0.01 * storage.iter)
            storage.put_scalar("lr", 0.123456789, smoothing_hint=False)
            storage.put_scalar("generator.lr", 0.25, smoothing_hint=False)
            storage.put_scalar("accuracy", 0.5)
        CommonMetricPrinter(max_iter=3605, window_size=3).write()
        assert storage.latest()["eta_seconds"] == (1800.0, 4)
        assert storage.smoothing_hints()["eta_seconds"] is False
    assert log.messages == [
        " eta: 0:30:00  iter: 4  total_loss: 0  loss_cls: 30  [metric]val_loss: 1024"
        "  time: 0.6000  last_time: 0.5000  data_time: 0.0300  last_data_time: 0.0400"
        "   lr: 0.12346  generator.lr: 0.25  "
    ]


def test_a_metric_is_a_loss_if_a_word_of_its_last_part_is(log: pytest.LogCaptureFixture) -> None:
    losses = (
        "loss total_loss loss_cls rpn/loss_box val_loss_mean mseloss loss1 lossG losses TripletLoss"
    )
    others = "lossless_ratio glossy loss/count accuracy"

    class Printer(CommonMetricPrinter):
        logger = logging.getLogger("my.project")

    with EventStorage(3) as storage:
        for name in (losses + " " + others).split():
            storage.put_scalar(name, 2.5)
        Printer().write()
    shown = "  ".join(f"{name}: 2.5" for name in losses.split())
    assert log.record_tuples == [("my.project", logging.INFO, f" iter: 3  {shown}     lr: N/A  ")]


def test_without_time_it_is_estimated_from_the_clock_of_this_run(
    log: pytest.LogCaptureFixture, clock: SimpleNamespace
) -> None:
    printer = CommonMetricPrinter(max_iter=100)
    with EventStorage() as storage:
        for iteration, now in ((9, 100.0), (19, 120.0), (49, 126.0), (49, 127.0)):
            storage.iter, clock.now = iteration, now
            printer.write()
        printer.rewind(50)
        storage.iter = 60
        printer.write()
        assert "eta_seconds" not in storage.latest()
    assert [m.strip().split("  ")[0] for m in log.messages] == [
        "iter: 9",
        "eta: 0:02:40",  # 2 seconds for each of 80
        "eta: 0:00:10",  # 0.2 seconds for each of 50
        "iter: 49",
        "iter: 60",
    ]


@pytest.mark.parametrize(("iteration", "is_main"), [(100, True), (101, True), (0, False)])
def test_nothing_is_logged_after_the_last_iteration_and_by_other_ranks(
    iteration: int, is_main: bool, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "is_main_process", lambda: is_main)
    with EventStorage(iteration):
        CommonMetricPrinter(max_iter=100).write()
    assert log.messages == []


def test_the_memory_of_the_accelerator_is_shown(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(max_memory_allocated=lambda: 3 * 2**20)
    monkeypatch.setattr(printer, "device_module", lambda: module)
    with EventStorage():
        CommonMetricPrinter().write()
        assert log.messages[0].endswith(" lr: N/A  max_mem: 3M")
        del module.max_memory_allocated
        CommonMetricPrinter().write()
        assert log.messages[1].endswith(" lr: N/A  ")


def test_a_writer_needs_nothing_but_write() -> None:
    writer = EventWriter()
    writer.rewind(0)
    writer.close()
    with pytest.raises(NotImplementedError, match="EventWriter must define write"):
        writer.write()
