"""MMEngine's strategies: the core's, with methods that build optimizers, save and resume."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn

from hooktrain import strategy
from hooktrain.checkpoint import Checkpointer, load_model_state, revise_names
from hooktrain.checkpoint.loading import Renames
from hooktrain.compat.mmengine.build import (
    Schedulers,
    build_optim_wrapper,
    build_param_scheduler,
    for_each_optimizer,
)
from hooktrain.compat.mmengine.registry import MODEL_WRAPPERS, MODELS, STRATEGIES
from hooktrain.config import instantiate
from hooktrain.engine.hooks.lr_scheduler import check_schedulers
from hooktrain.engine.preflight import check_parts
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper
from hooktrain.solver.build import Wrappers
from hooktrain.solver.optim_state import without_schedules
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.strategy.base import Compile
from hooktrain.strategy.environment import Launcher
from hooktrain.utils import comm
from hooktrain.utils.collect_env import collect_env_info
from hooktrain.utils.env import seed_step
from hooktrain.utils.file_io import AnyPath, lock_folder, on_disk
from hooktrain.utils.logger import setup_logger
from hooktrain.utils.names import State
from hooktrain.utils.tensors import full_tensors

# A function that may change a checkpoint before it is written or after it is read.
Callback: TypeAlias = Callable[[State], object] | None


class BaseStrategy(strategy.BaseStrategy):
    """:class:`hooktrain.strategy.BaseStrategy` with MMEngine's further methods.

    After the steps of the base class, :meth:`prepare` calls :meth:`build_optim_wrapper`
    for the final parameters, scales learning rates by the batch size, and calls
    :meth:`build_param_scheduler`, whose schedulers start from these rates. Afterwards,
    :meth:`load_or_resume` loads a checkpoint into these objects. Example::

        strategy = SingleDeviceStrategy(work_dir="output")
        model, optim_wrapper = strategy.prepare(
            dict(type="DigitsCNN"),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        )
        strategy.load_or_resume(resume=True)

    Unlike MMEngine's, the constructor sets nothing up and creates no folder;
    :meth:`prepare` and :meth:`setup` do.

    Args:
        work_dir: the folder of the checkpoints, created for the first one.
        experiment_name: see :attr:`experiment_name`.
        env_kwargs: ``launcher``, ``cudnn_benchmark``, ``randomness=dict(seed,
            diff_rank_seed, deterministic)``, ``dist_cfg=dict(backend, timeout)``, or the
            arguments of :class:`hooktrain.strategy.Environment` without these groups.
            ``mp_cfg`` and ``resource_limit`` have no effect: the start method of workers
            is an argument of the data loader, and processes of a group may open
            as many files as the system allows.
        log_kwargs: arguments of :meth:`build_logger`, which :meth:`setup` then calls;
            None does not change the loggers.
        auto_scale_lr: ``dict(enable=True, base_batch_size=...)`` multiplies learning
            rates by the number of samples of all ranks in one backward pass, divided by
            ``base_batch_size``. The number of one rank is
            ``train_micro_batch_size_per_gpu`` in ``dispatch_kwargs``. Gradient
            accumulation does not count.
        sync_bn: ``"torch"`` or None.
        kwargs: see :class:`hooktrain.strategy.BaseStrategy`.

    Attributes:
        timestamp: the time of construction, such as ``20251231_235959``, equal on all ranks.
        optim_wrapper: the optimizer wrapper, or several by name.
        param_schedulers: the schedulers.
        dispatch_kwargs: the facts about the run that were given to :meth:`prepare`.
        saves_shards: whether a checkpoint is a folder to which each rank writes its shards.

    Raises:
        TypeError: for an unknown name in ``env_kwargs``, or if this base class is
            instantiated.
        ValueError: for another ``sync_bn``.
    """

    optim_wrapper: Wrappers
    param_schedulers: Schedulers
    saves_shards = False

    def __init__(
        self,
        *,
        work_dir: AnyPath = "work_dirs",
        experiment_name: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        sync_bn: Any = None,
        **kwargs: Any,
    ) -> None:
        if type(self) is BaseStrategy:
            raise TypeError("use SingleDeviceStrategy, DDPStrategy or FSDPStrategy")
        if sync_bn not in (None, "torch"):
            raise ValueError(f"sync_bn must be 'torch' or None, but got {sync_bn!r}")
        self._env_kwargs = env_kwargs or {}
        super().__init__(**_settings(self._env_kwargs), sync_bn=sync_bn, **kwargs)
        self.work_dir = os.path.abspath(on_disk(work_dir))
        self.timestamp = time.strftime("%Y%m%d_%H%M%S")
        self.dispatch_kwargs: dict[str, Any] = {}
        self.logger = logging.getLogger("hooktrain.strategy")
        self._experiment_name = experiment_name
        self._log_kwargs = log_kwargs
        self._auto_scale_lr = auto_scale_lr or {}

    def setup(self) -> None:
        """Set up as the base class does, then the logging that ``log_kwargs`` describes."""
        if self._is_set_up:
            return
        self._setup_env(**self._env_kwargs)
        self.timestamp = comm.broadcast(self.timestamp)
        if self._log_kwargs is not None:
            self.build_logger(**self._log_kwargs)

    def _setup_env(self, **env_kwargs: Any) -> None:
        if env_kwargs.get("cudnn_benchmark"):
            torch.backends.cudnn.benchmark = True
        self.environment = replace(self.environment, **_settings(env_kwargs))
        self.launcher = self.environment.launcher or self.launcher
        super().setup()

    @property
    def seed(self) -> Any:
        """The seed. If it is not drawn yet, this calls :meth:`setup`, a collective."""
        if self._seed is None:
            self.setup()
        return self._seed

    @seed.setter
    def seed(self, seed: Any) -> None:
        self._seed = seed

    @property
    def randomness(self) -> dict[str, Any]:
        """The settings of randomness, from ``env_kwargs``."""
        settings = self.environment
        return {
            "seed": settings.seed,
            "diff_rank_seed": settings.diff_rank_seed,
            "deterministic": settings.deterministic,
        }

    @property
    def experiment_name(self) -> str:
        """The given name with the timestamp, or the timestamp alone."""
        if self._experiment_name is None:
            return self.timestamp
        return f"{self._experiment_name}_{self.timestamp}"

    @property
    def log_dir(self) -> str:
        """The folder for this run's logs, in ``work_dir``; it may not exist yet."""
        return os.path.join(self.work_dir, self.timestamp)

    def build_logger(
        self,
        log_level: int | str = "INFO",
        log_file: AnyPath | None = None,
        **ignored: Any,
    ) -> logging.Logger:
        """Log to the terminal and to a file.

        Args:
            log_level: the lowest level to log.
            log_file: see :func:`hooktrain.utils.logger.setup_logger`; None is
                ``<log_dir>/<timestamp>.log``.
            ignored: further arguments of MMEngine's logger.
        """
        name = os.path.join(self.log_dir, f"{self.timestamp}.log")
        logger = setup_logger(log_file or name, self.rank)
        logger.setLevel(log_level)
        return logger

    def collect_env(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Facts about the machine, and the settings of this process."""
        lines = collect_env_info().splitlines()
        system = dict(line.split(": ", 1) for line in lines if ": " in line)
        return system, {
            **self._env_kwargs,
            **self.randomness,
            "Distributed launcher": self.launcher,
            "Distributed training": self.distributed,
            "GPU number": self.world_size,
        }

    def prepare(
        self,
        model: Any,
        *,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        compile: Compile = False,
        dispatch_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Prepare a model, its optimizer and its schedulers. A collective.

        It may be called again to train a model that was only evaluated so far: existing
        objects are kept, and the optimizer and schedulers are added.

        Args:
            model: see :meth:`build_model`.
            optim_wrapper: see :meth:`build_optim_wrapper`; None to evaluate only. If it
                is already built, it must have parameters of the prepared model.
            param_scheduler: see :meth:`build_param_scheduler`.
            compile: see :meth:`compile_model`.
            dispatch_kwargs: facts about the run: ``epoch_length``, ``max_epochs``
                and ``max_iters`` for schedules and accumulation; see ``auto_scale_lr``;
                ``init_weights_for_test_or_val=False`` skips ``init_weights``.

        Returns:
            The model; or, if there are an optimizer or schedulers, a list of the model
            and these.

        Raises:
            ValueError: if another model was prepared before, or the optimizer is another
                model's.
        """
        self.dispatch_kwargs |= dispatch_kwargs or {}
        super().prepare(model, compile=compile)
        if optim_wrapper is not None and not hasattr(self, "optim_wrapper"):
            self.optim_wrapper = self.build_optim_wrapper(optim_wrapper, self.model)
            self.optim_wrapper.name_parameters(self.model)
            check_parts(self.model, self.optim_wrapper)
            self._scale_lr()
            self._initialize_counts()
        if param_scheduler is not None and not hasattr(self, "param_schedulers"):
            self.param_schedulers = self.build_param_scheduler(
                param_scheduler, self.optim_wrapper
            )
        return self._prepared_components()

    def _prepared_components(self) -> Any:
        parts = ("model", "optim_wrapper", "param_schedulers")
        built = [getattr(self, name) for name in parts if hasattr(self, name)]
        return built if len(built) > 1 else self.model

    def build_model(self, model: Any) -> nn.Module:
        """Build the model, unless it is a module already.

        Args:
            model: a dict with ``type`` in ``MODELS`` and arguments; or a model for
                :meth:`hooktrain.strategy.BaseStrategy.build_model`.

        Raises:
            TypeError: for any other object, or if the result is not a module.
        """
        if isinstance(model, Mapping) and "type" in model:
            model = partial(MODELS.build, instantiate(model))
        return super().build_model(model)

    def init_model_weights(self, model: nn.Module) -> None:
        """Call the model's ``init_weights``, if it has that method and it was not called yet.

        ``init_weights_for_test_or_val=False`` in ``dispatch_kwargs`` skips it. A model
        on the meta device has no values to initialise.
        """
        if not any(parameter.is_meta for parameter in model.parameters()):
            self._init_model_weights(model)

    def _init_model_weights(self, model: nn.Module) -> nn.Module:
        wanted = self.dispatch_kwargs.get("init_weights_for_test_or_val", True)
        is_done = getattr(model, "is_init", False)
        if wanted and hasattr(model, "init_weights") and not is_done:
            model.init_weights()  # type: ignore[operator]
            model.is_init = True  # type: ignore[assignment]
        return model

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Wrap the model by MMEngine's ``_wrap_model``, which a subclass may override."""
        return self._wrap_model(model)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        return super().wrap_model(model)

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> Wrappers:
        """Build the optimizer; see :func:`hooktrain.compat.mmengine.build_optim_wrapper`."""
        return build_optim_wrapper(model, optim_wrapper)

    def _scale_lr(self) -> None:
        """Multiply learning rates by the batch size of all ranks over ``base_batch_size``."""
        if not self._auto_scale_lr.get("enable"):
            return
        own = self.dispatch_kwargs["train_micro_batch_size_per_gpu"]
        batch = comm.data_parallel_size() * own
        ratio = batch / self._auto_scale_lr["base_batch_size"]
        for wrapper in by_name(self.optim_wrapper).values():
            for group in wrapper.param_groups:
                if "initial_lr" in group:
                    raise RuntimeError(
                        "a scheduler was built before the learning rates were scaled: "
                        "build schedulers afterwards"
                    )
                group["lr"] = group["lr"] * ratio

    def _initialize_counts(self, done: int = 0) -> None:
        """Tell the wrappers the length of the run, so that its last accumulation is shorter."""
        max_iters = self.dispatch_kwargs.get("max_iters") or 0
        for wrapper in by_name(self.optim_wrapper).values():
            count = wrapper.inner_count or done
            wrapper.initialize_count_status(self.model, count, max_iters)

    def build_param_scheduler(
        self,
        scheduler: Any,
        optim_wrapper: Wrappers,
        default_args: Mapping[str, Any] | None = None,
    ) -> Schedulers:
        """Build the schedulers; see :func:`hooktrain.compat.mmengine.build_param_scheduler`.

        Args:
            scheduler: one or several; with several optimizers, a dict by their names, or the
                same for each.
            optim_wrapper: the optimizer wrapper, or several by name.
            default_args: default arguments, which a configuration may override. The facts
                in ``dispatch_kwargs`` are among them.

        Raises:
            KeyError: if a dict lacks the name of an optimizer.
        """
        known = {**(default_args or {})}
        for name in ("epoch_length", "max_epochs", "max_iters"):
            known.setdefault(name, self.dispatch_kwargs.get(name))
        build = partial(self._build_param_scheduler, default_args=known)
        return for_each_optimizer(build, scheduler, optim_wrapper)

    def _build_param_scheduler(
        self, scheduler: Any, optim_wrapper: OptimWrapper, default_args: dict[str, Any]
    ) -> list[Any]:
        return build_param_scheduler(scheduler, optim_wrapper, default_args)  # type: ignore[return-value]

    def model_state_dict(self) -> State:
        """The state dict of the model without its wrapper. A collective.

        Sharded tensors are whole on the main process and None on the others, unless
        checkpoints are saved as shards.
        """
        return self._whole(unwrap_model(self.model).state_dict())

    def optim_state_dict(self) -> State:
        """The state of the optimizer, sharded if the model's is. A collective."""
        return self._whole(self.optim_wrapper.state_dict())

    def _whole(self, state: Any) -> State:
        return state if self.saves_shards else full_tensors(state)  # type: ignore[no-any-return]

    def scheduler_state_dict(self) -> Any:
        """The states of the schedulers; by name, if there are several optimizers."""
        states = {}
        for name, schedulers in by_name(self.param_schedulers).items():
            states[name] = [scheduler.state_dict() for scheduler in schedulers]
        return states.get("", states)

    def load_model_state_dict(
        self, state_dict: State, *, strict: bool = False, revise_keys: Renames = ()
    ) -> None:
        """Load the tensors that match the model, and log the others.

        Args:
            state_dict: the state dict of a model, wrapped or not.
            strict: whether to raise a ValueError if there is a difference.
            revise_keys: see :func:`hooktrain.checkpoint.revise_names`.
        """
        state = revise_names(state_dict, revise_keys)
        load_model_state(unwrap_model(self.model), state, strict)

    def load_optim_state_dict(self, state_dict: State) -> None:
        """Load a state from :meth:`optim_state_dict`."""
        self.optim_wrapper.load_state_dict(state_dict)

    def load_scheduler_state_dict(self, state_dict: Schedulers) -> None:
        """Load the states from :meth:`scheduler_state_dict`.

        Raises:
            ValueError: if the number of schedulers differs.
        """
        self._check_scheduler_state(state_dict)
        states = by_name(state_dict)
        for name, schedulers in by_name(self.param_schedulers).items():
            for scheduler, state in zip(schedulers, states[name], strict=True):
                scheduler.load_state_dict(state)

    def _check_scheduler_state(self, state_dict: Schedulers) -> None:
        check_schedulers(by_name(self.param_schedulers), by_name(state_dict))

    def save_checkpoint(
        self,
        filename: AnyPath,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: Mapping[str, Any] | None = None,
        callback: Callback = None,
    ) -> None:
        """Write a checkpoint, and make it the one to resume from in its folder.

        The first save locks the folder for this run, and removes the temporary files of
        killed runs.

        Args:
            filename: the path. An existing file is replaced atomically. A name such as
                ``iter_70.pth`` or ``epoch_3.pth`` makes the file a fallback if a newer one
                is damaged.
            save_optimizer: whether to save the optimizer's state, if there is one.
            save_param_scheduler: whether to save the schedulers' states, if there are any.
            extra_ckpt: further entries, of tensors and plain types. The ``seed`` is added
                to ``meta``, which needs ``iter``, the number of finished iterations, for
                :meth:`resume`.
            callback: called with the checkpoint, which it may change, on each rank that
                saves.

        Raises:
            RuntimeError: if another run is using the folder.
        """
        extra = dict(extra_ckpt or {})
        extra["meta"] = {**extra.get("meta", {}), "seed": self.seed}
        folder, name = os.path.split(os.path.abspath(on_disk(filename)))
        checkpointer = self._checkpointer(
            folder, save_optimizer, save_param_scheduler, callback
        )
        if checkpointer.save_to_disk:
            os.makedirs(folder, exist_ok=True)
            lock_folder(folder)
        checkpointer.save(name.removesuffix(".pth"), **extra)

    def load_checkpoint(
        self,
        filename: AnyPath,
        *,
        map_location: Any = "cpu",
        strict: bool = False,
        revise_keys: Renames = (),
        callback: Callback = None,
    ) -> State:
        """Load the model, and nothing else, from a file or folder. A collective.

        Args:
            filename: see :meth:`hooktrain.checkpoint.Checkpointer.load`.
            map_location: ignored. Weights go to the model's device, all else to the CPU.
            strict: see :meth:`load_model_state_dict`.
            revise_keys: see :meth:`load_model_state_dict`.
            callback: called with the checkpoint, which it may change, before it is
                loaded into the model.

        Returns:
            The entries that were not loaded.
        """
        checkpointer = self._checkpointer(self.work_dir, callback=callback)
        state = checkpointer.called(checkpointer.read(filename))
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
        map_location: Any = "default",
        callback: Callback = None,
    ) -> State | None:
        """Resume a run: model, optimizer, schedulers, random numbers. A collective.

        The generators are seeded by the checkpoint's seed, the number of iterations in
        ``meta["iter"]`` and the rank; see :func:`hooktrain.utils.env.seed_step`.

        Args:
            filename: see :meth:`load_checkpoint`; None is the newest intact checkpoint in
                ``work_dir``.
            resume_optimizer: False starts with a new optimizer.
            resume_param_scheduler: False starts with new schedulers and their values.
            map_location: see :meth:`load_checkpoint`.
            callback: see :meth:`load_checkpoint`.

        Returns:
            The entries that were not loaded, such as ``meta``; None if there was no
            checkpoint.

        Raises:
            ValueError: if the checkpoint lacks an entry, or a tensor in it has another shape
                than the model's.
        """
        checkpointer = self._checkpointer(
            self.work_dir, resume_optimizer, resume_param_scheduler, callback
        )
        if filename is None:
            state = checkpointer.resume_or_load("")
            if not state:
                return None
        else:
            state = checkpointer.load(filename, checkpointer.checkpointables)
        meta = state.get("meta") or {}
        done = meta.get("iter", 0)
        self.seed = meta.get("seed", self.seed)
        if hasattr(self, "optim_wrapper"):
            self._initialize_counts(done)
        seed_step(self.seed, done, comm.data_parallel_rank())
        return state

    def load_or_resume(
        self, *, load_from: AnyPath | None = None, resume: bool | AnyPath = False
    ) -> State | None:
        """Load weights, resume a run, or neither. A collective, after :meth:`prepare`.

        Args:
            load_from: a path for :meth:`load_checkpoint`, or for :meth:`resume` if
                ``resume`` is True.
            resume: True resumes from ``load_from``, or else from the newest checkpoint
                in ``work_dir``, if there is one. A path resumes from that checkpoint.

        Returns:
            The result of :meth:`load_checkpoint` or :meth:`resume`, or None.
        """
        if resume is not False:
            return self.resume(load_from if resume is True else resume)
        return None if load_from is None else self.load_checkpoint(load_from)

    def _checkpointer(
        self,
        folder: str,
        with_optimizer: bool = False,
        with_schedulers: bool = False,
        callback: Callback = None,
    ) -> "_Checkpointer":
        parts: dict[str, Any] = {}
        if with_optimizer and hasattr(self, "optim_wrapper"):
            load = (
                self.load_optim_state_dict
                if with_schedulers
                else self._load_without_schedules
            )
            parts["optimizer"] = SimpleNamespace(
                state_dict=self.optim_state_dict,
                load_state_dict=load,
                check_state_dict=self.optim_wrapper.check_state_dict,
            )
        if with_schedulers and hasattr(self, "param_schedulers"):
            parts["param_schedulers"] = SimpleNamespace(
                state_dict=self.scheduler_state_dict,
                load_state_dict=self.load_scheduler_state_dict,
                check_state_dict=self._check_scheduler_state,
            )
        checkpointer = _Checkpointer(
            self.model, folder, sharded=self.saves_shards, **parts
        )
        checkpointer.strategy = self
        checkpointer.callback = callback
        return checkpointer

    def _load_without_schedules(self, state_dict: State) -> None:
        self.load_optim_state_dict(without_schedules(state_dict))


class _Checkpointer(Checkpointer):
    """Saves and loads the model by the strategy's methods, and calls the callback."""

    strategy: BaseStrategy
    callback: Callback = None

    def content(self, extra: State) -> State:
        content = super().content(extra)
        content["model"] = self.strategy.model_state_dict()
        return self.called(content)

    def _restore(self, path: str, state: State, *args: Any, **kwargs: Any) -> State:
        return super()._restore(path, self.called(state), *args, **kwargs)

    def _load_into_model(self, state: State, strict: bool) -> None:
        self.strategy.load_model_state_dict(
            state["model"], strict=self.callback is None
        )

    def called(self, state: State) -> State:
        """Call the callback on a checkpoint, and return the checkpoint."""
        if self.callback is not None:
            self.callback(state)
        return state


def _settings(env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of MMEngine's strategies to those of the core's Environment."""
    flat = dict(env_kwargs)
    for group in ("randomness", "dist_cfg"):
        flat |= flat.pop(group, None) or {}
    for other in ("mp_cfg", "resource_limit", "cudnn_benchmark"):
        flat.pop(other, None)
    return flat


@STRATEGIES.register_module()
class SingleDeviceStrategy(BaseStrategy, strategy.SingleDeviceStrategy):
    """:class:`hooktrain.strategy.SingleDeviceStrategy` as a :class:`BaseStrategy`."""


@STRATEGIES.register_module()
class DDPStrategy(SingleDeviceStrategy, strategy.DDPStrategy):
    """:class:`hooktrain.strategy.DDPStrategy` as a :class:`BaseStrategy`.

    As in MMEngine, it is a :class:`SingleDeviceStrategy` that joins other processes.

    Args:
        model_wrapper: a dict of ``type``, a name in ``MODEL_WRAPPERS`` or a class, and the
            arguments of :func:`hooktrain.strategy.create_ddp_model`. Without ``type`` the
            wrapper that fits the model is chosen.
        kwargs: see :class:`BaseStrategy`.
    """

    def __init__(
        self, *, model_wrapper: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        options = dict(model_wrapper or {})
        if "type" in options:
            options["wrapper"] = MODEL_WRAPPERS.find(options.pop("type"))
        super().__init__(ddp=options, **kwargs)
        self.model_wrapper = model_wrapper

    _join_processes = strategy.BaseStrategy._join_processes

    def _setup_distributed(
        self, launcher: Launcher = "pytorch", *args: Any, **kwargs: Any
    ) -> None:
        super()._setup_distributed(launcher, *args, **kwargs)


@STRATEGIES.register_module()
class FSDPStrategy(BaseStrategy, strategy.FSDPStrategy):
    """:class:`hooktrain.strategy.FSDPStrategy` as a :class:`BaseStrategy`.

    Args:
        state_dict_cfg: ``"full"`` saves one file, as other strategies do; the states are
            whole on the main process, and sharded tensors are None on the others.
            ``"local"`` or ``"sharded"`` saves a folder to which each rank writes its
            shards, and the states hold shards. Both can be loaded in either case.
        kwargs: see :class:`BaseStrategy` and :class:`hooktrain.strategy.FSDPStrategy`.

    Raises:
        ValueError: if ``state_dict_cfg`` is unknown.
    """

    def __init__(self, *, state_dict_cfg: str = "full", **kwargs: Any) -> None:
        if state_dict_cfg not in ("full", "sharded", "local"):
            raise ValueError(
                f"state_dict_cfg must be 'full' or 'local', got {state_dict_cfg!r}"
            )
        super().__init__(**kwargs)
        self.saves_shards = state_dict_cfg != "full"
