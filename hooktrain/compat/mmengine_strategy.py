"""MMEngine's strategies: with callbacks around checkpoints, and a logger of the run."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hooktrain import strategy
from hooktrain.checkpoint import Checkpointer
from hooktrain.utils import names
from hooktrain.utils.collect_env import collect_env
from hooktrain.utils.file_io import AnyPath
from hooktrain.utils.logger import setup_logger
from hooktrain.utils.registry import STRATEGIES
from hooktrain.utils.tensors import full_tensors

State: TypeAlias = dict[str, Any]
Callback: TypeAlias = Callable[[State], object] | None

_NOT_CALLED = {
    "_setup_env": "override setup()",
    "_setup_distributed": "override setup()",
    "_set_randomness": "override setup()",
    "_wrap_model": "override wrap_model()",
    "_init_model_weights": "override init_model_weights()",
    "_build_param_scheduler": "override build_param_scheduler()",
}


class _Checkpointer(Checkpointer):
    """Calls a function with what is written, and with what was read."""

    callback: Callback = None

    def content(self, extra: State) -> State:
        state = super().content(extra)
        if self.callback is not None:
            state = state if self.sharded else full_tensors(state)
            self.callback(state)
        return state

    def read(self, path: AnyPath) -> State:
        state = super().read(path)
        if self.callback is not None:
            self.callback(state)
        return state

    def read_newest(self) -> tuple[str, State] | None:
        found = super().read_newest()
        if found is not None and self.callback is not None:
            self.callback(found[1])
        return found


class BaseStrategy(strategy.BaseStrategy):
    """:class:`hooktrain.strategy.BaseStrategy` with what MMEngine's users know.

    Args:
        experiment_name: see :attr:`experiment_name`.
        log_kwargs: arguments of :meth:`build_logger`, which :meth:`setup` then calls;
            None leaves the loggers as they are.
        kwargs: see :class:`hooktrain.strategy.BaseStrategy`.

    Raises:
        TypeError: when a subclass is defined that overrides what nothing calls here.
    """

    def __init_subclass__(cls) -> None:
        names.refuse_overrides(cls, _NOT_CALLED)

    def __init__(
        self,
        *,
        experiment_name: str | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._experiment_name = experiment_name
        self._log_kwargs = log_kwargs
        self._callback: Callback = None

    def setup(self) -> None:
        """As the base class does; then log as ``log_kwargs`` asks for."""
        is_first = not self._is_set_up
        super().setup()
        if is_first and self._log_kwargs is not None:
            self.build_logger(**self._log_kwargs)

    @property
    def experiment_name(self) -> str:
        """The name with the timestamp, or the timestamp alone."""
        if self._experiment_name is None:
            return self.timestamp
        return f"{self._experiment_name}_{self.timestamp}"

    @property
    def randomness(self) -> dict[str, Any]:
        """``seed`` as configured, ``diff_rank_seed`` and ``deterministic``."""
        keys = ("seed", "diff_rank_seed", "deterministic")
        return {key: getattr(self.environment, key) for key in keys}

    def build_logger(
        self,
        log_level: int | str = "INFO",
        log_file: AnyPath | None = None,
        **ignored: Any,
    ) -> logging.Logger:
        """Log to the terminal and to a file.

        Args:
            log_level: the least important messages to log.
            log_file: see :func:`~hooktrain.utils.logger.setup_logger`; None is
                ``<log_dir>/<timestamp>.log``.
            ignored: what else MMEngine's logger takes.
        """
        if log_file is None:
            name = f"{self.timestamp}.log"
            log_file = os.path.join(self.log_dir, name)
        logger = setup_logger(log_file, self.rank)
        logger.setLevel(log_level)
        return logger

    def collect_env(self) -> tuple[dict[str, str], State]:
        """What is to know about machine and software, and about this run."""
        run = {
            **vars(self.environment),
            "seed": self.seed,
            "Distributed launcher": self.launcher,
            "Distributed training": self.distributed,
            "GPU number": self.world_size,
        }
        return collect_env(), run

    def save_checkpoint(
        self, filename: AnyPath, *, callback: Callback = None, **options: Any
    ) -> None:
        """As the base class does.

        Args:
            filename: see the base class.
            callback: called on all ranks with the content, which it may change, before
                it is written.
            options: see the base class.
        """
        self._callback = callback
        super().save_checkpoint(filename, **options)

    def load_checkpoint(
        self, filename: AnyPath, *, callback: Callback = None, **options: Any
    ) -> State:
        """As the base class does.

        Args:
            filename: see the base class.
            callback: called on all ranks with the content, which it may change, before
                anything is loaded.
            options: see the base class.
        """
        self._callback = callback
        return super().load_checkpoint(filename, **options)

    def resume(
        self, filename: AnyPath | None, *, callback: Callback = None, **options: Any
    ) -> State | None:
        """As the base class does.

        Args:
            filename: see the base class.
            callback: see :meth:`load_checkpoint`.
            options: see the base class.
        """
        self._callback = callback
        return super().resume(filename, **options)

    def _make_checkpointer(self, folder: str, parts: State) -> Checkpointer:
        made = _Checkpointer(self.model, folder, sharded=self.saves_shards, **parts)
        made.callback = self._callback
        return made


@STRATEGIES.register_module(force=True)
class SingleDeviceStrategy(BaseStrategy, strategy.SingleDeviceStrategy):
    """:class:`hooktrain.strategy.SingleDeviceStrategy` as a :class:`BaseStrategy`."""


@STRATEGIES.register_module(force=True)
class DDPStrategy(BaseStrategy, strategy.DDPStrategy):
    """:class:`hooktrain.strategy.DDPStrategy` as a :class:`BaseStrategy`."""


@STRATEGIES.register_module(force=True)
class FSDPStrategy(BaseStrategy, strategy.FSDPStrategy):
    """:class:`hooktrain.strategy.FSDPStrategy` as a :class:`BaseStrategy`."""
