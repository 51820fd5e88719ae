"""What several tests of checkpoints share."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


class Counter:
    """Something with a state, which notes what it was asked to load."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.only: set[str] | None = None

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value, "optimizer": 7}

    def load_state_dict(
        self, state: dict[str, int], only: set[str] | None = None
    ) -> None:
        self.value, self.only = state["value"], only


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def small_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(3, 4), "zeros": torch.zeros(5)},
        "trainer": {"iteration": 3, "hooks": [1, (2.5, "x")]},
        "iteration": 3,
    }


def overwrite(path: Path, content: bytes) -> None:
    """Forty times as fast as to make a file empty first, which counts where many are written."""
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()


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


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= level)
