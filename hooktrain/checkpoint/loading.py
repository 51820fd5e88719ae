"""Reading checkpoints of any library, and loading a state into a model."""

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.parameter import is_lazy

from hooktrain.checkpoint.files import CorruptCheckpointError, load_file, verify_file
from hooktrain.checkpoint.folders import is_folder, read_folder, verify_folder
from hooktrain.checkpoint.sources import local_path
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks, on_main_process
from hooktrain.utils.file_io import AnyPath
from hooktrain.utils.names import did_you_mean
from hooktrain.utils.tensors import shard_like

logger = logging.getLogger(__name__)

State = dict[str, Any]
Shape = tuple[int, ...]


def verify_checkpoint(path: str) -> None:
    """Read all of a file or a folder, and compare it with its checksums.

    Raises:
        CorruptCheckpointError: if it is broken.
        OSError: if it cannot be opened.
    """
    if is_folder(path):
        verify_folder(path)
    else:
        verify_file(path)


def read_checkpoint(path: str, map_location: str | torch.device = "cpu") -> State:
    """Verify and load a file or a folder; the result has the model's state under ``"model"``.

    That is ``"state_dict"`` in the files of MMEngine and Lightning. A bare state dict (tensors by
    name) is taken as the model's.

    Args:
        path: of the file or folder. This process reads it alone.
        map_location: the device on which the tensors arrive.

    Raises:
        CorruptCheckpointError: if it is broken, or holds no model's state.
        FileNotFoundError: if there is none; other ``OSError`` if it cannot be opened.
    """
    if is_folder(path):
        verify_folder(path)
        return with_model(read_folder(path, map_location=map_location), path)
    return with_model(load_file(path, map_location), path)


def read_on_all_ranks(path: str, model: nn.Module) -> State:
    """Verify and load a file or a folder on every rank; see :func:`read_checkpoint`. Collective.

    Args:
        path: every rank must be able to read it. The main process decides what it is.
        model: of a folder, each rank verifies a part of the files, and reads no more than its
            shards of what this model has sharded.

    Raises:
        CorruptCheckpointError: on every rank, if it is broken, or holds no model's state.
        OSError: on every rank, if one cannot open it.
    """
    states: list[State] = []
    if on_main_process(lambda: is_folder(path)):
        part = slice(comm.get_rank(), None, comm.get_world_size())
        on_all_ranks(lambda: verify_folder(path, part))
        on_all_ranks(lambda: states.append(with_model(read_folder(path, model), path)))
    else:
        on_all_ranks(lambda: states.append(read_checkpoint(path)))
    return states[0]


def with_model(state: Any, path: str) -> State:
    """What was read, with the model's state under ``"model"``; see :func:`read_checkpoint`."""
    if isinstance(state, dict) and state:
        for key in ("model", "state_dict"):
            if isinstance(state.get(key), dict):
                rest = {name: item for name, item in state.items() if name != key}
                return {"model": state[key], **rest}
        if all(_is_of_a_model(name, item) for name, item in state.items()):
            return {"model": state}
    found = list(state)[:10] if isinstance(state, dict) else type(state).__name__
    raise CorruptCheckpointError(
        f"{path} is no checkpoint: no 'model', 'state_dict', or tensors only, but {found}"
    )


def _is_of_a_model(name: Any, value: Any) -> bool:
    # Modules may keep what they like under this name (Module.get_extra_state).
    return isinstance(value, torch.Tensor) or str(name).endswith("_extra_state")


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
    filename: AnyPath,
    map_location: str | torch.device = "cpu",
    strict: bool = False,
    revise_keys: Sequence[tuple[str, str]] = (),
    prefix: str = "",
) -> dict[str, Any]:
    r"""Load a model from a file: of this package, detectron2, MMEngine, Lightning, or torch's own.

    The state of the model is under ``"model"`` or ``"state_dict"``, or the file is a bare state
    dict. :func:`load_model_state` says what is loaded; it takes a prefix ``module.`` off by itself.
    Nothing but the model is loaded; :class:`~hooktrain.checkpoint.Checkpointer` resumes a run.

    Example::

        load_checkpoint(model.backbone, "classifier.pth", prefix="backbone")
        load_checkpoint(model, "old.pth", revise_keys=[(r"^encoder\.", "backbone.")])

    Args:
        model: changed in place.
        filename: a path, or an address such as ``https://...``; see :func:`local_path`. All ranks
            must load an address.
        map_location: where the tensors of the result are.
        strict: raise if there is a difference.
        revise_keys: patterns and replacements; see :func:`revise_names`.
        prefix: a module of the saved model: only its part is taken, after names were revised.

    Returns:
        The content of the file, with the state of the model, as it was saved, under ``"model"``.

    Raises:
        CorruptCheckpointError: if the file is broken or unsafe.
        OSError: if it cannot be read.
        RuntimeError: with ``strict``, if there is a difference.
        ValueError: if names cannot be revised, none has the prefix, or nothing fits.
    """
    content = read_checkpoint(local_path(filename), map_location)
    state = revise_names(content["model"], revise_keys)
    load_model_state(model, take_prefix(state, prefix) if prefix else state, strict)
    return content


def load_model_state(
    model: nn.Module, state: Mapping[str, Any], strict: bool = False
) -> IncompatibleKeys:
    """Load what fits by name and shape, and warn with a table of what does not.

    A prefix ``module.`` on every name is taken off (a file of a wrapped model). Parameters that are
    still uninitialised (lazy modules) take the shape of the file. A missing name whose tensor was
    loaded under another name, because the model shares it, counts as loaded. Each rank takes its
    part of what the model has sharded, so it is collective then.

    Args:
        model: changed in place.
        state: tensors by name, as of ``model.state_dict()``. It is not changed.
        strict: raise if there is a difference. As with torch, what fits was loaded then.

    Raises:
        RuntimeError: with ``strict``, if there is a difference; if a value is no tensor.
        ValueError: without ``strict``, if nothing fits; the model is as it was.
    """
    in_model = model.state_dict()
    loadable = revise_names(state, ())  # a copy
    if _is_wrapped(loadable) and not _is_wrapped(in_model):
        loadable = take_prefix(loadable, "module")
    incorrect = []
    for name, ours in in_model.items():  # in one order on all ranks
        if name not in loadable:
            continue
        if _fits(loadable[name], ours):
            loadable[name] = shard_like(loadable[name], ours)
        else:
            incorrect.append((name, _shape(loadable.pop(name)), _shape(ours)))
    # Only a load tells what fits: modules may rename what older versions of them have saved.
    result = model.load_state_dict(loadable, strict=False)
    if not strict and in_model and in_model.keys() <= set(result.missing_keys):
        raise ValueError(
            f"nothing in the state fits the model: it has {list(state)[:3]}, ..., and the "
            f"model {list(in_model)[:3]}, .... If a prefix differs, load by "
            "load_checkpoint() with prefix= or revise_keys="
        )
    known = _names_of_same_tensors(model, in_model.keys() - result.missing_keys)
    known.update(name for name, *_ in incorrect)
    missing = [name for name in result.missing_keys if name not in known]
    found = IncompatibleKeys(missing, list(result.unexpected_keys), incorrect)
    if any(found):
        table = _table_of(found, loadable, in_model)
        if strict:
            raise RuntimeError(f"the file and the model differ:\n{table}")
        logger.warning("Not loaded, since the file and the model differ:\n%s", table)
    return found


def _is_wrapped(state: Mapping[str, Any]) -> bool:
    return bool(state) and all(name.startswith("module.") for name in state)


def _fits(value: Any, ours: Any) -> bool:
    if is_lazy(ours) or not torch.is_tensor(value):
        return True
    return bool(value.shape == ours.shape)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if torch.is_tensor(value) and not is_lazy(value) else "-"


def _names_of_same_tensors(model: nn.Module, names: Collection[str]) -> set[str]:
    """All names of the tensors that have one of these: buffers may have some that no file has."""
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    found = {id(tensors[name]) for name in names if name in tensors}
    return {name for name, tensor in tensors.items() if id(tensor) in found}


def _table_of(
    found: IncompatibleKeys, loaded: Mapping[str, Any], in_model: Mapping[str, Any]
) -> str:
    """The differences with the shapes in the file and in the model."""
    rows = [(name, "reshaped", *shapes) for name, *shapes in found.incorrect_shapes]
    for name in found.missing_keys:
        rows.append((name, "missing", "-", _shape(in_model.get(name))))
    for name in found.unexpected_keys:
        rows.append((name, "unexpected", _shape(loaded.get(name)), "-"))
    headers = ["name", "difference", "shape in file", "shape in model"]
    return tabulate(rows, headers, disable_numparse=True)


def take_prefix(state: Mapping[str, Any], prefix: str) -> "OrderedDict[str, Any]":
    """The part of a state dict that belongs to one module, by the names that it has in itself.

    >>> dict(take_prefix({"backbone.a": 1, "head.b": 2}, "backbone"))
    {'a': 1}

    Args:
        state: is not changed.
        prefix: the full name of the module; a dot at the end may be left out.

    Raises:
        ValueError: if there is no such part.
    """
    start = prefix.removesuffix(".") + "."

    def rename(name: str) -> str | None:
        return name.removeprefix(start) if name.startswith(start) else None

    part = _renamed(state, rename)
    if not part:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in state)
        hint = did_you_mean(start[:-1], modules)
        raise ValueError(f"no name of the state begins with {start!r}{hint}")
    return part


def revise_names(
    state: Mapping[str, Any], revise_keys: Sequence[tuple[str, str]]
) -> "OrderedDict[str, Any]":
    r"""A copy of a state dict with each name revised by regular expressions, as of :func:`re.sub`.

    >>> list(revise_names({"net.a": 1, "net.b": 2}, [(r"^net\.", ""), (r"b$", "c")]))
    ['a', 'c']

    Args:
        state: is not changed.
        revise_keys: patterns and replacements, applied one after the other. An unescaped dot in a
            pattern means any character.

    Raises:
        re.error: if one of them is no regular expression.
        ValueError: if two names become the same.
    """

    def rename(name: str) -> str:
        for pattern, replacement in revise_keys:
            name = re.sub(pattern, replacement, name)
        return name

    return _renamed(state, rename)


def _renamed(
    state: Mapping[str, Any], rename: Callable[[str], str | None]
) -> "OrderedDict[str, Any]":
    """A copy with other names, and without what has none."""
    renamed: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        new = rename(name)
        if new in renamed:
            raise ValueError(f"{name!r} and another one would both be named {new!r}")
        if new is not None:
            renamed[new] = value
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # The versions of the modules, which they look at when they load, by the modules' names.
        # That of the model itself is "", and the others lack the dot before names of tensors.
        renamed._metadata = OrderedDict()  # type: ignore[attr-defined]
        for name, version in metadata.items():
            new = rename(f"{name}." if name else "")
            if new is not None:
                renamed._metadata[new.removesuffix(".")] = version  # type: ignore[attr-defined]
    return renamed


def choose_parts(
    path: str,
    state: Mapping[str, Any],
    checkpointables: Mapping[str, Any],
    names: Iterable[str] | None,
) -> dict[str, dict[str, Any]]:
    """What to load beside the model.

    Args:
        path: where the state is from, for the messages.
        state: a checkpoint.
        checkpointables: what could be loaded, by name.
        names: of those to load, or ``"trainer.optimizer"`` for a component; None for all that the
            state has.

    Returns:
        The arguments of ``load_state_dict`` beside the state, for each that is to be loaded.

    Raises:
        ValueError: if a name is unknown, or not in the state.
    """
    if names is None:
        lacking = [key for key in checkpointables if key not in state]
        if lacking:
            logger.warning("%s holds no %s: they keep their state", path, lacking)
        return {key: {} for key in checkpointables if key in state}
    chosen: dict[str, set[str]] = {}
    for name in names:
        key, _, component = name.partition(".")
        if name == "model":  # always loaded
            continue
        _check_known(name, key, checkpointables, "is not among what can be loaded")
        _check_known(name, key, state, f"is not in {path}")
        if component:
            _check_known(name, component, state[key], f"is not in {path}")
        chosen.setdefault(key, set()).add(component)
    # Without a component it is chosen as a whole.
    return {key: {} if "" in only else {"only": only} for key, only in chosen.items()}


def _check_known(name: str, part: str, known: Iterable[str], problem: str) -> None:
    if part not in known:
        hint = did_you_mean(part, sorted(known))
        raise ValueError(f"checkpointables: {name!r} {problem}{hint}")
