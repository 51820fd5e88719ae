"""The names of detectron2.solver: schedules, and optimizers configured by a ``SOLVER`` tree.

``LRScheduler`` is torch's class here, but the hook in hooktrain.compat.detectron2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler as LRScheduler

from hooktrain import solver
from hooktrain.compat.detectron2.functions import import_from_detectron2
from hooktrain.solver import *
from hooktrain.solver.schedule import ROUNDING

_expand_param_groups = solver.expand_param_groups


def __getattr__(name: str) -> Any:
    """Import old schedulers, such as WarmupCosineLR, from detectron2."""
    return import_from_detectron2(name)


@dataclass
class StepParamScheduler(solver.ParamScheduler):
    """``values[int(w * len(values))]``: each value for an equal share of the run.

    Args:
        num_updates: not used; for compatibility with fvcore.
        values: the values, at least one.

    >>> schedule = StepParamScheduler(num_updates=120, values=[0.1, 0.01, 0.001, 0.0001])
    >>> [schedule(epoch / 120) for epoch in (0, 29, 30, 90, 120)]
    [0.1, 0.1, 0.01, 0.0001, 0.0001]
    """

    num_updates: float
    values: Sequence[float]

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        parts = len(self.values)
        reached = int((where + ROUNDING) * parts)
        return self.values[min(reached, parts - 1)]


class StepWithFixedGammaParamScheduler(StepParamScheduler):
    """``base_value * gamma ** int(w * (num_decays + 1))``, at most ``num_decays`` decays.

    Args:
        base_value: the first value.
        num_decays: the number of decays, which divide the run into ``num_decays + 1`` equal parts.
        gamma: the factor of each decay.
        num_updates: not used; for compatibility with fvcore.

    >>> schedule = StepWithFixedGammaParamScheduler(1.0, num_decays=2, gamma=0.5, num_updates=90)
    >>> [schedule(epoch / 90) for epoch in (0, 29, 30, 60, 90)]
    [1.0, 1.0, 0.5, 0.25, 0.25]

    Raises:
        ValueError: if ``base_value`` or ``gamma`` is not above 0.
    """

    def __init__(
        self, base_value: float, num_decays: int, gamma: float, num_updates: int
    ) -> None:
        if base_value <= 0 or gamma <= 0:  # the sign would change
            raise ValueError(f"{base_value=} and {gamma=} must be above 0")
        values = [base_value * gamma**decays for decays in range(num_decays + 1)]
        super().__init__(num_updates, values)


def maybe_add_gradient_clipping(cfg: Any, optimizer: Any) -> Any:
    """Let an optimizer clip each parameter before each step, by ``SOLVER.CLIP_GRADIENTS``.

    Args:
        cfg: the configuration.
        optimizer: an optimizer, or an optimizer class.

    Returns:
        The optimizer, or for a class a function that makes optimizers that clip.
    """
    options = cfg.SOLVER.CLIP_GRADIENTS
    if not options.ENABLED:
        return optimizer
    if isinstance(optimizer, type):

        def make(*args: Any, **kwargs: Any) -> Any:
            return maybe_add_gradient_clipping(cfg, optimizer(*args, **kwargs))

        return make
    by_norm = partial(clip_grad_norm_, norm_type=options.NORM_TYPE)
    clip: Any = {"value": clip_grad_value_, "norm": by_norm}[options.CLIP_TYPE]

    def clip_each(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    clip(parameter, options.CLIP_VALUE)

    optimizer.register_step_pre_hook(clip_each)
    return optimizer


def build_optimizer(cfg: Any, model: nn.Module) -> Optimizer:
    """Build SGD with the learning rates, weight decays and clipping of ``SOLVER``."""
    tree = cfg.SOLVER
    groups = solver.get_default_optimizer_params(
        model,
        base_lr=tree.BASE_LR,
        weight_decay_norm=tree.WEIGHT_DECAY_NORM,
        bias_lr_factor=tree.BIAS_LR_FACTOR,
        weight_decay_bias=tree.WEIGHT_DECAY_BIAS,
    )
    options = {"nesterov": tree.NESTEROV, "weight_decay": tree.WEIGHT_DECAY}
    optimizer = SGD(groups, tree.BASE_LR, tree.MOMENTUM, **options)
    return maybe_add_gradient_clipping(cfg, optimizer)  # type: ignore[no-any-return]


def build_lr_scheduler(cfg: Any, optimizer: Optimizer) -> solver.LRMultiplier:
    """Build the schedule that ``SOLVER.LR_SCHEDULER_NAME`` names, after a warm-up.

    Raises:
        ValueError: for an unknown name.
    """
    tree = cfg.SOLVER
    end = tree.MAX_ITER
    schedule: solver.ParamScheduler
    if tree.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        steps = [step for step in tree.STEPS if step < end]
        values = [tree.GAMMA**k for k in range(len(steps) + 1)]
        schedule = solver.MultiStepParamScheduler(values, end, steps)
    elif tree.LR_SCHEDULER_NAME == "WarmupCosineLR":
        schedule = solver.CosineParamScheduler(1.0, tree.BASE_LR_END / tree.BASE_LR)
    elif tree.LR_SCHEDULER_NAME == "WarmupStepWithFixedGammaLR":
        schedule = StepWithFixedGammaParamScheduler(
            1.0, tree.NUM_DECAYS, tree.GAMMA, end
        )
    else:
        raise ValueError(f"unknown SOLVER.LR_SCHEDULER_NAME {tree.LR_SCHEDULER_NAME!r}")
    warmup_share = min(tree.WARMUP_ITERS / end, 1.0)
    schedule = solver.WarmupParamScheduler(
        schedule,
        tree.WARMUP_FACTOR,
        warmup_share,
        tree.WARMUP_METHOD,
        tree.RESCALE_INTERVAL,
    )
    return solver.LRMultiplier(optimizer, schedule, end)
