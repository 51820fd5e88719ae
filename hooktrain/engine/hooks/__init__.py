"""Everything around a step: one hook a file."""

from hooktrain.engine.hooks.best_checkpointer import BestCheckpointer
from hooktrain.engine.hooks.callback import CallbackHook
from hooktrain.engine.hooks.early_stopping import EarlyStopping
from hooktrain.engine.hooks.ema import EMA
from hooktrain.engine.hooks.eval_hook import EvalHook
from hooktrain.engine.hooks.iteration_timer import IterationTimer
from hooktrain.engine.hooks.lr_scheduler import LRScheduler, ParamSchedulerHook
from hooktrain.engine.hooks.periodic_checkpointer import PeriodicCheckpointer
from hooktrain.engine.hooks.periodic_writer import PeriodicWriter
from hooktrain.engine.hooks.precise_bn import PreciseBN
from hooktrain.engine.hooks.preemption import Preemption
from hooktrain.engine.hooks.skip_non_finite import SkipNonFinite
from hooktrain.engine.hooks.torch_memory_stats import TorchMemoryStats
from hooktrain.engine.hooks.torch_profiler import AutogradProfiler, TorchProfiler
from hooktrain.engine.hooks.watchdog import Watchdog
from hooktrain.engine.train_loop import HookBase
from hooktrain.utils.registry import HOOKS

__all__ = [
    "EMA",
    "AutogradProfiler",
    "BestCheckpointer",
    "CallbackHook",
    "EarlyStopping",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "ParamSchedulerHook",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
    "Preemption",
    "SkipNonFinite",
    "TorchMemoryStats",
    "TorchProfiler",
    "Watchdog",
]

for _name in set(__all__) - {"HookBase"}:
    HOOKS.register(globals()[_name], name=_name)
