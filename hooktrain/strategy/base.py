"""The order of the steps that make a model ready to train."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from hooktrain.config import instantiate
from hooktrain.model import init_weights_once
from hooktrain.model.sharding import WrapRule, checkpoint_activations
from hooktrain.model.wrappers import is_model_wrapper, unwrap_model
from hooktrain.strategy import environment
from hooktrain.strategy.environment import Environment, Launcher, set_random_seed
from hooktrain.utils import comm
from hooktrain.utils.tensors import Device, broadcast_model

logger = logging.getLogger(__name__)

Compile: TypeAlias = bool | Mapping[str, Any]
# A model, a LazyCall of it, or a function that makes it.
ModelSource: TypeAlias = nn.Module | Mapping[str, Any] | Callable[[], nn.Module]


class BaseStrategy:
    """Places a model on its devices and makes it ready to train.

    :meth:`prepare` takes these steps, in this order:

    1. :meth:`setup`: process group, device, seed;
    2. :meth:`build_model`, from a LazyCall or a function;
    3. :meth:`init_model_weights`: the model's own ``init_weights``, if it is still to be called;
       then ``activation_checkpointing``;
    4. :meth:`wrap_model`: to the device, with equal weights on all ranks, in its wrapper;
    5. :meth:`compile_model`, after the wrapper, so that the compiler sees it.

    Build the optimizer afterwards, for the final parameters. Example::

        strategy = build_strategy("auto", seed=0)
        model = strategy.prepare(DigitsCNN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    A subclass overrides :meth:`wrap_model` and any other step that differs. The strategies of
    :mod:`hooktrain.compat.mmengine` have MMEngine's further methods.

    Args:
        device: the device, such as ``"cpu"`` or ``"cuda:1"``; see :func:`choose_device`.
        sync_bn: whether to compute the statistics of batch norms over the batches of all ranks,
            by :class:`torch.nn.SyncBatchNorm`, which needs accelerators.
        activation_checkpointing: the modules that recompute their activations in the backward
            pass to save memory: classes or their names, such as ``["Block"]``, or a function of
            name and module.
        ddp: the options of :func:`create_ddp_model` for a :class:`DDPStrategy`, such as
            ``dict(find_unused_parameters=True)``. ``broadcast_buffers`` is False by default.
        settings: arguments of :class:`Environment`, such as ``seed=0`` or
            ``backend="gloo"``.

    Attributes:
        environment: the ``settings`` above.
        launcher: the program that started the processes; see :func:`infer_launcher`.
        device: the device of this process, from :meth:`setup` on.
        seed: the seed of the run, without the rank. If none was given, :meth:`setup` draws it.
        model: the prepared model.

    Raises:
        TypeError: if an argument is unknown.
    """

    launcher: Launcher
    device: torch.device
    seed: Any
    model: nn.Module

    def __init__(
        self,
        *,
        device: Device | None = None,
        sync_bn: bool = False,
        activation_checkpointing: WrapRule = (),
        ddp: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.environment = Environment(**settings)
        self.sync_bn = sync_bn
        self.activation_checkpointing = activation_checkpointing
        self.ddp = ddp or {}
        self.launcher = self.environment.launcher or environment.infer_launcher()
        self.seed = self.environment.seed
        self._wanted_device = device
        self._is_set_up = False

    def prepare(self, model: ModelSource, *, compile: Compile = False) -> nn.Module:
        """Make a model ready to train. A collective.

        Another call with the same model returns the prepared model again.

        Args:
            model: see :meth:`build_model`.
            compile: see :meth:`compile_model`.

        Returns:
            The prepared model.

        Raises:
            ValueError: if the strategy has already prepared another model.
        """
        self.setup()
        if hasattr(self, "model"):
            bare = unwrap_model(self.model)
            if isinstance(model, nn.Module) and unwrap_model(model) is not bare:
                raise ValueError(
                    "this strategy has already prepared another model: make a strategy for each"
                )
            return self.model
        built = self.build_model(model)
        self.init_model_weights(built)
        if self.activation_checkpointing:
            checkpoint_activations(built, self.activation_checkpointing)
        self.model = self.compile_model(self.wrap_model(built), compile)
        return self.model

    def setup(self) -> None:
        """Join the other processes, choose the device, and seed. A collective.

        A second call has no effect. If you build the model yourself, call this first, so that the
        seed determines its weights.
        """
        if self._is_set_up:
            return
        settings = self.environment
        if self.distributed:  # an earlier strategy may have set other parts of the data
            comm.set_data_part(self.rank, self.world_size)
        self._join_processes()
        self.device = environment.choose_device(self._wanted_device)
        self._set_randomness(
            settings.seed, settings.diff_rank_seed, settings.deterministic
        )
        self._is_set_up = True

    def _join_processes(self) -> None:
        """Join the other processes, unless this one already has."""
        if self.launcher == "none" or self.distributed:
            return
        backend = self.environment.backend
        if backend is None and str(self._wanted_device) == "cpu":
            backend = "gloo"
        self._setup_distributed(
            self.launcher, backend, timeout=self.environment.timeout
        )

    # MMEngine's users override these two by their names.
    _setup_distributed = staticmethod(environment.join_processes)

    def _set_randomness(
        self,
        seed: int | None = None,
        diff_rank_seed: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.seed = set_random_seed(seed, deterministic, diff_rank_seed)

    def build_model(self, model: ModelSource) -> nn.Module:
        """Build the model, unless it is a module already.

        Args:
            model: a module, which is returned; a ``LazyCall`` of one; or a function that
                returns one.

        Raises:
            TypeError: for any other object, or if the LazyCall or function returns one.
        """
        built: Any = instantiate(model)
        if callable(built) and not isinstance(built, nn.Module):
            built = built()
        if not isinstance(built, nn.Module):
            raise TypeError(
                f"model must be an nn.Module, or a LazyCall or function of one, not {built!r}"
            )
        return built

    def init_model_weights(self, model: nn.Module) -> None:
        """Call the model's ``init_weights`` if its ``is_init`` is False.

        Any other model was initialised by its constructor.
        """
        init_weights_once(model)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Move a model to its device, with equal weights on all ranks; a subclass also wraps it.

        A wrapped model is returned as it is.
        """
        if is_model_wrapper(model):
            return model
        return self.place_model(self.convert_model(model))

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Convert batch norms to synchronised ones if ``sync_bn`` is set."""
        if not self.sync_bn or self.world_size == 1:
            return model
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move a model to ``self.device``, with the first rank's weights. A collective."""
        model = model.to(self.device)
        broadcast_model(model)
        return model

    def compile_model(self, model: nn.Module, compile: Compile = False) -> nn.Module:
        """Compile a method of a model, in place.

        Args:
            model: a model, wrapped or not.
            compile: False compiles nothing. True compiles ``forward``. A dict has the arguments of
                :func:`torch.compile`, and may name another method as ``target``, such as
                ``"train_step"``; a copy of the model then calls the method of the original.
        """
        if compile is False:
            return model
        options = {} if compile is True else {**compile}
        target = options.pop("target", "forward")
        if target == "forward":
            # nn.Module.compile compiles hooks too. Copies of the model are not compiled.
            model.compile(**options)
        else:
            setattr(model, target, torch.compile(getattr(model, target), **options))
        return model

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return comm.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return comm.get_world_size()

    @property
    def distributed(self) -> bool:
        """Whether there is a process group."""
        return dist.is_initialized()
