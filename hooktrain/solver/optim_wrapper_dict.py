"""Several optimizer wrappers by name."""

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from hooktrain.solver.optim_state import State
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.param_groups import ParamGroup

# Where one loss is for all, these are the same for all.
_OF_THE_FIRST = (
    "accumulative_counts",
    "should_update",
    "should_sync",
    "scale_loss",
    "optim_context",
)


class OptimWrapperDict(dict[str, OptimWrapper]):
    """Optimizer wrappers by name, for losses of their own, or for one loss together.

    With a loss for each of them, the model's ``train_step`` takes the one it needs, and
    each has its own precision and accumulation::

        optim_wrapper["generator"].update_params(loss)

    With one loss for all, as where Muon trains the matrices and AdamW the rest, they do
    what a single wrapper does: one backward pass, and each clips and updates its own
    parameters. They accumulate in step, and in one precision with one scaler::

        optim_wrapper.update_params(loss)

    Metrics of a member carry its name: ``generator.grad_norm``.

    Args:
        wrappers: one :class:`OptimWrapper` per keyword.

    Attributes:
        after_backward: see :class:`OptimWrapper`; of a step for all of them.

    Raises:
        TypeError: if a value is not a wrapper.
        ValueError: at the first loss for all, if they differ in what they have to share.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise TypeError(f"{name!r} must be an OptimWrapper: {wrapper!r}")
            wrapper.prefix = f"{name}."
        super().__init__(wrappers)
        self.after_backward: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_FIRST:
            return getattr(self._first, name)
        raise AttributeError(
            f"an OptimWrapperDict has no {name!r}: call optim_wrapper[name].{name}, "
            f"where the name is one of {[*self]}"
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
        self.start_accumulation()

    # One loss for all

    @cached_property
    def _first(self) -> OptimWrapper:
        """The first wrapper, which counts passes and scales the loss for all of them."""
        kinds = [
            (type(each), each.accumulative_counts, getattr(each, "dtype", None))
            for each in self.values()
        ]
        if len(set(kinds)) > 1:
            raise ValueError(
                "optimizers with one loss need the same type of wrapper, "
                f"accumulative_counts and dtype, not {kinds}"
            )
        for before, wrapper in pairwise(self.values()):
            wrapper.share_scaler(before)
        return next(iter(self.values()))

    def start_accumulation(self) -> None:
        """Begin a new accumulation in each."""
        for wrapper in self.values():
            wrapper.start_accumulation()

    # One loss for all of them is taken in as by a single wrapper.
    update_params: Any = OptimWrapper.update_params

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of one loss for all."""
        self._first.backward(loss, **kwargs)
        for wrapper in self.values():
            wrapper.inner_count = self._first.inner_count

    def step(self, **kwargs: Any) -> bool:
        """Unscale all gradients, call ``after_backward``, then let each clip and update its own.

        Returns:
            False if a scaler has skipped one of them.
        """
        for wrapper in self.values():
            wrapper.unscale_gradients()
        if self.after_backward is not None:
            self.after_backward()
        updated = [wrapper.step(**kwargs) for wrapper in self.values()]
        return all(updated)

    def zero_grad(self, **kwargs: Any) -> None:
        """Free the gradients of all; see :meth:`OptimWrapper.zero_grad`."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def state_dict(self) -> dict[str, Any]:
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


def wrappers_by_name(
    optim_wrapper: OptimWrapper | OptimWrapperDict,
) -> Mapping[str, OptimWrapper]:
    """Several wrappers by their names; a single one by the name ``""``."""
    if isinstance(optim_wrapper, OptimWrapper):
        return {"": optim_wrapper}
    return optim_wrapper
