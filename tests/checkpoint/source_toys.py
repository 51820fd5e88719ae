"""A small checkpoint and its digest."""

import hashlib
import io
from pathlib import Path

import torch
from torch import nn

__all__ = ["DIGEST", "GOOD", "SHORT", "files", "model", "weights"]


def weights(value: float) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.full((1, 1), value)}, file)
    return file.getvalue()


def model() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


GOOD = weights(3)
DIGEST = hashlib.sha256(GOOD).hexdigest()
# Eight digits or more, until there is a letter among them.
SHORT = next(DIGEST[:n] for n in range(8, 65) if not DIGEST[:n].isdecimal())


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
