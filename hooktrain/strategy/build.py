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
    ddp: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> BaseStrategy:
    """The strategy that is asked for.

    Example::

        build_strategy("auto", work_dir="output")
        build_strategy(dict(type="DDPStrategy", model_wrapper=dict(find_unused_parameters=True)))

    Args:
        strategy: a strategy, which is returned; a name in ``STRATEGIES``; a dict with such a name
            as ``type``, and arguments; or ``"auto"``, also as the ``type``:
            :class:`DDPStrategy` if this is one of several processes, else
            :class:`SingleDeviceStrategy`, without the arguments that only the former takes.
        ddp: further defaults, which only a :class:`DDPStrategy` takes.
        defaults: arguments that ``strategy`` does not have.

    Raises:
        KeyError: for an unknown name.
        TypeError: for arguments that it does not take.
    """
    if isinstance(strategy, BaseStrategy):
        return strategy
    given = {"type": strategy} if isinstance(strategy, str) else strategy
    config: dict[str, Any] = {"type": "auto", **defaults, **given}
    # So that one configuration serves any number of processes.
    if config["type"] == "auto" and count_processes() == 1:
        config["type"] = "SingleDeviceStrategy"
        config.pop("model_wrapper", None)
        config.pop("fp16_compression", None)
    elif config["type"] == "auto":
        config["type"] = "DDPStrategy"
    chosen = STRATEGIES.find(config["type"])
    if isinstance(chosen, type) and issubclass(chosen, DDPStrategy):
        config = {**(ddp or {}), **config}
    built: BaseStrategy = STRATEGIES.build(config)
    return built
