"""Optimizer wrappers with MMEngine's ``get_lr`` and ``get_momentum``."""

from typing import Any

from hooktrain import solver
from hooktrain.solver.optim_state import State
from hooktrain.solver.param_groups import ParamGroup


class OptimWrapper(solver.OptimWrapper):
    """:class:`hooktrain.solver.OptimWrapper` that tells its rates and momenta."""

    def get_lr(self) -> dict[str, list[float]]:
        """``{"lr": [one rate a group]}``."""
        return {"lr": _rates(self.param_groups)}

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"momentum": [one a group]}``: of Adam the first beta; else 0."""
        return {"momentum": _momenta(self.param_groups)}


class AmpOptimWrapper(OptimWrapper, solver.AmpOptimWrapper):
    """:class:`hooktrain.solver.AmpOptimWrapper` that tells its rates and momenta."""

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned, here or in MMEngine."""
        super().load_state_dict(with_our_names(state_dict))


class OptimWrapperDict(solver.OptimWrapperDict):
    """:class:`hooktrain.solver.OptimWrapperDict` that tells rates and momenta by name."""

    def get_lr(self) -> dict[str, list[float]]:
        """``{"<name>.lr": [one rate a group]}``."""
        return {
            f"{name}.lr": _rates(groups) for name, groups in self.param_groups.items()
        }

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"<name>.momentum": [one a group]}``."""
        return {
            f"{name}.momentum": _momenta(groups)
            for name, groups in self.param_groups.items()
        }


def with_our_names(state: State) -> dict[str, Any]:
    """The state of an optimizer, or of several by name, with this package's names."""
    if "param_groups" not in state:
        return {name: with_our_names(one) for name, one in state.items()}
    renamed = dict(state)
    if "loss_scaler" in state:
        renamed["grad_scaler"] = renamed.pop("loss_scaler")
    return renamed


def as_mmengine(optim_wrapper: Any) -> Any:
    """A wrapper that a trainer has made of a torch optimizer, with MMEngine's methods.

    It stays the same object, of the class above that extends its own. Others are returned as
    they are.
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
