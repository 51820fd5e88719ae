"""Losses: found where they are not finite, and brought together across ranks."""

import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from collectives import Collectives
from gloo import run_ranks
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import CallbackHook, IterationTimer
from hooktrain.engine.losses import LossRecorder
from hooktrain.events import EventStorage
from hooktrain.utils import comm
from toys import batches, sgd

OBJECT = ["broadcast_"] * 2  # its size, then itself
GATHERED = ["allgather_"] * 2
NUMBERS = ["allgather_"]
NEW_NAMES = [*NUMBERS, *OBJECT, *NUMBERS]


def test_the_first_of_several_bad_iterations_is_named() -> None:
    recorder = LossRecorder(EventStorage())
    for i, (a, b) in enumerate([(1.0, 1.0), (2.0, math.inf), (math.nan, 3.0)]):
        recorder.record(i, {"loss_a": a, "loss_b": b}, 0.0, total=None, check_now=False)
    with pytest.raises(FloatingPointError, match="iteration=1"):
        recorder.check(3)


def test_of_bad_iterations_far_apart_the_first_is_named() -> None:
    recorder = LossRecorder(EventStorage())
    for i in (1, 8):
        recorder.record(i, {"loss": math.nan}, 0.0, check_now=False)
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        recorder.check(9)


def test_a_loss_may_come_in_some_iterations_only() -> None:
    recorder = LossRecorder(EventStorage())
    recorder.record(0, {"loss_a": 1.0}, 0.0, None, check_now=False)
    recorder.record(1, {"loss_b": 1.0, "accuracy": math.nan}, 0.0, None)
    recorder.check(2)


def test_one_of_several_ranks_does_not_end_before_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    recorder = LossRecorder(EventStorage())
    recorder.record(0, {"loss": math.nan}, 0.0)  # the other would wait for it
    with pytest.raises(FloatingPointError, match="iteration=0!"):
        recorder.check(1)  # as for a state that is to be saved


def test_the_sum_comes_before_its_parts() -> None:
    storage = EventStorage()
    LossRecorder(storage).record(0, {"loss_a": 1.0, "loss_b": 2.0}, 0.0)
    assert list(storage.histories()) == ["total_loss", "loss_a", "loss_b", "data_time"]
    assert storage.history("total_loss").latest() == 3.0


def test_a_total_of_any_name_is_checked_and_all_losses_are_told() -> None:
    recorder = LossRecorder(EventStorage())
    losses = {"objective": math.nan, "loss_a": 2.0}
    recorder.record(0, losses, 0.0, total="objective", check_now=False)
    with pytest.raises(FloatingPointError, match=r"'loss_a': 2\.0"):
        recorder.check(1)


def test_a_loss_is_not_forgotten_where_only_later_ones_are_free_to_check() -> None:
    recorder = LossRecorder(EventStorage())
    recorder.record(0, {"loss": math.nan}, 0.0, check_now=False)
    recorder.record(1, {"loss": 1.0}, 0.0, check_now=True)
    with pytest.raises(FloatingPointError, match="iteration=0!"):
        recorder.check(2)


class Period:
    """Records and exchanges as one of four ranks; notes the collectives and the result."""

    def __init__(self) -> None:
        self.storage, self.finished = EventStorage(), 0
        self.recorder = LossRecorder(self.storage)
        self.seen: dict[str, tuple[list[str], int, dict[str, list[float]]]] = {}

    def exchange(
        self, name: str, *steps: dict[str, float], stop_requested: bool = False
    ) -> None:
        start, rank = self.finished, comm.get_rank()
        for losses in steps:
            self.recorder.record(self.finished, losses, 0.5 + rank, None, False)
            self.finished += 1
        with Collectives() as collectives:
            asking = comm.get_rank() if stop_requested else -1
            maxima = self.recorder.exchange(self.finished, {"asking": asking})
        asking = maxima["asking"]
        values = {}
        for metric, history in self.storage.histories().items():
            new = [value for value, _ in history.since(start)]
            if new:
                values[metric] = new
        self.seen[name] = (collectives.seen, asking, values)


def waits() -> tuple[list[tuple[float, int]], int]:
    """How long two steps have waited, and by how much the recorder has grown."""
    storage = EventStorage()
    recorder = LossRecorder(storage)
    sizes = []
    for i in range(0, 200, 2):
        recorder.record(i, {"loss": 1.0}, 0.5 * (i % 4))
        recorder.exchange(i + 2, {})
        sizes.append(len(pickle.dumps(recorder)) - len(pickle.dumps(storage)))
    return storage.history("data_time").tail(2), max(sizes) - sizes[0]


def test_each_step_that_is_recorded_has_its_time_of_waiting_and_none_is_kept() -> None:
    times = [(0.0, 196), (1.0, 198)]
    for found, growth in run_ranks(waits, 2):
        assert found == times
        assert growth < 100


def play() -> dict[str, Any]:
    """All kinds of periods in a row."""
    rank, period = comm.get_rank(), Period()
    more = {"c": 7.0, "d": 8.0} if rank == 1 else {}
    own = {f"of {rank}": 1.0 * rank} if rank > 1 else {}
    period.exchange("before the first step")
    period.exchange("first", {"a": rank, "b": 1.0}, {"a": 2.0 * rank, "b": 1.0})
    period.exchange("second", {"b": 0.1, "a": rank}, {"a": rank, "b": 0.1})
    period.exchange("nothing since")
    period.exchange("one more", {"a": 1.0, **more})
    period.exchange("without it again", {"a": 1.0})
    period.exchange("two kinds", {"a": 1.0, **own})
    period.exchange("a request", {"a": 1.0}, stop_requested=rank in (1, 2))
    period.exchange("not finite", {"a": math.nan if rank == 3 else math.inf})
    return period.seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(play, 4)


SLOWEST = {"data_time": [3.5]}
TWICE = {"data_time": [3.5, 3.5]}


@pytest.mark.parametrize(
    ("name", "collectives", "asking", "values"),
    [
        ("before the first step", NUMBERS, -1, {}),
        ("first", NEW_NAMES, -1, {"a": [1.5, 3.0], "b": [1.0, 1.0], **TWICE}),
        ("second", NUMBERS, -1, {"a": [1.5, 1.5], "b": [0.1, 0.1], **TWICE}),
        ("nothing since", NUMBERS, -1, {}),
        ("one more", NEW_NAMES, -1, {"a": [1.0], "c": [7.0], "d": [8.0], **SLOWEST}),
        ("without it again", NUMBERS, -1, {"a": [1.0], **SLOWEST}),
        (
            "two kinds",
            [*NUMBERS, *OBJECT, *NEW_NAMES],
            -1,
            {"a": [1.0], "of 3": [3.0], "of 2": [2.0], **SLOWEST},
        ),
        ("a request", NUMBERS, 2, {"a": [1.0], **SLOWEST}),
    ],
)
def test_four_ranks_communicate_once_a_period(
    ranks: Any,
    name: str,
    collectives: list[str],
    asking: int,
    values: dict[str, list[float]],
) -> None:
    assert [r[name] for r in ranks] == [(collectives, asking, values)] * 4


def test_a_mean_of_what_is_not_finite_is_not_finite_on_any_rank(ranks: Any) -> None:
    assert [math.isfinite(r["not finite"][2]["a"][0]) for r in ranks] == [False] * 4


class Model(nn.Module):
    """Several losses."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.count = count

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss = self.fc(x).square().mean()
        return {f"loss_{i}": loss / (i + 1) for i in range(self.count)}


@pytest.fixture
def many_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process takes itself for the main one of 4,096; the others send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    monkeypatch.setattr(comm, "object_group", lambda: dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("many_ranks")
@pytest.mark.parametrize("count", [1, 100])
def test_4096_ranks_communicate_once_a_period_whatever_they_record(count: int) -> None:
    seen: dict[int, list[str]] = {}
    model = Model(count)
    trainer = SimpleTrainer(model, batches(4), sgd(model), gather_metric_period=5)
    with Collectives() as collectives:

        def note(_: Any) -> None:
            seen[trainer.iter], collectives.seen = collectives.seen, []

        trainer.register_hooks([IterationTimer(), CallbackHook(after_step=note)])
        trainer.train(0, 20)
    # Before the first step: the names of the hooks, and a stop that was asked for already.
    assert seen.pop(0) == [*GATHERED, *NUMBERS]
    # After the first period the ranks also compare their weights, buffers, metrics, data streams
    # and first batches.
    assert seen.pop(4) == [*NEW_NAMES, *GATHERED * 4]
    assert seen == {i: NUMBERS if i % 5 == 4 else [] for i in range(1, 20) if i != 4}
    assert [i for _, i in trainer.storage.history("total_loss").values()] == list(
        range(20)
    )


def test_each_iteration_of_a_period_may_be_tolerated() -> None:
    recorder = LossRecorder(EventStorage())
    for i in range(3):
        recorder.tolerate(i)
        recorder.record(i, {"loss": math.nan}, 0.0, None, check_now=False)
    recorder.check(3)
    recorder.tolerate(3)
    recorder.check(4)
    recorder.record(4, {"loss": math.nan}, 0.0, None, check_now=False)
    with pytest.raises(FloatingPointError, match="iteration=4!"):
        recorder.check(5)


def test_memory_of_tolerated_iterations_does_not_grow() -> None:
    recorder = LossRecorder(EventStorage())
    sizes = []
    for i in range(1, 101):
        recorder.tolerate(i)
        recorder.check(i + 1)
        sizes.append(len(pickle.dumps(recorder)))
    assert max(sizes) == sizes[0]
