"""Reads checkpoints of any library, and loads a state into a model."""

import copy
import logging
import os
import re
import reprlib
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hooktrain.checkpoint.files import CheckpointFile, CorruptCheckpointError, is_folder
from hooktrain.checkpoint.sources import local_path
from hooktrain.model.wrappers import bare_name
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.file_io import AnyPath
from hooktrain.utils.names import State
from hooktrain.utils.tensors import Device, shard_like

logger = logging.getLogger(__name__)

# The entry of one tensor takes about 80 bytes.
_ENDING_BYTES = 1 << 20

Shape = tuple[int, ...]
# The names of tensors, with their shapes in the file and in the model.
Shapes = list[tuple[str, Shape, Shape]]
# Patterns and replacements; see revise_names().
Renames = Sequence[tuple[str, str]]


def open_checkpoint(path: str) -> CheckpointFile:
    """The checkpoint at a path, a file or a folder of shards, intact or not.

    Raises:
        IsADirectoryError: for a folder that is not itself a checkpoint.
        FileNotFoundError: if the path does not exist.
    """
    if is_folder(path):
        from hooktrain.checkpoint.folders import CheckpointFolder

        return CheckpointFolder(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(0, size - _ENDING_BYTES))
        return CheckpointFile(path, (size, zlib.crc32(file.read())))


def read_checkpoint(path: str, map_location: Device = "cpu", key: str = "") -> State:
    """Verify and load a file or a folder; the result has the model's state under ``"model"``.

    Files of other libraries have it elsewhere; see :func:`hooktrain.checkpoint.files.with_model`.

    Args:
        path: the path of the file or folder, which only this process reads.
        map_location: the device on which the tensors arrive. On ``"meta"`` they have no data, and
            only the sizes of shards in a folder are verified.
        key: see :func:`load_checkpoint`.

    Raises:
        CorruptCheckpointError: if it is broken, or holds no model state.
        IsADirectoryError: for a folder that is not itself a checkpoint.
        FileNotFoundError: if the path does not exist; other ``OSError`` if it cannot be opened.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.verify(sizes_only=map_location == "meta")
    return checkpoint.read(None, map_location, key)


def read_on_all_ranks(path: str, model: nn.Module) -> State:
    """Verify and load a file or a folder on every rank; see :func:`read_checkpoint`. Collective.

    Each rank verifies a file as a whole, since it may see another disk than the others. The files
    of a folder are divided among the ranks.

    Args:
        path: the path of the file or folder, which every rank must be able to read.
        model: if it is sharded, each rank reads only its shards.

    Raises:
        CorruptCheckpointError: on every rank, if it is broken, holds no model state, or differs
            between the ranks.
        OSError: on every rank, if one of them cannot open it.
    """
    rank = comm.get_rank()
    seen = on_all_ranks(partial(open_checkpoint, path))
    # Each rank takes its shards from the file that it sees, so different files would be mixed.
    if len({each.ending for each in seen}) > 1:
        raise CorruptCheckpointError(f"the ranks see different files at {path}")
    checkpoint = seen[rank]
    on_all_ranks(partial(checkpoint.verify, rank, len(seen)))
    states: list[State] = []
    on_all_ranks(lambda: states.append(checkpoint.read(model)))
    return states[0]


class IncompatibleKeys(NamedTuple):
    """How a loaded state differed from the model. Each name is in only one of the lists.

    Attributes:
        missing_keys: the names that are in the model but not in the file.
        unexpected_keys: the names that are in the file but not in the model.
        incorrect_shapes: ``(name, shape in the file, shape in the model)`` of tensors that were
            not loaded because their shapes differ.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    incorrect_shapes: Shapes


def load_checkpoint(
    model: nn.Module,
    filename: AnyPath,
    map_location: Device = "cpu",
    strict: bool = False,
    revise_keys: Renames = (),
    key: str = "",
) -> State:
    r"""Load a model from a file: of this package, detectron2, MMEngine, Lightning, or torch's own.

    The state of the model is under ``"model"`` or ``"state_dict"``, or the file is a bare state
    dict, such as a ``.safetensors`` file. :func:`load_model_state` says what is loaded. Nothing but
    the model is loaded; :class:`hooktrain.checkpoint.Checkpointer` resumes a run.

    Example::

        load_checkpoint(model, "swinir.pth", key="params_ema")
        load_checkpoint(model, "old.pth", revise_keys=[(r"^encoder\.", "backbone.")])
        load_checkpoint(model.backbone, "classifier.pth", revise_keys=[(r"^backbone\.", "")])

    Args:
        model: changed in place.
        filename: a path, or an address such as ``https://...``; see :func:`local_path`. An address
            must be loaded on all ranks.
        map_location: the device of the tensors in the result.
        strict: whether to refuse a file that differs from the model.
        revise_keys: patterns and replacements; see :func:`revise_names`.
        key: the name of the weights in the file, if it is another one, such as ``"teacher"``.

    Returns:
        The content of the file, with the state of the model, as it was saved, under ``"model"``.

    Raises:
        CorruptCheckpointError: if the file is broken or unsafe, or holds no weights.
        OSError: if it cannot be read.
        ValueError: if names cannot be revised, or nothing fits; with ``strict``, if there is a
            difference.
    """
    content = read_checkpoint(local_path(filename), map_location, key)
    load_model_state(model, revise_names(content["model"], revise_keys), strict)
    others = [name for name in content if name != "model"]
    if others:
        logger.info("%s also has %s, which are not loaded", filename, others)
    return content


def load_model_state(
    model: nn.Module, state: State, strict: bool = False, *, check_only: bool = False
) -> IncompatibleKeys:
    """Load the tensors that fit by name and shape, and warn about the others.

    Prefixes of wrappers around any part of the model make no difference
    (:func:`hooktrain.model.wrappers.bare_name`), nor does the ``n_averaged`` of averaged models. A
    missing name counts as loaded if the model shares its tensor with a name that was loaded. If the
    model is sharded, each rank takes its shards.

    Args:
        model: changed in place.
        state: tensors by name, as from ``model.state_dict()``. It is not changed.
        strict: whether to refuse a state that differs from the model, which is then unchanged.
        check_only: whether to load nothing, and only refuse a state as ``strict`` does.

    Returns:
        The differences. Tensors that ``model.state_dict()`` leaves out on purpose are not missing.

    Raises:
        RuntimeError: if a value is not a tensor, or a parameter of the model is uninitialised.
        ValueError: with ``strict``, if there is a difference; otherwise, if nothing fits.
    """
    in_model = model.state_dict()
    own_name = _names_of(in_model)

    def rename(name: str) -> str:
        own = own_name(name)
        return name if own in state else own

    loadable = _renamed(state, rename)
    incorrect: Shapes = []
    for name, ours in in_model.items():
        if name not in loadable:
            continue
        theirs = _shape(loadable[name])
        own = _shape(ours)
        if theirs == own or None in (theirs, own) or name.endswith("_extra_state"):
            loadable[name] = shard_like(loadable[name], ours)
            continue
        incorrect.append((name, theirs, own))
        del loadable[name]
    if strict and loadable.keys() != in_model.keys():
        trial = copy.copy(loadable)
        for name in loadable.keys() & in_model.keys():
            trial[name] = in_model[name]  # so nothing is changed
        found = _load(model, trial, in_model, incorrect, own_name)
        if any(found):
            raise ValueError(
                f"the checkpoint is from another model, so nothing is loaded: {_describe(found)}\n"
                "Use another folder, or the model of the checkpoint. If it has only a part of the "
                "weights on purpose, strict=False loads those that fit, as do load(path) and "
                "train.init_checkpoint"
            )
    if check_only:
        return IncompatibleKeys([], [], [])
    found = _load(model, loadable, in_model, incorrect, own_name)
    if any(found):
        logger.warning("Not loaded: %s", _describe(found))
    return found


def _names_of(in_model: State) -> Callable[[str], str]:
    """The function from a name, with any wrapper prefixes, to the model's name of that tensor.

    It returns names that the model lacks without wrapper prefixes.
    """
    # Names of modules, for the versions in the metadata, get a dot at the end in _renamed().
    modules = [f"{name}." for name in getattr(in_model, "_metadata", {})]
    ours = {bare_name(name): name for name in [*modules, *in_model]}

    def own_name(name: str) -> str:
        if name in in_model:
            return name
        bare = bare_name(name)
        return ours.get(bare, bare)

    return own_name


def _load(
    model: nn.Module,
    state: State,
    in_model: State,
    incorrect: Shapes,
    own_name: Callable[[str], str],
) -> IncompatibleKeys:
    """Load a state. Only a load shows which names fit, since modules rename older ones."""
    result = model.load_state_dict(state, strict=False)
    # Some wrappers leave their own part of a name out of the state, but not out of the result.
    unexpected = [*map(own_name, result.unexpected_keys)]
    if in_model and state.keys() <= set(unexpected):
        raise ValueError(
            f"nothing in the state fits the model: the state has {reprlib.repr(list(state))}, "
            f"the model {reprlib.repr(list(in_model))}. Names with different shapes (file, model): "
            f"{incorrect[:10]}. If the names differ, use load_checkpoint(..., revise_keys=...)"
        )
    # The model may have a parameter under several names.
    named = model.named_parameters(remove_duplicate=False)
    parameters = {own_name(name): parameter for name, parameter in named}
    lacking = [name for name in map(own_name, result.missing_keys) if name in in_model]
    there = in_model.keys() - lacking | {name for name, _, _ in incorrect}
    known = {parameters.get(name, name) for name in there}
    missing = [name for name in lacking if parameters.get(name, name) not in known]
    # The count of torch's AveragedModel.
    unexpected = [name for name in unexpected if not name.endswith("n_averaged")]
    return IncompatibleKeys(missing, unexpected, incorrect)


def _shape(value: Any) -> Any:
    """The shape of a tensor; None for other values."""
    return tuple(value.shape) if torch.is_tensor(value) else None


def _describe(found: IncompatibleKeys) -> str:
    """The differences, one line per kind."""
    text = "the file and the model differ (shapes: in the file, in the model)"
    for kind, names in found._asdict().items():
        if names:
            text += f"\n{kind}: {names}"
    return text


def revise_names(state: State, revise_keys: Renames) -> "OrderedDict[str, Any]":
    r"""A copy of a state dict with each name revised by regular expressions, as of :func:`re.sub`.

    >>> list(revise_names({"net.a": 1, "net.b": 2}, [(r"^net\.", ""), (r"b$", "c")]))
    ['a', 'c']

    Args:
        state: the state dict, which is not changed.
        revise_keys: patterns and replacements, applied one after the other. An unescaped dot in a
            pattern means any character.

    Raises:
        re.error: if one of them is not a regular expression.
        ValueError: if two names become the same.
    """

    def rename(name: str) -> str:
        for pattern, replacement in revise_keys:
            name = re.sub(pattern, replacement, name)
        return name

    return _renamed(state, rename)


def _renamed(state: State, rename: Callable[[str], str]) -> "OrderedDict[str, Any]":
    """A copy of a state with renamed tensors."""
    renamed = OrderedDict()
    for name, value in state.items():
        new = rename(name)
        if new in renamed:
            raise ValueError(f"{name!r} and another name would both become {new!r}")
        renamed[new] = value
    # Modules read their versions when they load. These are stored by the names of the modules: ""
    # for the model itself, the others without a dot at the end.
    versions = {}
    for module, version in getattr(state, "_metadata", {}).items():
        new = rename(f"{module}.".removeprefix("."))
        versions[new.removesuffix(".")] = version
    renamed._metadata = versions  # type: ignore[attr-defined]
    return renamed
