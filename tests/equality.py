"""Compares nested states exactly, for the tests of several folders."""

from typing import Any

import torch


def assert_equal(ours: Any, theirs: Any, path: str = "") -> None:
    """Fail unless types, order, values and tensors are the same; `path` says where they differ."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), path
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(a, b, f"{path}[{i}]")
    else:
        assert ours == theirs, path
