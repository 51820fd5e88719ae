"""Optimizer wrappers with MMEngine's ``get_lr`` and ``get_momentum``."""

from typing import Any

from hooktrain import solver
from hooktrain.solver.optim_state import State
from hooktrain.solver.param_groups import ParamGroup


class OptimWrapper(solver.OptimWrapper):
    """:class:`hooktrain.solver.OptimWrapper` with ``get_lr`` and ``get_momentum``."""

    def get_lr(self) -> dict[str, list[float]]:
        """The learning rate of each group, as ``{"lr": [0.1]}``."""
        return {"lr": _rates(self.param_groups)}

    def get_momentum(self) -> dict[str, list[float]]:
        """The momentum of each group, as ``{"momentum": [0.9]}``.

        It is the first of Adam's betas, and 0 where there is neither.
        """
        return {"momentum": _momenta(self.param_groups)}


class AmpOptimWrapper(OptimWrapper, solver.AmpOptimWrapper):
    """:class:`hooktrain.solver.AmpOptimWrapper` with ``get_lr`` and ``get_momentum``."""

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned, here or in MMEngine."""
        super().load_state_dict(with_our_names(state_dict))


class OptimWrapperDict(solver.OptimWrapperDict):
    """:class:`hooktrain.solver.OptimWrapperDict` with ``get_lr`` and ``get_momentum``."""

    def get_lr(self) -> dict[str, list[float]]:
        """The learning rate of each group, by ``"<name>.lr"``."""
        return {
            f"{name}.lr": _rates(groups) for name, groups in self.param_groups.items()
        }

    def get_momentum(self) -> dict[str, list[float]]:
        """The momentum of each group, by ``"<name>.momentum"``."""
        return {
            f"{name}.momentum": _momenta(groups)
            for name, groups in self.param_groups.items()
        }


def with_our_names(state: State) -> dict[str, Any]:
    """Rename MMEngine's entries in the state of an optimizer, or of several by name."""
    if "param_groups" not in state:
        return {name: with_our_names(one) for name, one in state.items()}
    renamed = dict(state)
    if "loss_scaler" in state:
        renamed["grad_scaler"] = renamed.pop("loss_scaler")
    return renamed


def as_mmengine(optim_wrapper: Any) -> Any:
    """Give a wrapper of the core's own class the methods above.

    It stays the same object, which gets the class above that extends its own. Other wrappers are
    returned as they are.
    """
    for kind in (OptimWrapper, AmpOptimWrapper, OptimWrapperDict):
        if type(optim_wrapper) is getattr(solver, kind.__name__):
            optim_wrapper.__class__ = kind
    return optim_wrapper


def _rates(groups: list[ParamGroup]) -> list[float]:
    return [float(group["lr"]) for group in groups]


def _momenta(groups: list[ParamGroup]) -> list[float]:
    momenta = []
    for group in groups:
        betas = group.get("betas", [0.0])
        momenta.append(float(group.get("momentum", betas[0])))
    return momenta
