"""What the hooks that watch a metric have in common: which direction is better, and if it comes."""

import logging
import re
from typing import Any

from hooktrain.engine.hooks.eval_hook import EvalHook
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.utils.registry import did_you_mean

logger = logging.getLogger(__name__)

_LESS = "loss losses error err mse rmse mae nll perplexity ppl wer cer fid"
_MORE = "acc accuracy ap map ar auc iou miou dice f recall precision psnr ssim bleu"


def better_by_name(metric: str) -> str | None:
    """``"min"`` for a loss or an error, ``"max"`` for a well-known score, None for any other name.

    >>> better_by_name("classification/val_loss"), better_by_name("bbox/AP50")
    ('min', 'max')
    """
    words = set(re.findall("[a-z]+", metric.lower()))
    less, more = (not words.isdisjoint(known.split()) for known in (_LESS, _MORE))
    return None if less == more else "min" if less else "max"


def sign_of(metric: str, mode: str | None) -> int:
    """1 if more of a metric is better, -1 if less is.

    Args:
        metric: its name.
        mode: ``"max"`` or ``"min"``; None asks the name.

    Raises:
        ValueError: for another mode, or if the name does not tell.
    """
    mode = mode or better_by_name(metric)
    if mode not in ("max", "min"):
        raise ValueError(f"mode must be 'max' or 'min' for the metric {metric!r}, but got {mode!r}")
    return 1 if mode == "max" else -1


def evaluated_at(trainer: TrainerBase) -> list[int]:
    """When each ``EvalHook`` of a trainer has evaluated last; see its ``evaluated_at``."""
    return [hook.evaluated_at for hook in trainer._hooks if isinstance(hook, EvalHook)]


def check_comes(hook: Any, metric: str) -> None:
    """End the run by an error if each ``EvalHook`` has evaluated, and a metric has not come.

    At the end of a run without an evaluation a warning says so.

    Args:
        hook: the one that watches it; it calls this in ``after_step`` where the period of metrics
            ends, and in ``after_train``.
        metric: its name.
    """
    trainer = hook.trainer
    measured_at, start = trainer.storage.latest_iter(metric), trainer.start_iter
    if measured_at is not None and measured_at >= start:
        return
    hint = did_you_mean(metric, trainer.storage.histories())
    text = f"{type(hook).__name__} watches the metric {metric!r}, which nothing has put{hint}"
    evaluations = evaluated_at(trainer)
    # Hooks may put metrics later in the iteration of an evaluation.
    if evaluations and all(start < at <= trainer.iter for at in evaluations):
        trainer.raise_later(ValueError(text))
    elif trainer.succeeded:
        logger.warning(text)
