"""A strategy by what is there, by name, or from a configuration."""

from collections.abc import Mapping
from typing import Any

from hooktrain.strategy.base import BaseStrategy
from hooktrain.strategy.ddp import DDPStrategy
from hooktrain.strategy.environment import count_processes
from hooktrain.utils.registry import STRATEGIES


def build_strategy(
    strategy: str | BaseStrategy | Mapping[str, Any] = "auto",
    *,
    model_wrapper: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> BaseStrategy:
    """The strategy that is asked for.

    Example::

        build_strategy("auto", work_dir="output")
        build_strategy(
            dict(type="DDPStrategy", model_wrapper=dict(find_unused_parameters=True))
        )

    Args:
        strategy: a strategy, which is returned; a name in ``STRATEGIES``; a dict with such
            a name as ``type``, and arguments; or ``"auto"``, also as the ``type``:
            :class:`DDPStrategy` if this is one of several processes, else
            :class:`SingleDeviceStrategy`.
        model_wrapper: a default too, for a :class:`DDPStrategy` only.
        defaults: arguments that ``strategy`` does not have.

    Raises:
        KeyError: for an unknown name.
        TypeError: for arguments that it does not take.
    """
    if isinstance(strategy, BaseStrategy):
        return strategy
    given = {"type": strategy} if isinstance(strategy, str) else strategy
    config: dict[str, Any] = {"type": "auto", **defaults, **given}
    if config["type"] == "auto":
        config["type"] = "DDPStrategy"
        if count_processes() == 1:
            # So that one configuration serves any number of processes.
            config["type"] = "SingleDeviceStrategy"
            config.pop("model_wrapper", None)
    if issubclass(STRATEGIES.find(config["type"]), DDPStrategy):
        config.setdefault("model_wrapper", model_wrapper)
    built: BaseStrategy = STRATEGIES.build(config)
    return built
