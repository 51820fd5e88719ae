"""Optimizers. `build_optimizer` of hooktrain.engine.build fills in `params.model`."""

import torch

from hooktrain.config import LazyCall as L
from hooktrain.solver import get_default_optimizer_params

SGD = L(torch.optim.SGD)(
    params=L(get_default_optimizer_params)(weight_decay_norm=0.0),
    lr=0.02,
    momentum=0.9,
    nesterov=True,
    weight_decay=1e-4,
)

AdamW = L(torch.optim.AdamW)(
    params=L(get_default_optimizer_params)(
        weight_decay_norm=0.0, weight_decay_bias=0.0
    ),
    lr=1e-3,
    betas=(0.9, 0.999),
    weight_decay=0.05,
)
