"""Fixtures of the tests of metrics."""

from pathlib import Path

import pytest
from torch import Tensor

from hooktrain.utils.events import storage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.json"


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every tensor count as one on a device; collects the sizes of the transfers."""
    sizes: list[int] = []
    fetch = storage._read_at_once

    def counted(tensors: list[Tensor]) -> list[float]:
        sizes.append(len(tensors))
        return fetch(tensors)

    monkeypatch.setattr(storage, "_is_on_host", lambda tensor: False)
    monkeypatch.setattr(storage, "_read_at_once", counted)
    return sizes
