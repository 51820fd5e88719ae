"""The order in which a model becomes ready to train."""

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hooktrain import solver
from hooktrain.checkpoint import Checkpointer, load_model_state, revise_names
from hooktrain.config import instantiate
from hooktrain.model.sharding import WrapRule, checkpoint_activations, select_modules
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from hooktrain.solver.build import (
    Schedulers,
    check_scheduler_states,
    load_scheduler_states,
    scheduler_states,
)
from hooktrain.solver.optim_state import without_schedules
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.strategy import environment
from hooktrain.strategy.environment import Environment, Launcher, set_random_seed
from hooktrain.utils import comm
from hooktrain.utils.env import seed_step
from hooktrain.utils.file_io import AnyPath, on_disk
from hooktrain.utils.registry import MODELS
from hooktrain.utils.tensors import full_tensors

State = dict[str, Any]
Renames: TypeAlias = Sequence[tuple[str, str]]
# Of one optimizer, or of several by name.
Wrappers: TypeAlias = OptimWrapper | OptimWrapperDict
Compile: TypeAlias = bool | WrapRule | Mapping[str, Any]
# A model, its configuration, or a function that makes it.
ModelSource: TypeAlias = nn.Module | Mapping[str, Any] | Callable[[], nn.Module]

# As in DistributedDataParallel: what a broadcast may take beside the weights.
_BUCKET_BYTES = 250 * 1024 * 1024


class BaseStrategy(ABC):
    """Where a model lives, and in which order it and what trains it are built.

    :meth:`prepare` does this, in this order:

    1. :meth:`setup`: process group, device, seed;
    2. :meth:`build_model`, from a configuration if it is one;
    3. :meth:`init_model_weights`: the model's own ``init_weights``, if it has one; then
       ``activation_checkpointing``;
    4. :meth:`wrap_model`: to the device, the same on all ranks, in its wrapper;
    5. :meth:`compile_model`: so that the compiler sees the wrapper;
    6. :meth:`build_optim_wrapper`: for the parameters as they are from now on;
    7. the scaling of learning rates by the size of the batch;
    8. :meth:`build_param_scheduler`: schedulers note the learning rates that they find.

    Afterwards :meth:`load_or_resume` loads into what is there. Example::

        strategy = build_strategy("auto", work_dir="output")
        model, optim_wrapper = strategy.prepare(
            dict(type="DigitsCNN"),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        )
        strategy.load_or_resume(resume=True)

    A subclass overrides :meth:`wrap_model`, and what else is different. Those of
    :mod:`hooktrain.compat.mmengine` have MMEngine's ``build_logger`` too.

    Args:
        work_dir: the folder of the checkpoints, made when the first is written.
        env_kwargs: an :class:`Environment`, or a dict of its arguments or MMEngine's.
        auto_scale_lr: ``dict(enable=True, base_batch_size=...)`` multiplies learning
            rates by the samples of all ranks in one backward pass, over
            ``base_batch_size`` (`Goyal et al. <https://arxiv.org/abs/1706.02677>`_). Those
            of one rank are ``train_micro_batch_size_per_gpu`` in ``dispatch_kwargs``.
            Accumulated passes do not count, as in MMEngine.
        sync_bn: ``"torch"`` makes each batch norm take its statistics from the batches
            of all ranks, by :class:`torch.nn.SyncBatchNorm`, which needs accelerators.
        device: such as ``"cpu"`` or ``"cuda:1"``; see :func:`choose_device`.
        activation_checkpointing: the modules that compute again what the backward pass
            needs, which takes less memory: classes or their names, such as ``["Block"]``,
            or a function of name and module.

    Attributes:
        launcher: who started the processes; see :func:`infer_launcher`.
        timestamp: when the strategy was made, as ``20251231_235959``, on all ranks.
        device: where this process computes.
        seed: of the run, without a rank; after a resume that of the checkpoint.
        model: the model as it is to be called.
        optim_wrapper: the optimizer, or several.
        param_schedulers: the schedulers.
        dispatch_kwargs: what :meth:`prepare` got to know about the run.
        saves_shards: whether its checkpoints are folders of shards.

    Raises:
        TypeError: for an unknown name in ``env_kwargs``.
        ValueError: for another ``sync_bn``.
    """

    launcher: Launcher
    device: torch.device
    seed: Any
    model: nn.Module
    optim_wrapper: Wrappers
    param_schedulers: Schedulers
    saves_shards = False

    def __init__(
        self,
        *,
        work_dir: AnyPath = "work_dirs",
        env_kwargs: Environment | Mapping[str, Any] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        sync_bn: str | None = None,
        device: str | torch.device | None = None,
        activation_checkpointing: WrapRule = (),
    ) -> None:
        # On one process nothing else would look at it.
        if sync_bn not in (None, "torch"):
            raise ValueError(f"sync_bn must be 'torch' or None, but got {sync_bn!r}")
        self.work_dir = os.path.abspath(on_disk(work_dir))
        self.environment = Environment.of(env_kwargs)
        self.sync_bn = sync_bn
        self.activation_checkpointing = activation_checkpointing
        self.launcher = self.environment.launcher or environment.infer_launcher()
        self.timestamp = time.strftime("%Y%m%d_%H%M%S")
        self.seed = self.environment.seed
        self.dispatch_kwargs: dict[str, Any] = {}
        self.logger = logging.getLogger("hooktrain.strategy")
        self._auto_scale_lr = dict(auto_scale_lr or {})
        self._wanted_device = device
        self._is_set_up = False
        self._made_group = False

    def prepare(
        self,
        model: ModelSource,
        *,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        compile: Compile = False,
        dispatch_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a model ready, and what trains it. A collective.

        It may be called again, to train what was evaluated so far: what is there stays,
        and an optimizer and schedulers that were not asked for before are added.

        Args:
            model: see :meth:`build_model`.
            optim_wrapper: see :func:`hooktrain.solver.build_optim_wrapper`; None to
                evaluate only. One that is built has parameters of the prepared model.
            param_scheduler: see :func:`hooktrain.solver.build_param_scheduler`.
            compile: see :meth:`compile_model`.
            dispatch_kwargs: what is known of the run: ``epoch_length``, ``max_epochs``
                and ``max_iters`` for schedules and accumulation; see ``auto_scale_lr``;
                ``init_weights_for_test_or_val=False`` leaves ``init_weights`` out.

        Returns:
            The model; where there are an optimizer and schedulers, a list of the model
            and these.

        Raises:
            ValueError: for another model than before, or an optimizer of another.
        """
        self.setup()
        self.dispatch_kwargs |= dispatch_kwargs or {}
        if hasattr(self, "model"):
            self._check_same_model(model)
        else:
            built = self.build_model(model)
            if self.dispatch_kwargs.get("init_weights_for_test_or_val", True):
                self.init_model_weights(built)
            if self.activation_checkpointing:
                checkpoint_activations(built, self.activation_checkpointing)
            self.model = self.compile_model(self.wrap_model(built), compile)
        if optim_wrapper is not None and not hasattr(self, "optim_wrapper"):
            self.optim_wrapper = self.build_optim_wrapper(optim_wrapper, self.model)
            self.optim_wrapper.name_parameters(self.model)
            self._check_same_parameters()
            self._scale_lr()
            self._tell_length()
        if param_scheduler is not None and not hasattr(self, "param_schedulers"):
            self.param_schedulers = self.build_param_scheduler(
                param_scheduler, self.optim_wrapper
            )
        names = ("model", "optim_wrapper", "param_schedulers")
        parts = [getattr(self, name) for name in names if hasattr(self, name)]
        return parts if len(parts) > 1 else self.model

    def _check_same_model(self, model: ModelSource) -> None:
        if not isinstance(model, nn.Module):
            return
        if unwrap_model(model) is not unwrap_model(self.model):
            raise ValueError(
                "this strategy has prepared another model: make one strategy for each"
            )

    def _check_same_parameters(self) -> None:
        ours = set(self.model.parameters())
        for wrapper in wrappers_by_name(self.optim_wrapper).values():
            theirs = [p for group in wrapper.param_groups for p in group["params"]]
            if ours.isdisjoint(theirs):
                raise ValueError(
                    "the optimizer has none of the model's parameters: build it from "
                    "the prepared model, or give its configuration"
                )

    def setup(self) -> None:
        """Join the other processes, choose the device, and seed. A collective.

        A second call does nothing. Call it before :meth:`prepare` if you build the model,
        so that its weights depend on the seed.
        """
        if self._is_set_up:
            return
        settings = self.environment
        if self.distributed:  # an earlier strategy may have shared the data otherwise
            comm.set_data_part(self.rank, self.world_size)
        self._join_processes()
        self.device = environment.choose_device(self._wanted_device)
        self.timestamp = comm.broadcast(self.timestamp)
        settings.apply()
        self.seed = set_random_seed(
            settings.seed, diff_rank_seed=settings.diff_rank_seed
        )
        self._is_set_up = True

    def _join_processes(self) -> None:
        """Join the other processes, unless that is done already."""
        if self.launcher == "none" or self.distributed:
            return
        backend = self.environment.backend
        if backend is None and str(self._wanted_device) == "cpu":
            backend = "gloo"
        environment.join_processes(self.launcher, backend, self.environment.timeout)
        self._made_group = True

    def teardown(self) -> None:
        """Leave the other processes, if :meth:`setup` has joined them.

        Let go of a model in DistributedDataParallel first: it holds the process group.
        """
        if self._made_group:
            environment.leave_processes()
        self._made_group = False

    def build_model(self, model: ModelSource) -> nn.Module:
        """The model, from its configuration if it is one.

        Args:
            model: a module, which is returned; a dict with ``type`` in ``MODELS`` and
                arguments; a ``LazyCall``; or a function that makes the module.

        Raises:
            TypeError: for anything else, or if a configuration gives no module.
        """
        built: Any = instantiate(model)
        if isinstance(built, Mapping):
            built = MODELS.build(built)
        elif callable(built) and not isinstance(built, nn.Module):
            built = built()
        if not isinstance(built, nn.Module):
            raise TypeError(
                f"model should be a nn.Module object, dict or function, got {model!r}"
            )
        return built

    def init_model_weights(self, model: nn.Module) -> None:
        """Call the model's ``init_weights``, if it has one that was not called yet."""
        if hasattr(model, "init_weights") and not getattr(model, "is_init", False):
            model.init_weights()  # type: ignore[operator]
            model.is_init = True  # type: ignore[assignment]

    @abstractmethod
    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Bring a model that is not wrapped to its device, equal on all ranks, and wrap it."""

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Let batch norms use the batches of all ranks, if ``sync_bn`` asks for it."""
        if self.sync_bn is None or self.world_size == 1:
            return model
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]

    def place_model(self, model: nn.Module) -> nn.Module:
        """Bring a model to :attr:`device`, with the first rank's weights. A collective."""
        model = model.to(self.device)
        _broadcast((*model.parameters(), *model.buffers()))
        return model

    def compile_model(self, model: nn.Module, compile: Compile = False) -> nn.Module:
        """Compile a method of a model, or its repeated blocks, in place.

        Args:
            model: may be wrapped.
            compile: False, or a dict with ``disable=True``, leaves the model as it is.
                True compiles the forward. Names of classes, such as ``["Block"]``,
                compile these modules: the first of a kind takes time, and the others
                use its code. A dict has the arguments of :func:`torch.compile`, may have
                those names as ``blocks``, and may name another method as ``target``, such
                as ``"train_step"``; a copy of the model then calls the method of this
                one.
        """
        options: dict[str, Any] = {}
        if isinstance(compile, Mapping):
            options.update(compile)
        elif not isinstance(compile, bool):
            options["blocks"] = compile
        if compile is False or options.pop("disable", False):
            return model
        target = options.pop("target", "forward")
        blocks = options.pop("blocks", ())
        if blocks:
            for module in select_modules(unwrap_model(model), blocks):
                module.compile(**options)
        elif target == "forward":
            # The method of nn.Module knows of hooks, and copies of the model do without.
            model.compile(**options)
        else:
            setattr(model, target, torch.compile(getattr(model, target), **options))
        return model

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> Wrappers:
        """The optimizer; see :func:`hooktrain.solver.build_optim_wrapper`."""
        return solver.build_optim_wrapper(model, optim_wrapper)

    def _scale_lr(self) -> None:
        """Multiply learning rates by the batch of all ranks over ``base_batch_size``."""
        if not self._auto_scale_lr.get("enable", False):
            return
        base = self._auto_scale_lr.get("base_batch_size")
        own = self.dispatch_kwargs.get("train_micro_batch_size_per_gpu")
        if not base or not own:
            raise ValueError(
                f"auto_scale_lr has base_batch_size={base!r}, and there is "
                f"train_micro_batch_size_per_gpu={own!r} in dispatch_kwargs"
            )
        ratio = comm.data_parallel_size() * own / base
        self.logger.info("The batch is %g times as large: so are learning rates", ratio)
        for wrapper in wrappers_by_name(self.optim_wrapper).values():
            for group in wrapper.param_groups:
                if "initial_lr" in group:
                    raise RuntimeError(
                        "a scheduler has noted the learning rates before they were "
                        "scaled: give its configuration, or no auto_scale_lr"
                    )
                group["lr"] = group["lr"] * ratio

    def _tell_length(self, done: int = 0) -> None:
        """Say how long the run is, so that the last accumulation step is shorter."""
        max_iters = self.dispatch_kwargs.get("max_iters") or 0
        for wrapper in wrappers_by_name(self.optim_wrapper).values():
            count = wrapper.inner_count or done
            wrapper.initialize_count_status(self.model, count, max_iters)

    def build_param_scheduler(
        self, scheduler: Any, optim_wrapper: Wrappers
    ) -> Schedulers:
        """The schedulers; see :func:`hooktrain.solver.build_param_scheduler`."""
        names = ("epoch_length", "max_epochs", "max_iters")
        known = {name: self.dispatch_kwargs.get(name) for name in names}
        return solver.build_param_scheduler(scheduler, optim_wrapper, known)

    def model_state_dict(self) -> State:
        """The model's state, by names without a wrapper. A collective.

        What is sharded is whole on the main process and None on the others, unless
        checkpoints are saved as shards.
        """
        return self._whole(unwrap_model(self.model).state_dict())

    def optim_state_dict(self) -> State:
        """The state of the optimizer, sharded or not as the model's. A collective."""
        return self._whole(self.optim_wrapper.state_dict())

    def _whole(self, state: Any) -> State:
        whole: State = state if self.saves_shards else full_tensors(state)
        return whole

    def scheduler_state_dict(self) -> Any:
        """The states of the schedulers; by name, where there are several optimizers."""
        return scheduler_states(self.param_schedulers)

    def load_model_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        strict: bool = False,
        revise_keys: Renames = (),
    ) -> None:
        """Load what fits, and report what does not.

        Args:
            state_dict: of a model, wrapped or not.
            strict: raise a RuntimeError if there is a difference.
            revise_keys: see :func:`hooktrain.checkpoint.revise_names`.
        """
        state = revise_names(state_dict, revise_keys)
        load_model_state(unwrap_model(self.model), state, strict)

    def load_optim_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`optim_state_dict` returned."""
        self.optim_wrapper.load_state_dict(state_dict)

    def load_scheduler_state_dict(self, state_dict: Schedulers) -> None:
        """Load what :meth:`scheduler_state_dict` returned."""
        load_scheduler_states(self.param_schedulers, state_dict)

    def save_checkpoint(
        self,
        filename: AnyPath,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: Mapping[str, Any] | None = None,
        tag: bool = True,
    ) -> None:
        """Write a checkpoint; see :meth:`hooktrain.checkpoint.Checkpointer.save`.

        Args:
            filename: its path. A file there is replaced in one go.
            save_optimizer: with the optimizer's state, if there is one.
            save_param_scheduler: with the schedulers' states, if there are any.
            extra_ckpt: further entries, of tensors and plain types. ``meta`` gets the
                ``seed``, and needs ``iter``, the number of finished iterations, for
                :meth:`resume`.
            tag: make it the one to resume from, in its folder.
        """
        extra = dict(extra_ckpt or {})
        extra["meta"] = {**extra.get("meta", {}), "seed": self.seed}
        folder, name = os.path.split(os.path.abspath(on_disk(filename)))
        checkpointer = self._checkpointer(folder, save_optimizer, save_param_scheduler)
        checkpointer.save(name.removesuffix(".pth"), tag=tag, **extra)

    def load_checkpoint(
        self,
        filename: AnyPath,
        *,
        map_location: Any = "cpu",
        strict: bool = False,
        revise_keys: Renames = (),
    ) -> State:
        """Load the model, and nothing else, from a file or folder. A collective.

        Args:
            filename: see :meth:`hooktrain.checkpoint.Checkpointer.load`.
            map_location: MMEngine's. Weights go to where the model is, all else to the
                CPU.
            strict: as for :meth:`load_model_state_dict`.
            revise_keys: as for :meth:`load_model_state_dict`.

        Returns:
            What was not loaded.
        """
        state = self._checkpointer(self.work_dir).read(filename)
        self.load_model_state_dict(
            state.pop("model"), strict=strict, revise_keys=revise_keys
        )
        return state

    def resume(
        self,
        filename: AnyPath | None,
        *,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: Any = "cpu",
    ) -> State | None:
        """Go on with a run: model, optimizer, schedulers, random numbers. A collective.

        The generators are seeded by the checkpoint's seed, the number of iterations in
        ``meta["iter"]`` and the rank; see :func:`hooktrain.utils.env.seed_step`.

        Args:
            filename: as for :meth:`load_checkpoint`; None is the newest intact one in
                ``work_dir``.
            resume_optimizer: False begins with a new optimizer.
            resume_param_scheduler: False begins with new schedulers and their values.
            map_location: as for :meth:`load_checkpoint`.

        Returns:
            What was not loaded, such as ``meta``; None if there was no checkpoint.

        Raises:
            ValueError: if the checkpoint lacks a part.
        """
        checkpointer = self._checkpointer(
            self.work_dir, resume_optimizer, resume_param_scheduler
        )
        if filename is None:
            state = checkpointer.resume_or_load("", resume=True)
            if not state:
                return None
        else:
            state = checkpointer.load(filename, [*checkpointer.checkpointables])
        meta = state.get("meta") or {}
        done = meta.get("iter", 0)
        self.seed = meta.get("seed", self.seed)
        if hasattr(self, "optim_wrapper"):
            self._tell_length(done)
        seed_step(self.seed, done, comm.data_parallel_rank())
        return state

    def load_or_resume(
        self, *, load_from: AnyPath | None = None, resume: bool | AnyPath = False
    ) -> State | None:
        """Load weights, go on with a run, or neither. A collective, after :meth:`prepare`.

        Args:
            load_from: a path for :meth:`load_checkpoint`, or for :meth:`resume` if
                ``resume`` is True.
            resume: True resumes from ``load_from``, or else from the newest checkpoint
                in ``work_dir``, if there is one. A path is resumed from.

        Returns:
            What the method that was called returned, or None.
        """
        if resume is not False:
            return self.resume(load_from if resume is True else resume)
        return None if load_from is None else self.load_checkpoint(load_from)

    def _checkpointer(
        self, folder: str, with_optimizer: bool = False, with_schedulers: bool = False
    ) -> Checkpointer:
        parts: dict[str, Any] = {}
        if with_optimizer and hasattr(self, "optim_wrapper"):
            load: Callable[[Any], None] = self.load_optim_state_dict
            if not with_schedulers:
                load = self._load_without_schedules
            parts["optimizer"] = SimpleNamespace(
                state_dict=self.optim_state_dict,
                load_state_dict=load,
                check_state_dict=self.optim_wrapper.check_state_dict,
            )
        if with_schedulers and hasattr(self, "param_schedulers"):
            parts["param_schedulers"] = SimpleNamespace(
                state_dict=self.scheduler_state_dict,
                load_state_dict=self.load_scheduler_state_dict,
                check_state_dict=partial(check_scheduler_states, self.param_schedulers),
            )
        return Checkpointer(self.model, folder, sharded=self.saves_shards, **parts)

    def _load_without_schedules(self, state_dict: State) -> None:
        self.load_optim_state_dict(without_schedules(state_dict))

    @property
    def log_dir(self) -> str:
        """The folder for this run's logs, in ``work_dir``; it need not be there yet."""
        return os.path.join(self.work_dir, self.timestamp)

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


def broadcast_buffers(model: nn.Module) -> None:
    """Give all ranks the first one's buffers. A collective.

    Where ranks do not exchange them while training, they hold statistics of one rank's
    batches.
    """
    _broadcast(model.buffers())


def _broadcast(given: Iterable[Tensor]) -> None:
    tensors = [tensor.detach() for tensor in given]
    if tensors and comm.get_world_size() > 1:
        # What DistributedDataParallel uses too; torch has no public name for it.
        dist._broadcast_coalesced(dist.group.WORLD, tensors, _BUCKET_BYTES, 0)  # type: ignore[arg-type, attr-defined]
