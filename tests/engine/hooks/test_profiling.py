import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hooktrain.engine.hooks import CallbackHook, TorchProfiler
from toys import linear_trainer


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"save_tensorboard": False}, "profiler-trace-iter{}.rank0.*.json"),
        ({}, "log/profiler-trace-iter{}.rank0.*.json"),
    ],
)
def test_each_chosen_iteration_gives_a_trace(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    hook = TorchProfiler(lambda t: t.iter in (1, 2), str(tmp_path), **options)
    linear_trainer(hook).train(0, 4)
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
