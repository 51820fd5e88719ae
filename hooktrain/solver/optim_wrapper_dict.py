"""Several optimizer wrappers by name."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.param_groups import ParamGroup
from hooktrain.utils.names import State


class OptimWrapperDict(dict[str, OptimWrapper]):
    """Optimizer wrappers by name, for losses of their own.

    The model's ``train_step`` takes the one that it needs. Each has its own precision and
    accumulation::

        optim_wrapper["generator"].update_params(loss)

    Metrics of a member carry its name: ``generator.grad_norm``. Several optimizers with one loss
    are a single one; see docs/guide/optimizers.md.

    Args:
        wrappers: one :class:`OptimWrapper` per keyword.

    Raises:
        TypeError: if a value is not a wrapper.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise TypeError(f"{name!r} must be an OptimWrapper: {wrapper!r}")
            wrapper.prefix = f"{name}."
        super().__init__(wrappers)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an OptimWrapperDict has no {name!r}: each optimizer has a loss of its own, in a "
            f"run_step or train_step that calls optim_wrapper[name].{name}, where the name is one "
            f"of {[*self]}. For one loss see docs/guide/optimizers.md"
        )

    @property
    def param_groups(self) -> dict[str, list[ParamGroup]]:
        """The parameter groups of each."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def name_parameters(self, model: nn.Module) -> None:
        """See :meth:`OptimWrapper.name_parameters`."""
        for wrapper in self.values():
            wrapper.name_parameters(model)

    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int
    ) -> None:
        """Begin a new accumulation in each.

        How often a step calls each of them is not known, so the counts are not used.
        """
        for wrapper in self.values():
            wrapper.start_accumulation()

    def zero_grad(self, **kwargs: Any) -> None:
        """Free the gradients of all; see :meth:`OptimWrapper.zero_grad`."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def state_dict(self) -> State:
        """The state of each, by name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse a state that :meth:`load_state_dict` would refuse; change nothing.

        Raises:
            ValueError: if the state has other names, or that of a member is refused.
        """
        if set(state_dict) != set(self):
            raise ValueError(
                f"the state has the optimizers {[*state_dict]}, not {[*self]}"
            )
        for name, wrapper in self.items():
            wrapper.check_state_dict(state_dict[name])

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned; see :meth:`check_state_dict`."""
        self.check_state_dict(state_dict)
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])


def by_name(given: Any) -> Mapping[str, Any]:
    """Several wrappers, optimizers or the like by their names; a single one by the name ``""``."""
    return given if isinstance(given, Mapping) else {"": given}
