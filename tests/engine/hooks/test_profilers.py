import json
from pathlib import Path

import pytest
import torch

from hooktrain.engine.hooks import (
    AutogradProfiler,
    CallbackHook,
    TorchMemoryStats,
    TorchProfiler,
    torch_memory_stats,
)
from toy import linear_trainer


def operators(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_torch_profiler_writes_a_trace_of_each_chosen_iteration(tmp_path: Path) -> None:
    hook = TorchProfiler(lambda t: t.iter in (1, 2), str(tmp_path), save_tensorboard=False)
    linear_trainer(hook).train(0, 4)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["profiler-trace-iter1.json", "profiler-trace-iter2.json"]
    assert "aten::linear" in operators(tmp_path / names[0])


def test_torch_profiler_writes_for_tensorboard(tmp_path: Path) -> None:
    linear_trainer(TorchProfiler(lambda t: t.iter == 1, str(tmp_path))).train(0, 2)
    (trace,) = (tmp_path / "log" / "profiler-tensorboard-iter1").iterdir()
    assert trace.name.startswith("worker0")
    assert "aten::linear" in operators(trace)


def test_autograd_profiler_writes_a_trace(tmp_path: Path) -> None:
    linear_trainer(AutogradProfiler(lambda t: t.iter == 1, str(tmp_path))).train(0, 2)
    assert "aten::linear" in operators(tmp_path / "profiler-trace-iter1.json")


@pytest.mark.parametrize("kind", [TorchProfiler, AutogradProfiler])
def test_a_failing_step_ends_the_profiler_so_that_the_next_can_start(
    tmp_path: Path, kind: type[TorchProfiler]
) -> None:
    def fail(_: object) -> None:
        raise OSError("broken")

    for _ in range(2):
        hook = kind(lambda t: True, str(tmp_path))
        trainer = linear_trainer(hook, CallbackHook(after_backward=fail))
        with pytest.raises(OSError, match="broken"):
            trainer.train(0, 1)
        assert not torch.autograd._profiler_enabled()


class FakeDevice:
    """Counts what an accelerator's module is asked for."""

    def __init__(self) -> None:
        self.resets = 0
        self.summaries = 0

    def max_memory_reserved(self) -> int:
        return 3 * 2**20

    max_memory_allocated = memory_reserved = memory_allocated = max_memory_reserved

    def memory_summary(self) -> str:
        self.summaries += 1
        return "summary"

    def reset_peak_memory_stats(self) -> None:
        self.resets += 1

    def manual_seed(self, seed: int) -> None:
        pass


def test_memory_is_logged_exactly_max_runs_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch_memory_stats, "device_module", lambda: device)
    with caplog.at_level("INFO"):
        linear_trainer(TorchMemoryStats(period=2, max_runs=3)).train(0, 20)
    assert caplog.text.count("max_reserved_mem: 3MB") == 3
    assert (device.resets, device.summaries) == (3, 1)


def test_memory_stats_do_nothing_without_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_memory_stats, "device_module", lambda: None)
    with caplog.at_level("INFO"):
        linear_trainer(TorchMemoryStats(period=1)).train(0, 2)
    assert "max_reserved_mem" not in caplog.text
