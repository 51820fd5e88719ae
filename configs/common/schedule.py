"""Multipliers of the learning rate over a run."""

from hooktrain.config import LazyCall as L
from hooktrain.solver import CosineParamScheduler, WarmupParamScheduler

# A linear warm-up over the first 5 % of the run, then half a cosine down to 0.
warmup_cosine = L(WarmupParamScheduler)(
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0),
    warmup_factor=0.1,
    warmup_length=0.05,
)
