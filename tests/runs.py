"""Runs of configurations, as tools/train_net.py makes them."""

from typing import Any

from hooktrain.engine import build_trainer, hooks


def build(cfg: Any, resume: bool = False) -> Any:
    """The trainer of a configuration, which goes on with the run in its folder if asked to."""
    trainer = build_trainer(cfg)
    trainer.checkpointer.resume_or_load(
        cfg.train.init_checkpoint, resume=resume, checkpointables=cfg.train.resume_parts
    )
    return trainer


def train(cfg: Any, resume: bool = False, max_iter: int | None = None) -> Any:
    """The same, when it has trained up to ``max_iter`` or to the end."""
    trainer = build(cfg, resume)
    trainer.train(max_iter=max_iter or cfg.train.max_iter)
    return trainer


def last_results(trainer: Any) -> Any:
    """What the last evaluation of a run has returned."""
    (evaluation,) = [h for h in trainer.hooks if isinstance(h, hooks.EvalHook)]
    return evaluation.last_results
