"""Fixtures of the tests of metrics."""

from pathlib import Path

import pytest
from torch import Tensor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.json"


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every tensor count as one on a device; collects the sizes of the transfers."""
    sizes: list[int] = []
    to_list = Tensor.tolist

    def counted(together: Tensor) -> list[float]:
        sizes.append(len(together))
        return to_list(together)

    monkeypatch.setattr(Tensor, "is_cpu", False)
    monkeypatch.setattr(Tensor, "tolist", counted)
    return sizes
