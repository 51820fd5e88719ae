"""Effects of signals to all processes of a run on the workers of its loaders."""

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hooktrain.checkpoint import Checkpointer
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.data.batches import Batches
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import CallbackHook, PeriodicCheckpointer
from hooktrain.engine.hooks.preemption import Preemption
from hooktrain.engine.hooks.watchdog import EXIT_HUNG, Watchdog
from hooktrain.evaluation import inference_on_dataset
from hooktrain.model import update_bn_stats
from hooktrain.utils.workers import start_workers
from processes import LIMIT_SECONDS, alive, end, start, wait_until
from toys import LinearLoss


class Samples(Dataset[torch.Tensor]):
    """Each reading process writes a file with its pid; the sample ``hang_at`` hangs."""

    def __init__(self, folder: Path, hang_at: int = -1, lets_go: bool = True) -> None:
        self.folder, self.hang_at, self.lets_go = folder, hang_at, lets_go

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        (self.folder / f"worker{os.getpid()}").touch()
        if index == self.hang_at and self.lets_go:
            time.sleep(3600)
        if index == self.hang_at:
            sum(range(10**15))  # holds the interpreter lock
        return torch.ones(4)


def plain(dataset: Dataset[Any], **options: Any) -> Any:
    return DataLoader(dataset, batch_size=1, **options)


def ours(dataset: Dataset[Any], **options: Any) -> Any:
    return build_train_loader(dataset, total_batch_size=1, seed=0, **options)


def train(folder: Path, build: Any, method: str, where: str) -> None:
    """Reports iteration 1 by a file, and needs the workers again after the signal."""
    options = {"num_workers": 1, "multiprocessing_context": method}
    loader = build(Samples(folder), **options)
    model = LinearLoss()
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.1))
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    preemption = Preemption(Checkpointer(model, folder, trainer=trainer), signals)

    def wait_for_signal(batch: Any) -> Any:
        (folder / "there").touch()
        wait_until(lambda: trainer.agreement.own_signal > 0)
        return model(batch)

    def in_step(_: Any) -> None:
        if trainer.iter == 1 and where == "step":
            wait_for_signal(next(trainer._data_loader_iter))
            for _ in range(10):  # more than the workers have prefetched
                next(trainer._data_loader_iter)
        if trainer.iter == 1 and where == "evaluation":
            loader = build_test_loader(Samples(folder), **options)
            inference_on_dataset(wait_for_signal, loader, None)

    trainer.register_hooks([CallbackHook(after_step=in_step), preemption])
    trainer.train(max_iter=3)


def workers(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("worker")) for path in folder.glob("worker*")]


@pytest.mark.parametrize(
    ("number", "build", "method", "where"),
    [
        (signal.SIGTERM, ours, "fork", "step"),
        (signal.SIGINT, plain, "fork", "step"),
        (signal.SIGUSR1, plain, "fork", "evaluation"),
        (signal.SIGTERM, plain, "spawn", "step"),
    ],
)
def test_a_run_saves_after_a_signal_to_all_processes(
    tmp_path: Path, number: int, build: Any, method: str, where: str
) -> None:
    process = start(train, tmp_path, build, method, where)
    wait_until(lambda: (tmp_path / "there").exists() or not process.is_alive())
    os.killpg(process.pid, number)
    process.join(LIMIT_SECONDS)
    assert process.exitcode == 128 + number
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    assert not any(map(alive, workers(tmp_path)))
    end(process)


class Blocked(IterableDataset[bool]):
    """Whether its worker ignores SIGTERM, started perhaps by torchdata to ask for the state."""

    def __iter__(self) -> Iterator[bool]:
        yield signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing to load."""


def test_workers_ignore_signals_also_where_the_state_of_a_stream_is_asked_first() -> (
    None
):
    batches = Batches(StatefulDataLoader(Blocked(), 1, num_workers=1))
    batches.state_dict()
    assert next(batches).tolist() == [True]


KEPT: list[Any] = []


def hang(folder: Path, how: str) -> None:
    """The worker hangs; this process ends, is killed, or hangs with it."""
    loader = plain(Samples(folder, 0, lets_go=how == "returns"), num_workers=1)
    if how.startswith("returns"):
        KEPT.append(
            start_workers(loader)
        )  # the process then exits without waiting for the worker
        wait_until(lambda: bool(workers(folder)))
        return
    model = LinearLoss()
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.1))
    hooks = {
        "signal": Preemption(Checkpointer(model, folder)),
        "watchdog": Watchdog(1.0),
        "kill": None,
    }
    trainer.register_hooks([hooks[how]])
    trainer.train(max_iter=3)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("returns", 0),
        ("returns, though the worker holds the interpreter lock", 0),
        ("kill", -signal.SIGKILL),
        ("signal", -signal.SIGTERM),
        ("watchdog", EXIT_HUNG),
    ],
)
def test_a_worker_that_hangs_does_not_outlive_the_process(
    tmp_path: Path, how: str, code: int
) -> None:
    process = start(hang, tmp_path, how)
    wait_until(lambda: bool(workers(tmp_path)) or not process.is_alive())
    if how == "kill":
        process.kill()
    if how == "signal":
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGTERM)  # a second signal ends the run at once
    process.join(LIMIT_SECONDS)
    assert process.exitcode == code
    wait_until(lambda: not any(map(alive, workers(tmp_path))))
    end(process)


def leave_workers() -> None:
    """The process ends while its workers wait for work."""
    batches = start_workers(DataLoader(range(64), num_workers=4))  # type: ignore[arg-type]
    next(batches)
    KEPT.append(batches)


def test_a_process_whose_workers_wait_for_work_ends_without_an_error() -> None:
    assert [end(start(leave_workers)) for _ in range(3)] == [0, 0, 0]


def read_one() -> None:
    next(start_workers(DataLoader(range(8), num_workers=1)))  # type: ignore[arg-type]


def fork_a_reader(read: Path) -> None:
    """The workers are needed after a forked child has read by workers of its own."""
    batches = start_workers(DataLoader(range(64), num_workers=2))  # type: ignore[arg-type]
    next(batches)
    child = multiprocessing.Process(target=read_one)
    child.start()
    child.join()
    read.write_text(str(len(list(batches))))
    sys.exit(child.exitcode)


def test_a_forked_child_with_workers_leaves_those_of_its_parent(tmp_path: Path) -> None:
    assert end(start(fork_a_reader, tmp_path / "read")) == 0
    assert (tmp_path / "read").read_text() == "63"


class Shot(Samples):
    """The worker that reads sample 8 is killed, as by a kernel without memory."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def torchdatas(dataset: Dataset[Any], **options: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=1, **options)


@contextmanager
def death_of_a_worker() -> Iterator[None]:
    """Expects the error of a killed worker.

    torch's handler of the signal may raise it once more while the first is being caught.
    """
    # The last one is ours: the worker may have been handing over a batch.
    told = "killed by signal: Killed|exited unexpectedly|while it returned a batch"
    try:
        with pytest.raises(RuntimeError, match=told):
            yield
    except RuntimeError as error:
        if not re.search(told, str(error)):
            raise


def train_until_a_worker_is_shot(folder: Path, build: Any) -> None:
    model = LinearLoss()
    loader = build(Shot(folder), num_workers=1)
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.1))
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 1)])
    with death_of_a_worker():
        trainer.train(max_iter=64)


@pytest.mark.parametrize("build", [plain, ours, torchdatas])
def test_a_worker_that_is_killed_ends_the_run_with_its_signal(
    tmp_path: Path, build: Any
) -> None:
    assert end(start(train_until_a_worker_is_shot, tmp_path, build)) == 0
    assert (tmp_path / "last_checkpoint").exists()
    assert not any(map(alive, workers(tmp_path)))


def evaluate_until_a_worker_is_shot(folder: Path) -> None:
    model = LinearLoss()
    loader = build_test_loader(Shot(folder), num_workers=1)
    with death_of_a_worker():
        inference_on_dataset(model, loader, None)


def test_a_worker_of_an_evaluation_that_is_killed_ends_it_with_its_signal(
    tmp_path: Path,
) -> None:
    assert end(start(evaluate_until_a_worker_is_shot, tmp_path)) == 0
    assert not any(map(alive, workers(tmp_path)))


class Severed(DataLoader[Any]):
    """Its worker is killed after it has put the second batch into the queue."""

    def __iter__(self) -> Any:
        yield torch.ones(2, 4)
        raise ConnectionResetError(104, "Connection reset by peer")


@pytest.mark.parametrize(
    "read",
    [
        lambda loader: list(islice(Batches(loader), 3)),
        lambda loader: inference_on_dataset(LinearLoss(), loader, None),
        lambda loader: update_bn_stats(nn.BatchNorm1d(4), loader, 3),
    ],
    ids=["training", "evaluation", "batch norm"],
)
def test_a_worker_that_dies_while_it_hands_over_a_batch_is_an_error_that_says_so(
    read: Any,
) -> None:
    with pytest.raises(RuntimeError, match="while it returned a batch") as caught:
        read(Severed([], num_workers=1))
    assert isinstance(caught.value.__cause__, ConnectionResetError)


class Remote(Dataset[Any]):
    """Its server closes the connection."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise ConnectionResetError("of the data's server")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_connection_that_a_sample_loses_is_not_taken_for_the_death_of_a_worker(
    num_workers: int,
) -> None:
    with pytest.raises(ConnectionResetError, match="of the data's server"):
        list(start_workers(DataLoader(Remote(), num_workers=num_workers)))
