"""Reading checkpoints of any library, and loading a state into a model."""

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.parameter import is_lazy

from hooktrain.checkpoint.files import (
    CorruptCheckpointError,
    is_folder,
    load_file,
    verify_file,
)
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
    if not is_folder(path):
        verify_file(path)
        return
    from hooktrain.checkpoint.folders import verify_folder

    verify_folder(path)


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
    if not is_folder(path):
        return with_model(load_file(path, map_location), path)
    from hooktrain.checkpoint.folders import read_folder, verify_folder

    verify_folder(path)
    state = read_folder(path, map_location=map_location)
    return with_model(state, path)


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
    if not on_main_process(lambda: is_folder(path)):
        on_all_ranks(lambda: states.append(read_checkpoint(path)))
        return states[0]
    from hooktrain.checkpoint.folders import read_folder, verify_folder

    rank = comm.get_rank()
    ranks = comm.get_world_size()
    part = slice(rank, None, ranks)
    on_all_ranks(lambda: verify_folder(path, part))
    on_all_ranks(lambda: states.append(read_folder(path, model)))
    return with_model(states[0], path)


def with_model(state: Any, path: str) -> State:
    """What was read, with the model's state under ``"model"``; see :func:`read_checkpoint`."""
    found: Any = type(state).__name__
    if isinstance(state, dict):
        names = list(state)
        found = names[:10]
        for key in ("model", "state_dict"):
            model = state.get(key)
            if isinstance(model, dict):
                rest = dict(state)
                del rest[key]
                return {"model": model, **rest}
        if _is_of_a_model(state):
            return {"model": state}
    raise CorruptCheckpointError(
        f"{path} is no checkpoint: no 'model', 'state_dict', or tensors only, but {found}"
    )


def _is_of_a_model(state: State) -> bool:
    # Modules may keep what they like as extra state (Module.get_extra_state).
    for name, value in state.items():
        if str(name).endswith("_extra_state"):
            continue
        if not isinstance(value, torch.Tensor):
            return False
    return len(state) > 0


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
    if prefix:
        state = take_prefix(state, prefix)
    load_model_state(model, state, strict)
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
    incorrect: list[tuple[str, Shape, Shape]] = []
    for name, ours in in_model.items():  # in one order on all ranks
        if name not in loadable:
            continue
        theirs = _shape(loadable[name])
        own = _shape(ours)
        if theirs == own or _NO_SHAPE in (theirs, own):
            loadable[name] = shard_like(loadable[name], ours)
        else:
            incorrect.append((name, theirs, own))
            del loadable[name]
    # Only a load tells what fits: modules may rename what older versions of them have saved.
    result = model.load_state_dict(loadable, strict=False)
    loaded = in_model.keys() - result.missing_keys
    if in_model and not loaded and not strict:
        given = list(state)[:3]
        own = list(in_model)[:3]
        raise ValueError(
            f"nothing in the state fits the model: it has {given}, ..., and the "
            f"model {own}, .... If a prefix differs, load by "
            "load_checkpoint() with prefix= or revise_keys="
        )
    known = _names_of_same_tensors(model, loaded)
    for name, _, _ in incorrect:
        known.add(name)
    found = IncompatibleKeys(
        [name for name in result.missing_keys if name not in known],
        list(result.unexpected_keys),
        incorrect,
    )
    if any(found):
        table = _table_of(found, loadable, in_model)
        if strict:
            raise RuntimeError(f"the file and the model differ:\n{table}")
        logger.warning("Not loaded, since the file and the model differ:\n%s", table)
    return found


_NO_SHAPE = "-"


def _is_wrapped(state: Mapping[str, Any]) -> bool:
    return bool(state) and all(name.startswith("module.") for name in state)


def _shape(value: Any) -> Any:
    """The shape of a tensor, if it has one: those of lazy modules have none yet."""
    if not torch.is_tensor(value) or is_lazy(value):
        return _NO_SHAPE
    return tuple(value.shape)


def _names_of_same_tensors(model: nn.Module, names: Collection[str]) -> set[str]:
    """All names of the tensors that have one of these: buffers may have some that no file has."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    tensors: dict[str, torch.Tensor] = {**dict(parameters), **dict(buffers)}
    ids = {name: id(tensor) for name, tensor in tensors.items()}
    found = {ids.get(name) for name in names}
    return {name for name in ids if ids[name] in found}


def _table_of(
    found: IncompatibleKeys, loaded: Mapping[str, Any], in_model: Mapping[str, Any]
) -> str:
    """The differences with the shapes in the file and in the model."""
    rows: list[Any] = []
    for name, theirs, ours in found.incorrect_shapes:
        rows.append((name, "reshaped", theirs, ours))
    for name in found.missing_keys:
        shape = _shape(in_model.get(name))
        rows.append((name, "missing", _NO_SHAPE, shape))
    for name in found.unexpected_keys:
        shape = _shape(loaded.get(name))
        rows.append((name, "unexpected", shape, _NO_SHAPE))
    headers = [
        "name",
        "difference",
        "shape in file",
        "shape in model",
    ]
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
        if name.startswith(start):
            return name.removeprefix(start)
        return None

    part = _renamed(state, rename)
    if not part:
        modules = [name.rpartition(".")[0] for name in state]
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
    # The versions of the modules, which they look at when they load, by the modules' names.
    # That of the model itself is "", and the others lack the dot before names of tensors.
    versions = {}
    for module, version in getattr(state, "_metadata", {}).items():
        start = ""
        if module:
            start = f"{module}."
        new = rename(start)
        if new is not None:
            versions[new.removesuffix(".")] = version
    renamed._metadata = versions  # type: ignore[attr-defined]
    return renamed


def choose_parts(
    path: str,
    state: Mapping[str, Any],
    checkpointables: Mapping[str, Any],
    names: Iterable[str] | None,
) -> dict[str, dict[str, Any]]:
    """What to load beside the model, if that is possible.

    Args:
        path: where the state is from, for the messages.
        state: a checkpoint.
        checkpointables: what could be loaded, by name.
        names: of those to load, or ``"trainer.optimizer"`` for a component; None for all that the
            state has.

    Returns:
        The arguments of ``load_state_dict`` beside the state, for each that is to be loaded.

    Raises:
        ValueError: if a name is unknown, or not in the state; if it is of a component, and the
            checkpointable can be loaded as a whole only.
    """
    chosen: dict[str, dict[str, Any]] = {}
    if names is None:
        lacking = []
        for key in checkpointables:
            if key in state:
                chosen[key] = {}
            else:
                lacking.append(key)
        if lacking:
            logger.warning("%s holds no %s: they keep their state", path, lacking)
        return chosen
    for name in names:
        key, _, component = name.partition(".")
        if name == "model":  # always loaded
            continue
        _check_known(name, key, checkpointables, "is not among what can be loaded")
        _check_known(name, key, state, f"is not in {path}")
        if not component:
            chosen[key] = {}
            continue
        _check_known(name, component, state[key], f"is not in {path}")
        load = checkpointables[key].load_state_dict
        if "only" not in signature(load).parameters:
            raise ValueError(
                f"checkpointables: {name!r} is a part, but {key!r} loads as a whole only"
            )
        options = chosen.setdefault(key, {"only": set()})
        if options:  # else it was chosen as a whole before
            options["only"].add(component)
    return chosen


def _check_known(name: str, part: str, known: Iterable[str], problem: str) -> None:
    if part not in known:
        hint = did_you_mean(part, sorted(known))
        raise ValueError(f"checkpointables: {name!r} {problem}{hint}")
