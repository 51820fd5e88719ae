"""Several optimizers by name, for models that own their step."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.utils.registry import did_you_mean


class OptimWrapperDict(dict[str, OptimWrapper]):
    """Optimizer wrappers by name, each with its own precision, scaler and accumulation.

    The model's ``train_step`` takes the one it needs::

        optim_wrapper["generator"].update_params(loss)

    Metrics of a member carry its name: ``generator.grad_norm``.

    Attributes:
        resumed: see :class:`OptimWrapper`.

    Args:
        wrappers: one :class:`OptimWrapper` a keyword.

    Raises:
        TypeError: if a value is not a wrapper.
        ValueError: if there is none, or two have the same optimizer.
    """

    resumed: Mapping[str, Any] | None = None

    def __init__(self, **wrappers: OptimWrapper) -> None:
        if not wrappers:
            raise ValueError("OptimWrapperDict needs at least one wrapper, by name")
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise TypeError(f"{name!r} must be an OptimWrapper, but got {wrapper!r}")
            wrapper.name = name
        if len({id(w.optimizer) for w in wrappers.values()}) < len(wrappers):
            raise ValueError(f"two of {list(wrappers)} share an optimizer; each needs its own")
        super().__init__(wrappers)

    def __missing__(self, name: str) -> OptimWrapper:
        raise KeyError(f"there is no optimizer named {name!r}{did_you_mean(name, self)}")

    @property
    def param_groups(self) -> dict[str, list[dict[str, Any]]]:
        """The parameter groups of each."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """``{"<name>.lr": [one rate a group]}``, and ``"<name>.base_lr"`` where there is one."""
        return {f"{n}.{key}": lr for n, w in self.items() for key, lr in w.get_lr().items()}

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"<name>.momentum": [one a group]}``."""
        return {f"{n}.{key}": m for n, w in self.items() for key, m in w.get_momentum().items()}

    def name_parameters(self, model: nn.Module) -> None:
        """Let saved states have the names of the parameters in a model; trainers call it."""
        for wrapper in self.values():
            wrapper.name_parameters(model)

    def zero_grad(self, **kwargs: Any) -> None:
        """Forget the gradients of all; see :meth:`OptimWrapper.zero_grad`."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def start_window(self) -> None:
        """Begin a new window of accumulation in each."""
        for wrapper in self.values():
            wrapper.start_window()

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Raises:
            ValueError: if the state has other names; nothing was loaded.
        """
        if set(state_dict) != set(self):
            raise ValueError(f"the state has the optimizers {[*state_dict]}, not {[*self]}")
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])


def wrappers_by_name(optim_wrapper: OptimWrapper | OptimWrapperDict) -> Mapping[str, OptimWrapper]:
    """Several wrappers by their names; a single one by the name ``""``."""
    return {"": optim_wrapper} if isinstance(optim_wrapper, OptimWrapper) else optim_wrapper
