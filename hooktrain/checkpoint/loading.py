"""What a checkpoint is on the disk and what it holds, from any library."""

import copy
import inspect
import logging
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
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

State = dict[str, Any]


def verify_checkpoint(path: str) -> None:
    """Read all of a file or a folder, and compare it with its checksums.

    Raises:
        CorruptCheckpointError: if it is broken.
        OSError: if it cannot be opened.
    """
    if is_folder(path):
        from hooktrain.checkpoint.folders import verify_folder

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
        from hooktrain.checkpoint.folders import read_folder

        verify_checkpoint(path)
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
        from hooktrain.checkpoint.folders import read_folder, verify_folder

        part = slice(comm.get_rank(), None, comm.get_world_size())
        on_all_ranks(lambda: verify_folder(path, part))
        on_all_ranks(lambda: states.append(with_model(read_folder(path, model), path)))
    else:
        on_all_ranks(lambda: states.append(read_checkpoint(path)))
    return states[0]


def with_model(state: Any, path: str) -> State:
    """What was read, with the model's state under ``"model"``; see :func:`read_checkpoint`."""
    if not isinstance(state, dict):
        raise CorruptCheckpointError(
            f"{path} is no checkpoint: it holds a {type(state).__name__}"
        )
    if isinstance(state.get("model"), dict):
        return state
    if isinstance(state.get("state_dict"), dict):
        return {
            "model" if key == "state_dict" else key: item for key, item in state.items()
        }
    # Modules may keep what they like under the second name (Module.get_extra_state).
    if state and all(
        isinstance(value, torch.Tensor) or str(name).endswith("_extra_state")
        for name, value in state.items()
    ):
        return {"model": state}
    needs = "'model', 'state_dict', or tensors only"
    raise CorruptCheckpointError(
        f"{path} is no checkpoint: no {needs}, but {list(state)[:10]!r}"
    )


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
        RuntimeError: with ``strict``, if there is a difference; the model is as it was.
        ValueError: if names cannot be revised, or none has the prefix.
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
        strict: raise if there is a difference. Meanwhile the model is in memory twice.

    Raises:
        RuntimeError: with ``strict``, if there is a difference; the model is as it was.
        ValueError: if a value is no tensor, or nothing fits; the model is as it was.
    """
    in_model = model.state_dict()
    loadable = revise_names(state, ())  # a copy
    for name, value in state.items():
        # Modules may keep what they like under this name (Module.get_extra_state).
        if not torch.is_tensor(value) and not name.endswith("_extra_state"):
            raise ValueError(
                f"{name!r} of type {type(value).__name__} must be a tensor"
            )
    in_wrapper = all(name.startswith("module.") for name in loadable)
    if (
        loadable
        and in_wrapper
        and not any(name.startswith("module.") for name in in_model)
    ):
        loadable = take_prefix(loadable, "module")
    saved, ours = (
        {k: _shape(v) for k, v in some.items()} for some in (loadable, in_model)
    )
    incorrect = [
        (name, saved[name], shape)
        for name, shape in ours.items()
        if "-" not in (shape, saved.get(name, "-")) and shape != saved[name]
    ]
    for name, _, _ in incorrect:
        del loadable[name]
    for name in [
        name for name in in_model if name in loadable
    ]:  # in one order on all ranks
        loadable[name] = shard_like(loadable[name], in_model[name])
    # Only a load tells what fits: modules may rename what older versions of them have saved.
    before = copy.deepcopy(in_model) if strict else None
    result = model.load_state_dict(loadable, strict=False)
    if in_model and not strict and in_model.keys() <= {*result.missing_keys}:
        first = (dict(islice(shapes.items(), 3)) for shapes in (saved, ours))
        raise ValueError(
            "nothing in the state fits the model: it has {}, and the model {}. If a prefix differs,"
            " load by load_checkpoint() with prefix= or revise_keys=".format(*first)
        )
    loaded = ours.keys() - result.missing_keys
    known = _names_of_same_tensors(model, loaded).union(name for name, *_ in incorrect)
    missing = [name for name in result.missing_keys if name not in known]
    found = IncompatibleKeys(missing, list(result.unexpected_keys), incorrect)
    if table := _table_of(found, saved, ours):
        if before is not None:
            model.load_state_dict(before, strict=False)
            raise RuntimeError(f"nothing was loaded, with strict=True:\n{table}")
        logger.warning(
            "Not loaded, since the file and the model differ in it:\n%s", table
        )
    return found


def _names_of_same_tensors(model: nn.Module, names: Collection[str]) -> set[str]:
    """All names of the tensors that have one of these: buffers may have some that no file has."""
    tensors: list[tuple[str, Any]] = [*model.named_parameters(remove_duplicate=False)]
    tensors += model.named_buffers(remove_duplicate=False)
    found = {id(tensor) for name, tensor in tensors if name in names}
    return {name for name, tensor in tensors if id(tensor) in found}


def _table_of(
    found: IncompatibleKeys, saved: Mapping[str, Any], ours: Mapping[str, Any]
) -> str:
    """The differences with the shapes in the file and in the model; "" if there are none."""
    rows = [(name, "reshaped", *shapes) for name, *shapes in found.incorrect_shapes]
    rows += [(name, "missing", "-", ours.get(name, "-")) for name in found.missing_keys]
    rows += [
        (name, "unexpected", saved.get(name, "-"), "-")
        for name in found.unexpected_keys
    ]
    headers = ["name", "difference", "shape in file", "shape in model"]
    return (
        tabulate([map(str, row) for row in rows], headers, disable_numparse=True)
        if rows
        else ""
    )


def _shape(value: Any) -> Any:
    return tuple(value.shape) if torch.is_tensor(value) and not is_lazy(value) else "-"


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
    part = _renamed(
        state, lambda name: name.removeprefix(start) if name.startswith(start) else None
    )
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
    """A copy with other names, and without what has none.

    The versions of the modules (``state._metadata``, which they look at when they load) get the new
    names too.
    """
    renamed: OrderedDict[str, Any] = OrderedDict()
    before: dict[str, str] = {}
    for name, value in state.items():
        if (new := rename(name)) is None:
            continue
        if new in renamed:
            raise ValueError(
                f"{before[new]!r} and {name!r} would both be named {new!r}"
            )
        renamed[new], before[new] = value, name
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # Its keys are the names of modules, so without the dot that follows in names of tensors.
        # The model itself is "", and its wrapper's entry "module" becomes that.
        modules = {key: rename(f"{key}." if key else "") for key in metadata}
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (new.removesuffix("."), metadata[key])
            for key, new in modules.items()
            if new is not None
        )
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
        TypeError: if components are chosen of one that loads as a whole only.
    """
    if names is None:
        if lacking := [key for key in checkpointables if key not in state]:
            logger.warning("%s holds no %s: they keep their state", path, lacking)
        return {key: {} for key in checkpointables if key in state}
    chosen: dict[str, set[str]] = defaultdict(set)
    for name in names:
        key, _, component = name.partition(".")
        if name == "model":  # always loaded
            continue
        _check_known(
            name, key, checkpointables, "is not among what this checkpointer loads"
        )
        _check_known(name, key, state, f"is not in {path}")
        if component:
            _check_known(name, component, state[key], f"is not in {path}")
            if (
                "only"
                not in inspect.signature(
                    checkpointables[key].load_state_dict
                ).parameters
            ):
                raise TypeError(
                    f"cannot load {name!r} alone: load_state_dict takes no 'only'"
                )
        chosen[key].add(component)
    # Without a component it is chosen as a whole.
    return {key: {} if "" in only else {"only": only} for key, only in chosen.items()}


def _check_known(name: str, part: str, known: Iterable[str], problem: str) -> None:
    if part not in known:
        raise ValueError(
            f"checkpointables: {name!r} {problem}{did_you_mean(part, sorted(known))}"
        )
