"""One parameter of an optimizer's groups, such as the learning rate: reading and writing it."""

from typing import Any, Protocol

from torch import Tensor

from hooktrain.utils.registry import did_you_mean


class HasParamGroups(Protocol):
    """A torch optimizer or an :class:`~hooktrain.solver.OptimWrapper`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""


def read(group: dict[str, Any], name: str) -> Any:
    """The value of a group, a number or a tensor; ``"momentum"`` also where it stands in betas.

    Raises:
        ValueError: if the group does not have the parameter.
    """
    if name == "momentum" and "betas" in group:
        return group["betas"][0]
    if name not in group:
        raise ValueError(
            f"the optimizer's groups have no {name!r} to schedule{did_you_mean(name, group)}"
        )
    return group[name]


def write(group: dict[str, Any], name: str, value: float) -> None:
    """Set the value of a group; a tensor is filled in place.

    Raises:
        ValueError: if the group does not have the parameter.
    """
    if isinstance(old := read(group, name), Tensor):
        # In place, for captured graphs; no synchronisation.
        old.fill_(value)
        return
    if name == "momentum" and "betas" in group:
        group["betas"] = (value, *group["betas"][1:])
    group[name] = value
