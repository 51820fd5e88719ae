"""Several optimizers by name, for models that own their step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.utils.registry import did_you_mean

__all__ = ["OptimWrapperDict"]


def _needs_one(method: str) -> Callable[..., NoReturn]:
    """A method that is refused: which optimizer is meant?"""

    def refuse(self: "OptimWrapperDict", *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"there are several optimizers, {list(self)}: call {method} of one of them, such as "
            f"optim_wrapper[{next(iter(self))!r}].{method}(...)"
        )

    return refuse


class OptimWrapperDict(Mapping[str, OptimWrapper]):
    """Optimizer wrappers by name, each with a precision, scaler and accumulation of its own.

    The model's ``train_step`` takes the one it needs::

        optim_wrapper["generator"].update_params(loss)

    Metrics of a member carry its name: ``generator.grad_norm``.

    Args:
        wrappers: one :class:`OptimWrapper` a keyword.

    Raises:
        TypeError: if a value is not a wrapper.
        ValueError: if there is none, or one stands under two names.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        if not wrappers:
            raise ValueError("OptimWrapperDict needs at least one wrapper, by name")
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise TypeError(f"{name!r} must be an OptimWrapper, but got {wrapper!r}")
        if len({id(w.optimizer) for w in wrappers.values()}) < len(wrappers):
            raise ValueError(f"two of {list(wrappers)} share an optimizer; each needs its own")
        for name, wrapper in wrappers.items():
            wrapper.name = name
        self._wrappers = wrappers

    def __getitem__(self, name: str) -> OptimWrapper:
        if name not in self._wrappers:
            hint = did_you_mean(name, self._wrappers)
            raise KeyError(f"there is no optimizer named {name!r}{hint}")
        return self._wrappers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wrappers)

    def __len__(self) -> int:
        return len(self._wrappers)

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

    def initialize_count_status(
        self, model: nn.Module, init_counts: Mapping[str, int], max_counts: Mapping[str, int]
    ) -> None:
        """Say where each stands and ends; see :meth:`OptimWrapper.initialize_count_status`.

        Args:
            model: the model.
            init_counts: backward passes made so far, by name: the model decides how many an
                iteration makes, so that one number cannot serve all.
            max_counts: the passes made when the run ends, by name.
        """
        for name, wrapper in self.items():
            wrapper.initialize_count_status(model, init_counts[name], max_counts[name])

    def zero_grad(self) -> None:
        """Forget the gradients of all."""
        for wrapper in self.values():
            wrapper.zero_grad()

    def start_window(self) -> None:
        """Begin a new window of accumulation in each."""
        for wrapper in self.values():
            wrapper.start_window()

    def prepare_state(self) -> None:
        """Before :meth:`state_dict` with several ranks; see :meth:`OptimWrapper.prepare_state`."""
        for wrapper in self.values():
            wrapper.prepare_state()

    update_params = _needs_one("update_params")
    scale_loss = _needs_one("scale_loss")
    backward = _needs_one("backward")
    step = _needs_one("step")
    optim_context = _needs_one("optim_context")
    sync_context = _needs_one("sync_context")
    precision_context = _needs_one("precision_context")

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave.

        Raises:
            ValueError: if the state is of other names; nothing was loaded.
        """
        if set(state_dict) != set(self):
            raise ValueError(
                f"the state has the optimizers {sorted(state_dict)}, and there are {sorted(self)}"
            )
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {wrapper!r}" for name, wrapper in self.items())
