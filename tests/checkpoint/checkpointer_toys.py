"""Shared by test_checkpointer.py and test_checkpointer_load.py."""

import logging

import pytest
from torch import nn


class Counter:
    """Something with a state, which notes what it was asked to load."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.only: set[str] | None = None

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value, "optimizer": 7}

    def load_state_dict(self, state: dict[str, int], only: set[str] | None = None) -> None:
        self.value, self.only = state["value"], only


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return model


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= level)
