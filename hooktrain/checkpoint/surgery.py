"""Load a model's state where names or shapes may differ, and tell every difference in a table."""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["IncompatibleKeys", "load_model_state", "strip_prefix"]

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]


class IncompatibleKeys(NamedTuple):
    """How a loaded state differed from the model. Each name is in one of the lists only.

    Attributes:
        missing_keys: in the model, and not in the file.
        unexpected_keys: in the file, and not in the model.
        incorrect_shapes: ``(name, shape in the file, shape in the model)``; these were not loaded.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    incorrect_shapes: list[tuple[str, Shape, Shape]]


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> IncompatibleKeys:
    """Load what fits by name and shape, and warn with one table per kind of difference.

    A prefix ``module.`` on every name is taken off (a file of a wrapped model). Parameters that are
    still uninitialised (lazy modules) take the shape of the file. A missing name whose tensor was
    loaded under another name, because the model shares it, counts as loaded.

    Args:
        model: changed in place.
        state: tensors or numpy arrays by name, as of ``model.state_dict()``; it is not changed.

    Raises:
        ValueError: if a value is neither tensor nor array; the model is as it was.
    """
    in_model = model.state_dict()
    loadable = _as_tensors(state)
    if not any(name.startswith("module.") for name in in_model):
        loadable = strip_prefix(loadable, "module.")
    shapes = {name: tuple(v.shape) for name, v in loadable.items() if torch.is_tensor(v)}
    incorrect = [
        (name, shapes[name], tuple(value.shape))
        for name, value in in_model.items()
        if name in shapes and _has_another_shape(value, shapes[name])
    ]
    for name, _, _ in incorrect:
        del loadable[name]
    result = model.load_state_dict(loadable, strict=False)
    dropped = {name for name, _, _ in incorrect}
    shared = _loaded_under_another_name(model, in_model, set(result.missing_keys))
    missing = [name for name in result.missing_keys if name not in dropped | shared]
    found = IncompatibleKeys(missing, list(result.unexpected_keys), incorrect)
    _report(found, shapes, in_model)
    return found


def strip_prefix(state: Mapping[str, Any], prefix: str) -> "OrderedDict[str, Any]":
    """A copy of a state dict without ``prefix``, if every name has it; else an equal copy.

    The versions of the modules (``state._metadata``) are renamed along with the names.

    >>> list(strip_prefix({"module.a": 1, "module.b": 2}, "module."))
    ['a', 'b']
    """
    stripped = OrderedDict(state)
    metadata = getattr(state, "_metadata", None)
    if state and all(name.startswith(prefix) for name in state):
        stripped = OrderedDict((name[len(prefix) :], value) for name, value in state.items())
        if metadata is not None:
            # The entry of the wrapped module itself is "module", without the dot.
            metadata = {
                name[len(prefix) :]: value
                for name, value in metadata.items()
                if f"{name}.".startswith(prefix)
            }
    if metadata is not None:
        stripped._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return stripped


def _as_tensors(state: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    converted = strip_prefix(state, "")
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            converted[name] = torch.tensor(value)
        # Modules may keep what they like under this name (Module.get_extra_state).
        elif not torch.is_tensor(value) and not name.endswith("_extra_state"):
            raise ValueError(
                f"the model's state holds {name!r} of type {type(value).__name__}: "
                "it must be a tensor or a numpy array"
            )
    return converted


def _has_another_shape(value: Any, shape: Shape) -> bool:
    return torch.is_tensor(value) and not is_lazy(value) and tuple(value.shape) != shape


def _loaded_under_another_name(
    model: nn.Module, in_model: Mapping[str, Any], not_loaded: set[str]
) -> set[str]:
    """All names of the tensors of which at least one name was loaded."""
    names_of: dict[int, set[str]] = defaultdict(set)
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        if name in in_model:  # buffers that are not persistent are in no file
            names_of[id(tensor)].add(name)
    return {name for names in names_of.values() if names - not_loaded for name in names}


def _report(
    found: IncompatibleKeys, shapes: Mapping[str, Shape], in_model: Mapping[str, Any]
) -> None:
    rows: list[tuple[str, Any, Any]]
    if found.incorrect_shapes:
        _warn("have another shape in the model and were not loaded", found.incorrect_shapes)
    if found.missing_keys:
        rows = [(name, "-", _shape(in_model.get(name))) for name in found.missing_keys]
        _warn("of the model are not in the checkpoint and keep their values", rows)
    if found.unexpected_keys:
        rows = [(name, shapes.get(name, "-"), "-") for name in found.unexpected_keys]
        _warn("of the checkpoint are not in the model and were not used", rows)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if torch.is_tensor(value) and not is_lazy(value) else "-"


def _warn(problem: str, rows: Sequence[tuple[str, Any, Any]]) -> None:
    cells = [[str(cell) for cell in row] for row in rows]
    headers = ["name", "shape in file", "shape in model"]
    table = tabulate(cells, headers=headers, disable_numparse=True)
    logger.warning("%d parameters or buffers %s:\n%s", len(rows), problem, table)
