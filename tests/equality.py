"""Compares nested states, and the ends of runs, exactly, for the tests of several folders."""

import json
from pathlib import Path
from typing import Any

import torch

TIMES = ("time", "data_time", "eta_seconds")


def assert_equal(ours: Any, theirs: Any, path: str = "") -> None:
    """Fail unless types, order, values and tensors are the same; `path` says where they differ."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, path
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


def equal(ours: Any, theirs: Any) -> bool:
    try:
        assert_equal(ours, theirs)
    except AssertionError:
        return False
    return True


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.json, without times."""
    lines = [
        json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()
    ]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def final_checkpoint(folder: Path) -> Any:
    """The content of the last checkpoint of a complete run."""
    return torch.load(folder / "model_final.pth", weights_only=True)


def assert_same_end(ours: Path, theirs: Path) -> None:
    """Fail unless two runs have ended with the same weights, state of the trainer and metrics."""
    a, b = final_checkpoint(ours), final_checkpoint(theirs)
    assert_equal(a["model"], b["model"], "model")
    for part in ("iteration", "optimizer", "hooks", "data", "seed"):
        assert_equal(a["trainer"][part], b["trainer"][part], part)
    assert metrics(ours) == metrics(theirs)
