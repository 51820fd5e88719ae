"""One process, one device."""

from torch import nn

from hooktrain.model import is_model_wrapper
from hooktrain.strategy.base import BaseStrategy
from hooktrain.strategy.environment import count_processes
from hooktrain.utils.registry import STRATEGIES


@STRATEGIES.register_module()
class SingleDeviceStrategy(BaseStrategy):
    """One process that trains on an accelerator, or on the CPU where there is none.

    Its model stays unwrapped.

    Args:
        kwargs: see :class:`BaseStrategy`.

    Raises:
        RuntimeError: in :meth:`setup`, if there are other processes.
    """

    def _join_processes(self) -> None:
        if (size := count_processes(self.environment.launcher)) > 1:
            use = "use DDPStrategy or FSDPStrategy, or 'auto'"
            raise RuntimeError(f"SingleDeviceStrategy in one of {size} processes: {use}")
        self.launcher = "none"

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Bring the model to its device; one that is wrapped already stays as it is."""
        return model if is_model_wrapper(model) else self.place_model(self.convert_model(model))
