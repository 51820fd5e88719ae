from pathlib import Path
from typing import Any

import pytest

from hooktrain.compat.detectron2 import AutogradProfiler, TorchMemoryStats, profiling
from toys import linear_trainer


def test_the_autograd_profiler_writes_a_trace_for_the_browser(tmp_path: Path) -> None:
    hook = AutogradProfiler(lambda trainer: trainer.iter == 1, str(tmp_path))
    linear_trainer(hook).train(0, 3)
    assert "aten::linear" in (tmp_path / "profiler-trace-iter1.json").read_text()


class FakeDevice:
    """Counts what an accelerator's module is asked for."""

    def __init__(self) -> None:
        self.resets = 0

    def max_memory_reserved(self) -> int:
        return 3 * 2**20

    max_memory_allocated = memory_reserved = memory_allocated = max_memory_reserved

    def reset_peak_memory_stats(self) -> None:
        self.resets += 1

    def manual_seed(self, seed: int) -> None:
        pass


@pytest.mark.parametrize("device", [FakeDevice(), None])
def test_memory_is_logged_exactly_max_runs_times_where_there_is_an_accelerator(
    device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiling, "device_module", lambda: device)
    with caplog.at_level("INFO"):
        linear_trainer(TorchMemoryStats(period=2, max_runs=3)).train(0, 20)
    assert caplog.text.count("max_memory_reserved: 3 MiB") == (3 if device else 0)
    assert device is None or device.resets == 3
