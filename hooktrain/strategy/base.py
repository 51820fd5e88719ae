"""The order in which a model becomes ready to train, and the base of all that do it."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hooktrain.model import convert_sync_batchnorm
from hooktrain.solver import build_optim_wrapper, build_param_scheduler
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.strategy.environment import Environment
from hooktrain.strategy.model_parts import (
    ModelSource,
    broadcast_weights,
    build_model,
    compile_model,
)
from hooktrain.strategy.optim_parts import (
    check_not_built,
    initialize_counts,
    scale_lr,
    scaling_ratio,
)
from hooktrain.strategy.states import PreparedStates
from hooktrain.utils.registry import unwrap_model

__all__ = ["BaseStrategy"]

_RUN_ARGUMENTS = ("epoch_length", "max_epochs", "max_iters")


class BaseStrategy(PreparedStates):
    """Where a model lives, and in which order it and what trains it are built.

    :meth:`prepare` does this, in this order:

    1. :meth:`setup`: process group, device, seed;
    2. :meth:`build_model`, from a configuration if it is one;
    3. :meth:`init_model_weights`: the model's own ``init_weights``, if it has one;
    4. :meth:`wrap_model`: to the device, the same on all ranks, in its wrapper;
    5. :meth:`compile_model`: so that the compiler sees the wrapper;
    6. :meth:`build_optim_wrapper`: for the parameters as they are from now on;
    7. scaling of learning rates by the size of the batch;
    8. :meth:`build_param_scheduler`: they note the learning rates that they find.

    Afterwards :meth:`load_or_resume` loads into what is there. Example::

        strategy = build_strategy("auto", work_dir="output")
        model, optim_wrapper = strategy.prepare(
            dict(type="DigitsCNN"), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1))
        )
        strategy.load_or_resume(resume=True)

    A subclass overrides :meth:`wrap_model`, and what else differs.

    Args:
        work_dir: the folder of the checkpoints. Nothing is made until there is something to write.
        experiment_name: see :attr:`experiment_name`.
        env_kwargs: an :class:`Environment`, or a dict of its arguments or MMEngine's.
        log_kwargs: arguments of :meth:`build_logger`, which :meth:`setup` then calls; None leaves
            the logs as they are.
        auto_scale_lr: ``dict(enable=True, base_batch_size=...)`` multiplies learning rates by the
            number of samples that all ranks see in one backward pass, over ``base_batch_size``
            (`Goyal et al. <https://arxiv.org/abs/1706.02677>`_). It takes the number of one rank,
            ``train_micro_batch_size_per_gpu``, from ``dispatch_kwargs``. Passes that are
            accumulated do not count, as in MMEngine.
        sync_bn: ``"torch"`` makes each batch norm take its statistics from the batches of all
            ranks, by :class:`torch.nn.SyncBatchNorm`, which needs accelerators. None changes
            nothing; one process has all of the batch anyway.
        device: such as ``"cpu"`` or ``"cuda:1"``. None is the accelerator, if there is one; with
            several ranks, each has its own.

    Attributes:
        environment: the settings of the process.
        model: the model as it is to be called, once it is prepared.
        optim_wrapper: the optimizer or several, once prepared.
        param_schedulers: the schedulers, once prepared.
        dispatch_kwargs: what was said about the run.
        saves_shards: whether its checkpoints are folders of shards.

    Raises:
        TypeError: if ``env_kwargs`` is neither.
        ValueError: for an unknown name in ``env_kwargs``, or another ``sync_bn``.
    """

    saves_shards = False

    def __init__(
        self,
        *,
        work_dir: str | os.PathLike[str] = "work_dirs",
        experiment_name: str | None = None,
        env_kwargs: Environment | Mapping[str, Any] | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        sync_bn: str | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(
            work_dir=work_dir,
            experiment_name=experiment_name,
            env_kwargs=env_kwargs,
            log_kwargs=log_kwargs,
            device=device,
        )
        if sync_bn not in (None, "torch"):
            raise ValueError(f"sync_bn must be 'torch' or None, but got {sync_bn!r}")
        self.sync_bn = sync_bn
        self._auto_scale_lr = None if auto_scale_lr is None else dict(auto_scale_lr)
        self.dispatch_kwargs = {}
        self._compiled = False

    def prepare(
        self,
        model: ModelSource,
        *,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        compile: bool | Mapping[str, Any] = False,
        dispatch_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a model ready, and what trains it. A collective.

        It may be called again, to train what was evaluated so far: what is there stays, and what
        was not asked for before is added.

        Args:
            model: see :meth:`build_model`.
            optim_wrapper: see :meth:`build_optim_wrapper`; None to evaluate only.
            param_scheduler: see :meth:`build_param_scheduler`.
            compile: see :meth:`compile_model`.
            dispatch_kwargs: what is known of the run: ``epoch_length``, ``max_epochs`` and
                ``max_iters`` for schedules and accumulation, ``train_micro_batch_size_per_gpu`` for
                scaling, and ``init_weights_for_test_or_val=False`` to leave ``init_weights`` out,
                since weights are loaded afterwards.

        Returns:
            The model; where there are an optimizer and schedulers, a list of the model and these.

        Raises:
            ValueError: for a scheduler without an optimizer, or another model than before.
        """
        has_optimizer = optim_wrapper is not None or hasattr(self, "optim_wrapper")
        if param_scheduler is not None and not has_optimizer:
            raise ValueError("param_scheduler needs an optim_wrapper to schedule")
        self.setup()
        self.dispatch_kwargs = {**self.dispatch_kwargs, **(dispatch_kwargs or {})}
        init_weights = self.dispatch_kwargs.get("init_weights_for_test_or_val", True)
        self.prepare_model(model, compile=compile, init_weights=init_weights)
        if optim_wrapper is not None and not hasattr(self, "optim_wrapper"):
            self._prepare_optim_wrapper(optim_wrapper, param_scheduler)
        if param_scheduler is not None and not hasattr(self, "param_schedulers"):
            self.param_schedulers = self.build_param_scheduler(param_scheduler, self.optim_wrapper)
        names = ("model", "optim_wrapper", "param_schedulers")
        parts = [getattr(self, name) for name in names if hasattr(self, name)]
        return parts if len(parts) > 1 else self.model

    def prepare_model(
        self,
        model: ModelSource,
        *,
        compile: bool | Mapping[str, Any] = False,
        init_weights: bool = True,
    ) -> nn.Module:
        """The part of :meth:`prepare` that is about the model. A collective.

        Args:
            model: see :meth:`build_model`.
            compile: see :meth:`compile_model`.
            init_weights: whether to call the model's ``init_weights``, if it has it.

        Returns:
            The model as it is to be called.

        Raises:
            ValueError: if another model was prepared before.
        """
        self.setup()
        if not hasattr(self, "model"):
            built = self.build_model(model)
            if init_weights:
                self.init_model_weights(built)
            self.model = self.wrap_model(built)
        elif isinstance(model, nn.Module) and unwrap_model(model) is not unwrap_model(self.model):
            raise ValueError("this strategy has prepared another model: make one strategy for each")
        if compile is not False and not self._compiled:
            self.model = self.compile_model(self.model, compile)
            self._compiled = True
        return self.model

    def _prepare_optim_wrapper(self, optim_wrapper: Any, param_scheduler: Any) -> None:
        batch_size = self.dispatch_kwargs.get("train_micro_batch_size_per_gpu")
        ratio = scaling_ratio(self._auto_scale_lr, self.world_size, batch_size)
        if ratio != 1.0:
            check_not_built(param_scheduler)
        self.optim_wrapper = self.build_optim_wrapper(optim_wrapper, self.model)
        scale_lr(self.optim_wrapper, ratio)
        initialize_counts(self.optim_wrapper, self.model, self.dispatch_kwargs.get("max_iters"))

    def build_model(self, model: ModelSource) -> nn.Module:
        """The model, from its configuration if it is one.

        Args:
            model: a module, which is returned; a dict with ``type`` in ``MODELS`` and arguments; a
                ``LazyCall``; or a function without arguments that makes the module.

        Raises:
            TypeError: for anything else, or if a configuration gives no module.
        """
        return build_model(model)

    def init_model_weights(self, model: nn.Module) -> None:
        """Call the model's ``init_weights``, if it has one. It is still on the CPU, unwrapped."""
        if hasattr(model, "init_weights"):
            model.init_weights()  # type: ignore[operator]

    @abstractmethod
    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Bring a model to its device, equal on all ranks, and wrap it. A collective.

        A model that is wrapped already stays as it is.
        """

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Let batch norms communicate, if that is asked for."""
        if self.sync_bn is None:
            return model
        return convert_sync_batchnorm(model, self.sync_bn)

    def place_model(self, model: nn.Module) -> nn.Module:
        """Bring a model to :attr:`device`, and give it the first rank's weights. A collective.

        All parameters and buffers go in one coalesced broadcast.
        """
        model = model.to(self.device)
        broadcast_weights(model)
        return model

    def compile_model(
        self, model: nn.Module, compile: bool | Mapping[str, Any] = False
    ) -> nn.Module:
        """Compile a method of a model, in place.

        Args:
            model: also one in a wrapper; the names of its state do not change.
            compile: False, or a dict with ``disable=True``, leaves the model as it is. True
                compiles the forward. A dict has the arguments of :func:`torch.compile`, and may
                name another method as ``target``, such as ``"train_step"``. That one is of this
                model for good: a copy of the model would call it. The dict is not changed.

        Raises:
            TypeError: if ``compile`` is something else.
            ValueError: if the model has no method ``target``.
        """
        return compile_model(model, compile)

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> OptimWrapper | OptimWrapperDict:
        """The optimizer, from a configuration; see :func:`hooktrain.solver.build_optim_wrapper`.

        Args:
            optim_wrapper: a wrapper, a torch optimizer, or a configuration of one or several.
            model: the model, which a configuration needs.
        """
        return build_optim_wrapper(model, optim_wrapper)

    def build_param_scheduler(
        self,
        scheduler: Any,
        optim_wrapper: OptimWrapper | OptimWrapperDict,
        default_args: Mapping[str, Any] | None = None,
    ) -> list[Any] | dict[str, list[Any]]:
        """The schedulers, from configurations; see :func:`hooktrain.solver.build_param_scheduler`.

        Args:
            scheduler: a scheduler, a configuration, or several of them.
            optim_wrapper: what they schedule.
            default_args: ``epoch_length``, ``max_epochs`` and ``max_iters``; None takes them from
                :attr:`dispatch_kwargs`.
        """
        if default_args is None:
            known = self.dispatch_kwargs
            default_args = {name: known[name] for name in _RUN_ARGUMENTS if name in known}
        return build_param_scheduler(scheduler, optim_wrapper, default_args)
