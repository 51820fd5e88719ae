from pathlib import Path

from hooktrain.compat.detectron2 import AutogradProfiler
from toys import linear_trainer


def test_the_autograd_profiler_writes_a_trace_for_the_browser(tmp_path: Path) -> None:
    hook = AutogradProfiler(lambda trainer: trainer.iter == 1, str(tmp_path))
    linear_trainer(hook).train(0, 3)
    (trace,) = tmp_path.glob("profiler-trace-iter1.*.json")
    assert "aten::linear" in trace.read_text()
