"""Several optimizer wrappers by name."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.param_groups import ParamGroup
from hooktrain.utils.names import State


class OptimWrapperDict(dict[str, OptimWrapper]):
    """Optimizer wrappers by name, each for its own loss, as in a GAN.

    The model's ``train_step`` picks a wrapper by its name. Each has its own precision and
    accumulation::

        optim_wrapper["generator"].update_params(loss)

    The metrics of a wrapper are prefixed by its name: ``generator.grad_norm``. For several
    optimizers that share one loss, combine them into one; see docs/guide/optimizers.md.

    Args:
        wrappers: one :class:`OptimWrapper` per keyword.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        for name, wrapper in wrappers.items():
            wrapper.prefix = f"{name}."
        super().__init__(wrappers)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an OptimWrapperDict has no {name!r}, since each optimizer has its own loss: call "
            f"optim_wrapper[name].{name} in run_step or train_step, with a name from {[*self]}. "
            "If they share one loss, see docs/guide/optimizers.md"
        )

    @property
    def param_groups(self) -> dict[str, list[ParamGroup]]:
        """The parameter groups of each wrapper, by name."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def name_parameters(self, model: nn.Module) -> None:
        """See :meth:`OptimWrapper.name_parameters`."""
        for wrapper in self.values():
            wrapper.name_parameters(model)

    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int
    ) -> None:
        """Start a new accumulation in each wrapper.

        How often a step calls each wrapper is unknown, so the counts are not used.
        """
        for wrapper in self.values():
            wrapper.start_accumulation()

    def zero_grad(self, **kwargs: Any) -> None:
        """Free the gradients of all wrappers; see :meth:`OptimWrapper.zero_grad`."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def state_dict(self) -> State:
        """The state of each wrapper, by name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def check_state_dict(self, state_dict: State) -> None:
        """Check a state without loading it.

        Raises:
            ValueError: if the names differ, or a wrapper refuses its state.
        """
        if set(state_dict) != set(self):
            raise ValueError(
                f"the state has the optimizers {[*state_dict]}, not {[*self]}"
            )
        for name, wrapper in self.items():
            wrapper.check_state_dict(state_dict[name])

    def load_state_dict(self, state_dict: State) -> None:
        """Load the state of each wrapper; see :meth:`check_state_dict`."""
        self.check_state_dict(state_dict)
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])


def by_name(given: Any) -> Mapping[str, Any]:
    """A dict of wrappers or optimizers by name; a single one gets the name ``""``."""
    return given if isinstance(given, Mapping) else {"": given}
