"""Load a model's state where names or shapes may differ, and tell every difference in a table."""

import copy
import logging
import os
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.nn.parameter import is_lazy

from hooktrain.checkpoint.reading import read_checkpoint
from hooktrain.checkpoint.sources import local_path
from hooktrain.checkpoint.state_names import revise_names, strip_prefix, take_prefix
from hooktrain.utils.dtensor import shard_like

__all__ = ["IncompatibleKeys", "load_checkpoint", "load_model_state"]

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


def load_checkpoint(
    model: nn.Module,
    filename: str | os.PathLike[str],
    map_location: str | torch.device = "cpu",
    strict: bool = False,
    revise_keys: Sequence[tuple[str, str]] = (),
    prefix: str = "",
) -> dict[str, Any]:
    r"""Load a model from a file: of this package, detectron2, MMEngine, Lightning, or torch's own.

    The state of the model is what stands under ``"model"`` or ``"state_dict"``, or the file is a
    bare state dict. See :func:`load_model_state` for what is loaded and told, so for a prefix
    ``module.``, which needs no ``revise_keys``. Nothing but the model is loaded; to resume a run
    use :class:`~hooktrain.checkpoint.Checkpointer`.

    Example::

        load_checkpoint(model.backbone, "classifier.pth", prefix="backbone")
        load_checkpoint(model, "old.pth", revise_keys=[(r"^encoder\.", "backbone.")])

    Args:
        model: changed in place.
        filename: a path, or an address such as ``https://...``; see :func:`local_path`. An address
            has to be loaded by all ranks.
        map_location: where the tensors of the result are.
        strict: raise if there is a difference.
        revise_keys: patterns and replacements; see :func:`revise_names`.
        prefix: a module of the saved model: only its part is taken, after names were revised.

    Returns:
        The content of the file, with the state of the model, as it was saved, under ``"model"``.

    Raises:
        CorruptCheckpointError: if the file is broken or unsafe.
        FileNotFoundError: if there is none; other ``OSError`` if it cannot be read.
        RuntimeError: with ``strict``, if there is a difference; the model is as it was.
        ValueError: if names cannot be revised, or none has the prefix.
    """
    content = read_checkpoint(local_path(filename), map_location)
    state = revise_names(content["model"], revise_keys)
    load_model_state(model, take_prefix(state, prefix) if prefix else state, strict)
    return content


def load_model_state(
    model: nn.Module,
    state: Mapping[str, Any],
    strict: bool = False,
    revise_keys: Sequence[tuple[str, str]] = (),
) -> IncompatibleKeys:
    """Load what fits by name and shape, and warn with one table per kind of difference.

    A prefix ``module.`` on every name is taken off (a file of a wrapped model). Parameters that are
    still uninitialised (lazy modules) take the shape of the file. A missing name whose tensor was
    loaded under another name, because the model shares it, counts as loaded. Batch norm's counter
    ``num_batches_tracked``, which old files do not have, is never missing. Each rank takes its part
    of what the model has sharded: a collective then.

    Args:
        model: changed in place.
        state: tensors or numpy arrays by name, as of ``model.state_dict()``; it is not changed.
        strict: raise if there is a difference. Meanwhile the model is in memory twice.
        revise_keys: patterns and replacements for the names; see :func:`revise_names`.

    Raises:
        RuntimeError: with ``strict``, if there is a difference; the model is as it was.
        ValueError: if a value is neither tensor nor array, or names cannot be revised; the model
            is as it was.
    """
    in_model = model.state_dict()
    loadable = _as_tensors(revise_names(state, revise_keys))
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
    for name in [name for name in in_model if name in loadable]:  # in one order on all ranks
        loadable[name] = shard_like(loadable[name], in_model[name])
    # Only a load tells what fits: modules may rename what older versions of them have saved.
    before = copy.deepcopy(in_model) if strict else None
    result = model.load_state_dict(loadable, strict=False)
    known = {name for name, _, _ in incorrect}
    known |= _loaded_under_another_name(model, in_model, set(result.missing_keys))
    missing = [name for name in result.missing_keys if name not in known and not _is_counter(name)]
    found = IncompatibleKeys(missing, list(result.unexpected_keys), incorrect)
    problems = _problems(found, shapes, in_model)
    if before is not None and problems:
        model.load_state_dict(before, strict=False)
        raise RuntimeError("nothing was loaded, with strict=True:\n" + "\n".join(problems))
    for problem in problems:
        logger.warning("%s", problem)
    return found


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


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == "num_batches_tracked"


def _problems(
    found: IncompatibleKeys, shapes: Mapping[str, Shape], in_model: Mapping[str, Any]
) -> list[str]:
    """One table for each kind of difference that there is."""
    missing = [(name, "-", _shape(in_model.get(name))) for name in found.missing_keys]
    unexpected = [(name, shapes.get(name, "-"), "-") for name in found.unexpected_keys]
    kinds: list[tuple[str, Sequence[tuple[str, Any, Any]]]] = [
        ("have another shape in the model and were not loaded", found.incorrect_shapes),
        ("of the model are not in the checkpoint and keep their values", missing),
        ("of the checkpoint are not in the model and were not used", unexpected),
    ]
    return [_table(problem, rows) for problem, rows in kinds if rows]


def _shape(value: Any) -> Any:
    return tuple(value.shape) if torch.is_tensor(value) and not is_lazy(value) else "-"


def _table(problem: str, rows: Sequence[tuple[str, Any, Any]]) -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    headers = ["name", "shape in file", "shape in model"]
    table = tabulate(cells, headers=headers, disable_numparse=True)
    return f"{len(rows)} parameters or buffers {problem}:\n{table}"
