"""The hooks: everything around a step."""

from hooktrain.engine.hook_base import HookBase as HookBase
from hooktrain.engine.hooks.averaging import EMA as EMA, PreciseBN as PreciseBN
from hooktrain.engine.hooks.callback import CallbackHook as CallbackHook
from hooktrain.engine.hooks.checkpointing import (
    PeriodicCheckpointer as PeriodicCheckpointer,
)
from hooktrain.engine.hooks.evaluation import (
    BestCheckpointer as BestCheckpointer,
    EarlyStopping as EarlyStopping,
    EvalHook as EvalHook,
)
from hooktrain.engine.hooks.lr_scheduler import LRScheduler as LRScheduler
from hooktrain.engine.hooks.preemption import Preemption as Preemption
from hooktrain.engine.hooks.profiling import TorchProfiler as TorchProfiler
from hooktrain.engine.hooks.replay_check import ReplayCheck as ReplayCheck
from hooktrain.engine.hooks.skip_non_finite import SkipNonFinite as SkipNonFinite
from hooktrain.engine.hooks.watchdog import Watchdog as Watchdog
from hooktrain.engine.hooks.writing import (
    IterationTimer as IterationTimer,
    PeriodicWriter as PeriodicWriter,
)
