"""A config as plain data for JSON, with dotted names for classes and functions."""

from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from hooktrain.config.config_dict import ConfigDict
from hooktrain.utils.names import importable_name, locate

# The prefix of the string that is saved in place of an object that cannot be imported by name.
NOT_SAVED = "NOT SAVED: "

_SCALARS = (str, int, bool, float, type(None))


def to_data(value: Any) -> Any:
    """A value as dicts with string keys, lists, strings, numbers, True, False and None.

    Tuples become lists. A class or a function becomes its dotted name under the keys ``_target_``
    and ``type``, which accept names, and elsewhere a call that imports it. Partial functions,
    paths, devices, ranges, enum members, and dicts with keys other than strings become calls that
    :func:`instantiate` executes.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [to_data(item) for item in value]
    if kind in (dict, ConfigDict):
        return _dict_data(value)
    if kind is partial:
        return _call_data(partial, value.func, *value.args, **value.keywords)
    if isinstance(value, Enum | range | PurePath | torch.device):
        # As in pickle, a function and its arguments recreate the value.
        reduced: Any = value.__reduce_ex__(2)
        target, args = reduced[:2]
        return _call_data(target, *args)
    return _call_data(locate, _name(value))


def _dict_data(value: dict[Any, Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in value):
        items = list(value.items())
        return _call_data(dict, items)
    named = "_target_" if "_target_" in value else "type"
    data = {}
    for key, item in value.items():
        if key == named and callable(item):
            data[key] = _name(item)
        else:
            data[key] = to_data(item)
    return data


def _call_data(target: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    call = {"_target_": target, "_args_": args, **kwargs}
    return _dict_data(call)


def _name(value: Any) -> str:
    """The dotted name of a class or function, or ``NOT_SAVED`` and the repr if it has none."""
    try:
        return importable_name(value)
    except ValueError:
        return f"{NOT_SAVED}{value!r:.80}"


def dotted_lines(data: dict[str, Any], prefix: str) -> Iterator[str]:
    """Plain data as lines such as ``train.max_iter = 100``."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if value and isinstance(value, dict):
            yield from dotted_lines(value, f"{name}.")
        else:
            yield f"{name} = {value!r}\n"
