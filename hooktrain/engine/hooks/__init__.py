"""Everything around a step: one hook a file."""

from hooktrain.engine.hooks.best_checkpointer import BestCheckpointer as BestCheckpointer
from hooktrain.engine.hooks.callback import CallbackHook as CallbackHook
from hooktrain.engine.hooks.early_stopping import EarlyStopping as EarlyStopping
from hooktrain.engine.hooks.ema import EMA as EMA
from hooktrain.engine.hooks.eval_hook import EvalHook as EvalHook
from hooktrain.engine.hooks.iteration_timer import IterationTimer as IterationTimer
from hooktrain.engine.hooks.lr_scheduler import LRScheduler as LRScheduler
from hooktrain.engine.hooks.periodic_checkpointer import (
    PeriodicCheckpointer as PeriodicCheckpointer,
)
from hooktrain.engine.hooks.periodic_writer import PeriodicWriter as PeriodicWriter
from hooktrain.engine.hooks.precise_bn import PreciseBN as PreciseBN
from hooktrain.engine.hooks.preemption import Preemption as Preemption
from hooktrain.engine.hooks.replay import Replay as Replay
from hooktrain.engine.hooks.rewind import Rewind as Rewind
from hooktrain.engine.hooks.skip_non_finite import SkipNonFinite as SkipNonFinite
from hooktrain.engine.hooks.stragglers import Stragglers as Stragglers
from hooktrain.engine.hooks.torch_memory_stats import TorchMemoryStats as TorchMemoryStats
from hooktrain.engine.hooks.torch_profiler import (
    AutogradProfiler as AutogradProfiler,
    TorchProfiler as TorchProfiler,
)
from hooktrain.engine.hooks.watchdog import Watchdog as Watchdog
from hooktrain.engine.train_loop import HookBase as HookBase
from hooktrain.utils.registry import HOOKS

ParamSchedulerHook = LRScheduler  # MMEngine's name

for _name, _item in list(globals().items()):
    if isinstance(_item, type) and issubclass(_item, HookBase) and _item is not HookBase:
        HOOKS.register(_item, name=_name)
