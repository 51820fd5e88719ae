"""Shared by test_checkpoint_storage.py and test_checkpoint_loading.py."""

from typing import Any

import torch


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def small_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(3, 4), "zeros": torch.zeros(5)},
        "trainer": {"iteration": 3, "hooks": [1, (2.5, "x")]},
        "iteration": 3,
    }
