"""MMEngine's strategies: with a name and a logger of the run."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from hooktrain import strategy
from hooktrain.compat.mmengine.build import (
    Schedulers,
    Wrappers,
    build_optim_wrapper,
    build_param_scheduler,
)
from hooktrain.utils import names
from hooktrain.utils.file_io import AnyPath
from hooktrain.utils.logger import setup_logger
from hooktrain.utils.registry import STRATEGIES

_NOT_CALLED = {
    "_setup_env": "override setup()",
    "_setup_distributed": "override setup()",
    "_set_randomness": "override setup()",
    "_wrap_model": "override wrap_model()",
    "_init_model_weights": "override init_model_weights()",
    "_build_param_scheduler": "override build_param_scheduler()",
}


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

    def setup(self) -> None:
        """As the base class does; then log as ``log_kwargs`` asks for."""
        is_first = not self._is_set_up
        super().setup()
        if is_first and self._log_kwargs is not None:
            self.build_logger(**self._log_kwargs)

    @property
    def seed(self) -> Any:
        """The seed. If nobody has chosen it yet, this calls :meth:`setup`: a collective."""
        if self._seed is None:
            self.setup()
        return self._seed

    @seed.setter
    def seed(self, seed: Any) -> None:
        self._seed = seed

    @property
    def experiment_name(self) -> str:
        """The name with the timestamp, or the timestamp alone."""
        if self._experiment_name is None:
            return self.timestamp
        return f"{self._experiment_name}_{self.timestamp}"

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> Wrappers:
        """The optimizer; see :func:`hooktrain.compat.mmengine.build_optim_wrapper`."""
        return build_optim_wrapper(model, optim_wrapper)

    def build_param_scheduler(
        self, scheduler: Any, optim_wrapper: Wrappers
    ) -> Schedulers:
        """The schedulers; see :func:`hooktrain.compat.mmengine.build_param_scheduler`."""
        names = ("epoch_length", "max_epochs", "max_iters")
        known = {name: self.dispatch_kwargs.get(name) for name in names}
        return build_param_scheduler(scheduler, optim_wrapper, known)

    def build_logger(
        self,
        log_level: int | str = "INFO",
        log_file: AnyPath | None = None,
        **ignored: Any,
    ) -> logging.Logger:
        """Log to the terminal and to a file.

        Args:
            log_level: the least important messages to log.
            log_file: see :func:`hooktrain.utils.logger.setup_logger`; None is
                ``<log_dir>/<timestamp>.log``.
            ignored: what else MMEngine's logger takes.
        """
        name = os.path.join(self.log_dir, f"{self.timestamp}.log")
        logger = setup_logger(log_file or name, self.rank)
        logger.setLevel(log_level)
        return logger


@STRATEGIES.register_module(force=True)
class SingleDeviceStrategy(BaseStrategy, strategy.SingleDeviceStrategy):
    """:class:`hooktrain.strategy.SingleDeviceStrategy` as a :class:`BaseStrategy`."""


@STRATEGIES.register_module(force=True)
class DDPStrategy(BaseStrategy, strategy.DDPStrategy):
    """:class:`hooktrain.strategy.DDPStrategy` as a :class:`BaseStrategy`."""


@STRATEGIES.register_module(force=True)
class FSDPStrategy(BaseStrategy, strategy.FSDPStrategy):
    """:class:`hooktrain.strategy.FSDPStrategy` as a :class:`BaseStrategy`."""
