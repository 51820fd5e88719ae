"""How the ranks exchange their reports: with the result of objects, at the cost of numbers."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_toys import batches, sgd

from collectives import Collectives
from gloo import run_ranks
from hooktrain.checkpoint.agreement import on_all_ranks
from hooktrain.engine import SimpleTrainer, rank_reports
from hooktrain.engine.hooks import CallbackHook, IterationTimer
from hooktrain.engine.metrics import merge_periods
from hooktrain.engine.rank_reports import ReportExchange, hooks_of_some_ranks
from hooktrain.engine.rank_rng import RankRng
from hooktrain.utils import comm
from hooktrain.utils.env import get_rng_state

REGULAR = ["allreduce_"]
NAMES = ["broadcast_"] * 2  # of an object: its size, then itself
OBJECTS = ["allgather_"] * 2

Period = list[tuple[int, dict[str, float]]]


def period_of(first: int, count: int, *names: str, precise: bool = True) -> Period:
    """Random metrics of this rank, of very different sizes."""
    random.seed(100 * comm.get_rank() + first)
    period = []
    for i in range(first, first + count):
        metrics = {name: random.gauss(0, 1) * 10 ** random.randint(-3, 3) for name in names}
        if not precise:
            metrics = {name: torch.tensor(v).item() for name, v in metrics.items()}
        period.append((i, {**metrics, "data_time": random.random()}))
    return period


class Script:
    """Exchanges one report after the other; what the tests look at is in ``seen``."""

    def __init__(self) -> None:
        self.exchange = ReportExchange()
        self.exchange.start(0)
        self.finished = 0
        self.seen: dict[str, tuple[list[str], int, bool]] = {}

    def step(self, name: str, period: Period, count: int = 2, **entries: Any) -> None:
        self.finished += count
        report = {"stop": None, "metrics": period, **entries}
        with Collectives() as collectives:
            reports = self.exchange.exchange(report, self.finished)
        everyones = comm.all_gather(report)
        merged = merge_periods([r["metrics"] for r in reports])
        expected = merge_periods([r["metrics"] for r in everyones])
        same = repr(merged) == repr(expected)  # which also compares the order, and NaN with NaN
        same = same and (len(reports) == 1 or repr(reports) == repr(everyones))
        self.seen[name] = (collectives.seen, len(reports), same)


def play() -> dict[str, Any]:
    """All kinds of periods in a row, as one of four ranks."""
    rank = comm.get_rank()
    script = Script()
    script.step("before the first step", [], 0)
    script.step("first", period_of(0, 2, "a", "b"))
    script.step("second", period_of(2, 2, "a", "b"))
    script.step("nothing since", [], 0)
    script.step("longer", period_of(4, 7, "a", "b"), 7)
    names = ("b", "a") if rank % 2 else ("a", "b")
    script.step("in another order", period_of(11, 2, *names))
    script.step("one more", period_of(13, 2, "a", "b", *(["c"] if rank == 1 else [])))
    script.step("regular after it", period_of(15, 2, "a", "b"))
    script.step("new names", period_of(17, 2, "d"))
    script.step("regular with them", period_of(19, 2, "d"))
    script.step("one lacks an iteration", period_of(21, 1 if rank == 2 else 2, "d"))
    script.step("a stop", period_of(23, 2, "d"), stop="enough" if rank == 2 else None)
    script.step("an entry of a subclass", period_of(25, 2, "d"), mine=rank)
    not_finite = [(27, {"d": math.nan if rank == 3 else math.inf, "data_time": 0.0})]
    script.step("not finite", not_finite, 1)
    rank_reports.RANKS_IN_ORDER = 2  # this process ends with the test
    script.step("more ranks than rows", period_of(28, 2, "d", precise=False))
    script.exchange.start(0)
    script.finished = 0
    script.step("another run", period_of(0, 2, "d", precise=False))
    script.step("none have metrics any more", [])
    script.step("as before", [])
    return script.seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(play, 4)


@pytest.mark.parametrize(
    "name",
    [
        "before the first step",
        "second",
        "nothing since",
        "longer",
        "in another order",
        "regular after it",
        "regular with them",
        "not finite",
        "more ranks than rows",
    ],
)
def test_a_regular_period_is_one_sum_with_the_result_of_objects(ranks: Any, name: str) -> None:
    assert [r[name] for r in ranks] == [(REGULAR, 1, True)] * 4


@pytest.mark.parametrize("name", ["first", "another run"])
def test_the_main_process_tells_the_names_once_a_run(ranks: Any, name: str) -> None:
    assert [r[name] for r in ranks] == [(NAMES + REGULAR, 1, True)] * 4


@pytest.mark.parametrize(
    "name",
    [
        "one more",
        "new names",
        "one lacks an iteration",
        "a stop",
        "an entry of a subclass",
        "none have metrics any more",
        "as before",
    ],
)
def test_what_is_not_regular_on_one_rank_travels_in_objects_on_all(ranks: Any, name: str) -> None:
    assert [r[name] for r in ranks] == [(REGULAR + OBJECTS, 4, True)] * 4


class Model(nn.Module):
    """A loss, and metrics beside it; in some iterations one rank has one more."""

    def __init__(self, count: int = 1, odd: Callable[[int], bool] = lambda i: False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.count, self.odd, self.calls = count, odd, 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss = self.fc(x).square().mean()
        losses = {f"loss_{i}": loss / (comm.get_rank() + i + 1) for i in range(self.count)}
        if self.odd(self.calls) and comm.get_rank() == 1:
            losses["odd"] = loss * 3
        self.calls += 1
        return losses


class InObjects(SimpleTrainer):
    """One whose subclass has more to tell, so that nothing travels in sums."""

    def rank_report(self) -> dict[str, Any]:
        return {**super().rank_report(), "mine": comm.get_rank()}

    def merge_reports(self, reports: list[dict[str, Any]]) -> None:
        assert [report["mine"] for report in reports] == list(range(comm.get_world_size()))
        super().merge_reports(reports)


def histories(kind: type[SimpleTrainer]) -> dict[str, Any]:
    torch.manual_seed(comm.get_rank())
    model = Model(2, odd=lambda i: 8 <= i < 11)
    trainer = kind(model, batches(4), sgd(model), gather_metric_period=4)

    def in_between(_: Any) -> None:
        if trainer.iter == 17:
            trainer.prepare_checkpoint()
        if trainer.iter == 21 and comm.get_rank() == 1:
            trainer.request_stop("enough")

    trainer.register_hooks([CallbackHook(after_step=in_between)])
    trainer.train(0, 6)
    trainer.train(max_iter=40)
    values = {name: h.values() for name, h in trainer.storage.histories().items()}
    return {name: v for name, v in values.items() if "data_time" not in name}


def run_both_ways() -> tuple[dict[str, Any], dict[str, Any]]:
    return histories(SimpleTrainer), histories(InObjects)


def test_a_run_has_the_same_metrics_whether_they_travel_in_sums_or_in_objects() -> None:
    (sums, objects), (sums_of_1, objects_of_1) = run_ranks(run_both_ways, 2)
    assert sums == objects == sums_of_1 == objects_of_1
    assert [i for _, i in sums["odd"]] == [8, 9, 10]
    assert [i for _, i in sums["loss_1"]] == list(range(24))


@pytest.fixture
def many_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process takes itself for the main one of 4,096; the others send zeros, or nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    monkeypatch.setattr(comm, "_object_group", lambda: dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("many_ranks")
@pytest.mark.parametrize("count", [1, 100])
def test_4096_ranks_need_one_collective_a_period_whatever_they_record(count: int) -> None:
    seen: dict[int, list[str]] = {}
    model = Model(count)
    trainer = SimpleTrainer(model, batches(4), sgd(model), gather_metric_period=5)
    with Collectives() as collectives:

        def note(_: Any) -> None:
            seen[trainer.iter], collectives.seen = collectives.seen, []

        trainer.register_hooks([IterationTimer(), CallbackHook(after_step=note)])
        trainer.train(0, 20)
    # Before the first step: the names of the hooks, and a stop that was asked for already.
    assert seen.pop(0) == [*NAMES, "allreduce_", "allreduce_"]
    assert seen.pop(4) == NAMES + REGULAR
    assert seen == {i: REGULAR if i % 5 == 4 else [] for i in range(20) if i not in (0, 4)}
    assert [i for _, i in trainer.storage.history("total_loss").values()] == list(range(20))


@pytest.mark.usefixtures("many_ranks")
def test_an_agreement_that_nothing_failed_is_one_sum_of_one_number() -> None:
    with Collectives() as collectives:
        assert on_all_ranks(lambda: 3) == 3
    assert collectives.seen == REGULAR


def test_a_random_state_that_was_saved_unpacked_is_restored_too() -> None:
    rng = RankRng()
    for take in (get_rng_state, lambda: rng.state_dict()[0]):
        state = take()
        expected = torch.rand(3)
        rng.load_state_dict({0: state})
        rng.restore(0)
        assert torch.equal(torch.rand(3), expected)


def hooks_and_rng() -> tuple[frozenset[str], frozenset[str], list[int], list[int]]:
    alike = hooks_of_some_ranks(["a", "b"], 20)
    partial = hooks_of_some_ranks(["a", "b", "c"] if comm.get_rank() == 1 else ["a", "d"], 20)
    with pytest.raises(ValueError, match=r"the same on all ranks, but is \[20, 21\]"):
        hooks_of_some_ranks(["a"], 20 + comm.get_rank())
    rng = RankRng()
    rng.gather()
    return alike, partial, list(rng.state_dict()), list(rng.state_dict())


def test_only_the_main_process_gets_the_random_states_and_the_hooks_are_compared_by_all() -> None:
    partial = frozenset("bcd")
    assert run_ranks(hooks_and_rng, 2) == [
        (frozenset(), partial, [0, 1], [0]),
        (frozenset(), partial, [1], [1]),
    ]
