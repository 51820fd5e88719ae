"""Shared by the test_sharded_*.py."""

import shutil
from pathlib import Path
from typing import Any

import torch

from hooktrain.checkpoint.sharded import save_sharded


def state_of(value: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((3, 4), float(value)), "n": torch.tensor(value)},
        "trainer": {"iteration": value, "hooks": [1, (2.5, "x", torch.arange(3))], 5: None},
        "iteration": value,
    }


def save(path: Path, value: int) -> Path:
    save_sharded(state_of(value), path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILES = [".metadata", "__0_0.distcp", "manifest.json", "state.pth"]


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target
