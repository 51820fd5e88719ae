"""Builds a trainer from a configuration: functions for its parts, and one that calls them all."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from hooktrain.checkpoint import Checkpointer
from hooktrain.config import LazyConfig, instantiate, resolve
from hooktrain.engine import hooks
from hooktrain.engine.defaults import default_hooks, default_writers
from hooktrain.engine.settings import check_settings
from hooktrain.engine.trainers import ModelTrainer, SimpleTrainer, StepTrainer
from hooktrain.evaluation import inference_on_dataset
from hooktrain.evaluation.testing import Results
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, as_optim_wrapper
from hooktrain.solver.build import Wrappers
from hooktrain.strategy import BaseStrategy, build_strategy
from hooktrain.utils.periods import end_of_run
from hooktrain.utils.tensors import broadcast_tensors

logger = logging.getLogger(__name__)


def build_trainer(
    cfg: Any, trainer_class: type[ModelTrainer] | None = None
) -> ModelTrainer:
    """Build the trainer that a lazy configuration describes, with its hooks. A collective.

    The configuration has the keys ``model``, ``optimizer``, ``lr_multiplier``,
    ``dataloader.{train,test,evaluator}`` and ``train``, which has the keys of
    :func:`hooktrain.engine.train_settings`. Without ``lr_multiplier`` the learning rate is
    constant, and without test data or an evaluator nothing is evaluated. ``hooks`` is a list of
    further hooks, ``writers`` a list of further writers. For several optimizers see
    :func:`build_optimizer`; ``lr_multiplier`` is then one for all of them, or a dict by their
    names.

    To change a part, copy the lines of this function into your script, and change that line.

    Args:
        cfg: the configuration. Its references are resolved, and ``train.max_iter`` is set from
            ``train.max_epochs``.
        trainer_class: the class of the trainer. None takes :class:`hooktrain.engine.StepTrainer`
            for a model with ``train_step``, else :class:`hooktrain.engine.SimpleTrainer`.

    Returns:
        The trainer, which has not loaded anything yet. Its ``checkpointer`` saves and loads the
        model and the trainer.

    Raises:
        ValueError: for an unknown key of ``train``; the message suggests the nearest.

    Example::

        trainer = build_trainer(cfg)
        trainer.checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
        trainer.train(max_iter=cfg.train.max_iter)
    """
    resolve(cfg)  # a script may have changed values that others refer to
    strategy, model = prepare_model(cfg)
    loader = instantiate(cfg.dataloader.train)
    optim_wrapper = build_optimizer(cfg, model)
    trainer = build_step(cfg, model, loader, optim_wrapper, trainer_class)
    trainer.seed = strategy.seed
    train = cfg.train
    if train.max_epochs is not None:
        length = trainer.epoch_length
        train.max_iter = end_of_run(0, train.max_iter, train.max_epochs, length)
        resolve(cfg)  # other values may refer to it
    trainer.meta = {"config": LazyConfig.to_py(cfg), "run_id": train.run_id}
    checkpointer = build_checkpointer(cfg, trainer)
    trainer.register_hooks(build_hooks(cfg, model, checkpointer))
    trainer.checkpointer = checkpointer
    return trainer


def prepare_model(cfg: Any) -> tuple[BaseStrategy, nn.Module]:
    """Build the strategy, and let it build and prepare the model. A collective.

    The constructor of a model initialises its weights, or ``init_weights`` does if its attribute
    ``is_init`` is False.

    Returns:
        The strategy and the model.

    Raises:
        ValueError: for a misspelt key; see :func:`hooktrain.engine.settings.check_settings`.
        TypeError: if ``train.strategy`` is already built, so that settings cannot change it.
        ImportError: for an unknown strategy.
    """
    check_settings(cfg)
    train = cfg.train
    strategy = build_strategy(
        train.strategy,
        ddp=train.ddp,
        sync_bn=train.sync_bn,
        device=train.device,
        activation_checkpointing=train.activation_checkpointing or (),
        seed=train.seed,
        diff_rank_seed=True,
    )
    model = strategy.prepare(lambda: instantiate(cfg.model), compile=train.compile)
    return strategy, model


def build_optimizer(cfg: Any, model: nn.Module) -> Wrappers:
    """Build the optimizer of a prepared model, and wrap it: precision, accumulation, clipping.

    ``cfg.optimizer`` is one of

    - a ``LazyCall`` of an optimizer, whose ``params`` is a call that gets the ``model``, such as
      :func:`hooktrain.solver.get_default_optimizer_params`;
    - a ``LazyCall`` without ``params``: a function that gets the ``model``, and returns an
      optimizer, or several by name. If it returns wrappers, they are not wrapped again.

    Args:
        cfg: the configuration, whose ``train`` has ``amp``, ``accumulative_counts`` and
            ``clip_grad``.
        model: the model that the strategy has prepared.

    Raises:
        TypeError: for an optimizer that has already been built.
    """
    optimizer = _instantiate_for(cfg.optimizer, unwrap_model(model))
    train = cfg.train
    wrap: Callable[..., OptimWrapper] = OptimWrapper
    if train.amp.enabled:
        dtype = instantiate(train.amp.dtype)  # a call, if read from a saved file
        wrap = partial(AmpOptimWrapper, dtype=dtype)
    elif train.amp.dtype != "float16":  # the default
        logger.info("train.amp.dtype has no effect without train.amp.enabled=true")
    return as_optim_wrapper(
        optimizer,
        partial(
            wrap,
            accumulative_counts=train.accumulative_counts,
            clip_grad=train.clip_grad,
        ),
    )


def _instantiate_for(described: Any, model: nn.Module) -> Any:
    """Build the optimizer of a model; the model is put into a copy of the configuration."""
    if not isinstance(described, Mapping) or "_target_" not in described:
        raise TypeError(
            "cfg.optimizer must be a LazyCall of an optimizer, or of a function of the model that "
            f"returns several by name, since the model is built before it, not {described!r}"
        )
    if "params" not in described:
        return instantiate({**described, "model": model})
    params = described["params"]
    if not isinstance(params, Mapping):
        raise TypeError(
            "params of an optimizer must be a LazyCall that gets the model, such as "
            f"LazyCall(get_default_optimizer_params)(), not {params!r}"
        )
    params = {**params, "model": model}
    return instantiate({**described, "params": params})


def build_step(
    cfg: Any,
    model: nn.Module,
    loader: Iterable[Any],
    optim_wrapper: Wrappers,
    trainer_class: type[ModelTrainer] | None = None,
) -> ModelTrainer:
    """Build the trainer, without hooks, of the given class or the class that fits the model."""
    if trainer_class is None:
        has_step = hasattr(unwrap_model(model), "train_step")
        trainer_class = StepTrainer if has_step else SimpleTrainer
    return trainer_class(model, loader, optim_wrapper, cfg.train.log_period)


def build_checkpointer(cfg: Any, trainer: ModelTrainer) -> Checkpointer:
    """Build the Checkpointer of the model and the trainer, for the output folder."""
    options = cfg.train.checkpointer
    return Checkpointer(
        trainer.model,
        cfg.train.output_dir,
        background=options.background,
        sharded=options.sharded,
        store=cfg.train.store,
        # The trainer owns the checkpointer, not the other way round.
        trainer=weakref.proxy(trainer),
    )


def build_hooks(
    cfg: Any, model: nn.Module, checkpointer: Checkpointer
) -> list[hooks.HookBase | None]:
    """Build the default hooks, EMA if it is enabled, and the hooks of the configuration."""
    train = cfg.train
    ema = hooks.EMA(model, train.ema.decay) if train.ema.enabled else None
    found = default_hooks(
        scheduler=instantiate(cfg.get("lr_multiplier")),
        checkpointer=checkpointer,
        checkpoint_period=train.checkpointer.period,
        max_to_keep=train.checkpointer.max_to_keep,
        eval_function=build_evaluation(cfg, model, ema),
        eval_period=train.eval_period,
        best_metric=train.best_metric,
        best_mode=train.best_mode,
        writers=[
            *default_writers(train.output_dir),
            *instantiate(cfg.get("writers", [])),
        ],
        log_period=train.log_period,
    )
    return [*found, ema, *instantiate(cfg.get("hooks", []))]


def build_evaluation(
    cfg: Any, model: nn.Module, ema: hooks.EMA | None = None
) -> Callable[[], Results]:
    """Build the function that evaluates during training.

    Args:
        cfg: the configuration, with test data and an evaluator.
        model: the model.
        ema: the hook whose average is evaluated too; its results are under ``"ema"``.
    """

    def once() -> Results:
        # Each rank has the batch norm of its own batches. All evaluate that of a checkpoint.
        broadcast_tensors(model.buffers())
        return evaluate(cfg, model, step="val_step")

    def run() -> Results:
        results = once()
        if ema is None:
            return results
        logger.info("Evaluating the averaged model")
        with ema.swap():
            return {**results, "ema": once()}

    return run


def evaluate(cfg: Any, model: nn.Module, *, step: str = "test_step") -> Results:
    """Evaluate a model on ``dataloader.test``. A collective.

    With a dict of several test loaders the results are grouped by their names, as in
    ``val/classification/accuracy``.

    Args:
        cfg: the configuration.
        model: the model.
        step: the method to call of a model that has its own steps.

    Returns:
        The results; an empty dict without test data or an evaluator.
    """
    evaluator = instantiate(cfg.dataloader.get("evaluator"))
    loader = instantiate(cfg.dataloader.get("test"))
    if loader is None or evaluator is None:
        logger.info("No evaluation: dataloader has no test data or no evaluator")
        return {}
    return inference_on_dataset(model, loader, evaluator, step=step)
