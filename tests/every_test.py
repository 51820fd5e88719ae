"""What every test is held to: one thread, and nothing left behind."""

import gc
import multiprocessing
import os
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

# The first optimizer of a process imports it, and it sets an environment variable.
import torch._dynamo
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hooktrain.utils.logger import log_once

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_was_logged() -> None:
    log_once.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands until `now` is set."""
    clock = SimpleNamespace(now=100.0)
    read = staticmethod(lambda: clock.now)
    monkeypatch.setattr("time.perf_counter", read)
    monkeypatch.setattr("hooktrain.engine.clock.Clock.read", read)
    return clock


class _Reads(TorchDispatchMode):
    """Notes each number that Python reads from a tensor, by item() and the like."""

    def __init__(self, found: list[int]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "_local_scalar_dense" in str(func):
            self.found.append(1)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Makes every tensor count as one on a device; collects the sizes of the transfers."""
    sizes: list[int] = []
    to_list = torch.Tensor.tolist

    def counted(together: torch.Tensor) -> Any:
        sizes.append(together.numel())
        return to_list(together)

    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    with _Reads(sizes):
        yield sizes


def _environment() -> dict[str, str]:
    # pytest sets the first between the phases of a test, torch 2.9 the second when it compiles.
    others = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
    return {k: v for k, v in os.environ.items() if k not in others}


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaks an environment variable, process, thread or process group."""
    environment = _environment()
    folder, threads = os.getcwd(), set(threading.enumerate())
    yield
    assert _environment() == environment, "the test changed environment variables"
    assert os.getcwd() == folder, "the test changed the working directory"
    if multiprocessing.active_children():
        gc.collect()  # a caught exception keeps the loader alive that raised it
    for child in multiprocessing.active_children():
        child.join(1)  # a loader may end a worker without waiting for it
    assert not multiprocessing.active_children(), "the test left processes behind"
    assert not dist.is_initialized(), "the test left a process group behind"
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    assert not left, f"the test left threads behind: {left}"
