import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hooktrain.engine.hooks import (
    AutogradProfiler,
    CallbackHook,
    TorchMemoryStats,
    TorchProfiler,
    profiling,
)
from toys import linear_trainer


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (TorchProfiler, {"save_tensorboard": False}, "profiler-trace-iter{}.json"),
        (TorchProfiler, {}, "log/profiler-tensorboard-iter{}/worker0.*"),
        (AutogradProfiler, {}, "profiler-trace-iter{}.json"),
    ],
)
def test_each_chosen_iteration_gives_a_trace(
    kind: Any, options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    linear_trainer(kind(lambda t: t.iter in (1, 2), str(tmp_path), **options)).train(
        0, 4
    )
    traces = [path for i in (1, 2) for path in tmp_path.glob(name.format(i))]
    assert traces == sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for trace in traces:
        events = json.loads(trace.read_text())["traceEvents"]
        assert "aten::linear" in {event["name"] for event in events}
    assert len(traces) == 2


def test_a_failing_step_ends_the_profiler_so_that_the_next_can_start(
    tmp_path: Path,
) -> None:
    def fail(_: object) -> None:
        raise OSError("broken")

    for _ in range(2):
        hook = TorchProfiler(lambda t: True, str(tmp_path))
        trainer = linear_trainer(hook, CallbackHook(after_backward=fail))
        with pytest.raises(OSError, match="broken"):
            trainer.train(0, 1)
        assert not torch.autograd._profiler_enabled()


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
