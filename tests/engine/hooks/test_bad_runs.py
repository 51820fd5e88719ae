import copy
import faulthandler
import logging
import math
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.engine import SimpleTrainer, StepTrainer, hooks
from hooktrain.engine.hooks import CallbackHook, Watchdog
from hooktrain.engine.hooks.bad_runs import EXIT_HUNG, report_hang, write_flight_record
from hooktrain.engine.losses import WHERE_IT_BEGINS
from hooktrain.evaluation import inference_on_dataset
from hooktrain.model.sharding import shard_model
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from hooktrain.strategy import create_ddp_model
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensor
from processes import wait_until
from releases import needs_records
from toys import Idle, LinearLoss, Two, batches


def data(poisoned: set[int], value: float = math.nan) -> list[Tensor]:
    factors = [value if i in poisoned else 1.0 for i in range(8)]
    return [
        batch * factor for batch, factor in zip(batches(8, 4), factors, strict=True)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def run(
    model: nn.Module,
    loader: list[Any],
    optimizer: Any = None,
    *skip: Any,
    max_iter: int = 4,
) -> SimpleTrainer:
    kind = StepTrainer if isinstance(model, Two) else SimpleTrainer
    trainer = kind(model, loader, optimizer or adam(model))
    trainer.register_hooks([hooks.SkipNonFinite(*skip)])
    trainer.train(max_iter=max_iter)
    return trainer


def train(
    poisoned: set[int], *skip: Any, value: float = math.nan, **options: Any
) -> SimpleTrainer:
    model = LinearLoss()
    wrapper = OptimWrapper(adam(model), **options)
    return run(model, data(poisoned, value=value), wrapper, *skip, max_iter=8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "clip", [None, {"max_norm": 1.0}, {"type": "value", "clip_value": 0.1}]
)
def test_a_run_goes_on_as_if_the_update_had_not_been_asked_for(
    value: float, clip: Any
) -> None:
    trainer = train({2, 5}, value=value, clip_grad=clip)
    model = LinearLoss()
    optimizer = adam(model)
    for i, batch in enumerate(data(set())):
        if i not in (2, 5):
            optimizer.zero_grad()
            model(batch).backward()
            if clip == {"max_norm": 1.0}:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif clip is not None:
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
    pairs = zip(trainer.model.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    assert [i for i, loss in enumerate(losses) if not math.isfinite(loss)] == [2, 5]
    assert trainer.optim_wrapper.skipped_updates == 2
    assert trainer.storage.history("skipped_updates").values() == [(1.0, 2), (2.0, 5)]


def test_too_many_in_a_row_raise() -> None:
    train({1, 2, 4, 5}, 2)
    with pytest.raises(FloatingPointError, match="iteration 3"):
        train({3}, 0)
    with pytest.raises(FloatingPointError, match="iteration 3") as caught:
        train({1, 2, 3}, 2)
    assert WHERE_IT_BEGINS in str(caught.value)


def test_a_scaler_skips_by_itself() -> None:
    model = LinearLoss()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapper = AmpOptimWrapper(adam(model), "float16", grad_scaler=scaler)
    run(model, data({2}), wrapper)
    assert wrapper.skipped_updates == 1
    assert wrapper.grad_scaler.get_scale() == 2.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


class Lookup(nn.Module):
    """The sum of embeddings, times a factor; its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)

    def forward(self, factor: float) -> Tensor:
        loss: Tensor = self.table(torch.tensor([1, 1, 3])).sum() * factor
        return loss


def test_sparse_gradients_are_looked_at() -> None:
    model = Lookup()
    # The squares of 1e25 are infinite in float32.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-26)
    trainer = run(model, [1e25, math.nan, 1e25, math.inf], optimizer)
    assert trainer.optim_wrapper.skipped_updates == 2
    assert model.table.weight.isfinite().all()


@pytest.mark.parametrize("counts", [1, 2])
def test_of_several_optimizers_only_the_one_concerned_skips(counts: int) -> None:
    model, before = Two(), Two()
    wrappers = OptimWrapperDict(
        one=OptimWrapper(adam(model.one)),
        two=OptimWrapper(adam(model.two), accumulative_counts=counts),
    )
    trainer = run(
        model, data({0}), wrappers, max_iter=counts
    )  # in the first pass of an accumulation
    assert not torch.equal(model.one.weight, before.one.weight)
    assert torch.equal(model.two.weight, before.two.weight)
    assert (wrappers["one"].skipped_updates, wrappers["two"].skipped_updates) == (0, 1)
    assert trainer.storage.history("two.skipped_updates").values() == [
        (1.0, counts - 1)
    ]
    trainer.train(max_iter=2 * counts)
    assert model.two.weight.isfinite().all()
    assert not torch.equal(model.two.weight, before.two.weight)


def test_a_run_without_the_hook_tolerates_nothing_that_one_with_it_did() -> None:
    trainer = train({1})
    trainer._hooks = []  # as scripts for detectron2 do
    with pytest.raises(FloatingPointError, match="iteration=1"):
        trainer.train(0, 4)


def test_a_poisoned_buffer_ends_the_run() -> None:
    with pytest.raises(FloatingPointError, match="running_mean is nan") as caught:
        run(nn.Sequential(nn.BatchNorm1d(4), LinearLoss()), data({1}))
    assert WHERE_IT_BEGINS in str(caught.value)
    model = LinearLoss()
    model.register_forward_hook(lambda module, _, loss: loss + math.inf)
    with pytest.raises(FloatingPointError, match="iteration=0"):
        run(model, data(set()))


def two_ranks(kind: str, poisoned_rank: int) -> tuple[list[Tensor], int, list[float]]:
    model: Any = LinearLoss()
    model = create_ddp_model(model) if kind == "ddp" else shard_model(model)
    mine = {2} if comm.get_rank() == poisoned_rank else set()
    trainer = SimpleTrainer(model, data(mine), adam(model), gather_metric_period=4)
    trainer.register_hooks([hooks.SkipNonFinite()])
    trainer.train(max_iter=8)
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    weights = [full_tensor(parameter).clone() for parameter in model.parameters()]
    return weights, trainer.optim_wrapper.skipped_updates, losses


@pytest.mark.parametrize(("kind", "poisoned_rank"), [("ddp", 1), ("fsdp", 0)])
def test_all_ranks_skip_what_one_has_poisoned(kind: str, poisoned_rank: int) -> None:
    alone = train({2})
    for weights, skipped, losses in run_ranks(two_ranks, 2, kind, poisoned_rank):
        # Both ranks have the same data but for the poison: the means are those of one.
        pairs = zip(weights, alone.model.parameters(), strict=True)
        assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in pairs)
        assert skipped == 1
        assert [i for i, loss in enumerate(losses) if not math.isfinite(loss)] == [2]


def one_accumulation_is_open(folder: str) -> int:
    """Rank 1 poisons the accumulation of one optimizer while the other one updates."""
    model = Two()
    for name in ("one", "two"):
        setattr(model, name, create_ddp_model(getattr(model, name)))
    wrappers = OptimWrapperDict(
        one=OptimWrapper(adam(model.one)),
        two=OptimWrapper(adam(model.two), accumulative_counts=2),
    )
    mine = {0} if comm.get_rank() == 1 else set()
    trainer = StepTrainer(model, data(mine), wrappers, gather_metric_period=4)
    trainer.register_hooks([hooks.SkipNonFinite()])
    trainer.train(max_iter=4)
    return wrappers["two"].skipped_updates


def test_gradients_of_an_open_accumulation_are_not_looked_at(tmp_path: Path) -> None:
    assert run_ranks(one_accumulation_is_open, 2, str(tmp_path)) == [1, 1]


def with_spikes(at: set[int]) -> SimpleTrainer:
    """A trainer of 40 like batches, in each process; those of the last rank may spike."""
    model = LinearLoss()
    wrapped: nn.Module = model
    if comm.get_world_size() > 1:
        wrapped = create_ddp_model(model)
    here = at if comm.get_rank() == comm.get_world_size() - 1 else set()
    data = [batches(1)[0] * (10 if i in here else 1) for i in range(40)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    trainer = SimpleTrainer(wrapped, data, optimizer, gather_metric_period=7)
    trainer.register_hooks([hooks.SkipNonFinite(3, max_ratio=5)])
    return trainer


def skipped_on_ranks() -> tuple[list[Any], Tensor]:
    trainer = with_spikes({4, 30})
    trainer.train(max_iter=34)
    skipped = trainer.storage.history("skipped_updates").values()
    return skipped, trainer.model.module.fc.weight.detach()


def test_a_spike_of_the_loss_is_skipped_by_all_ranks_alike() -> None:
    trainer = with_spikes({4, 30})
    trainer.train(max_iter=25)
    state = copy.deepcopy(trainer.state_dict())
    middle = copy.deepcopy(trainer.model.state_dict())
    trainer.train(max_iter=34)
    # In iteration 4 nothing tells what is high.
    assert trainer.storage.history("skipped_updates").values() == [(1.0, 30)]
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    assert losses[30] > 50 * losses[29] > 50 * losses[31] > 0
    resumed = with_spikes({4, 30})
    resumed.model.load_state_dict(middle)
    resumed.load_state_dict(state)
    resumed.train(max_iter=34)
    assert torch.equal(resumed.model.fc.weight, trainer.model.fc.weight)
    (skipped, first), (by_other, second) = run_ranks(skipped_on_ranks, 2)
    assert skipped == by_other == [(1.0, 30)]
    assert torch.equal(first, second)


def test_a_loss_that_stays_high_ends_the_run() -> None:
    with pytest.raises(FloatingPointError, match="iteration 33"):
        with_spikes(set(range(30, 40))).train(max_iter=40)


def test_an_impossible_ratio_or_step_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_ratio.*: 1"):
        hooks.SkipNonFinite(max_ratio=1)
    model = Two()
    wrappers = OptimWrapperDict(
        one=OptimWrapper(adam(model.one)), two=OptimWrapper(adam(model.two))
    )
    with pytest.raises(ValueError, match="run_step"):
        run(model, data(set()), wrappers, 20, 3.0)


# The watchdog

CALM_SECONDS = 30.0


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The codes by which the watchdog would have ended the process."""
    codes: list[int] = []
    monkeypatch.setattr("hooktrain.engine.hooks.bad_runs.os._exit", codes.append)
    no_time = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr("hooktrain.utils.timer.time", no_time)
    yield codes
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_limit_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"got {seconds}"):
        Watchdog(seconds)


def test_a_hang_ends_the_process_with_the_stack_of_every_thread(
    exits: list[int],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def a_place_to_hang(trainer: Any) -> None:
        if trainer.iter == 3:
            wait_until(lambda: exits)

    caplog.set_level(logging.DEBUG)
    Idle(Watchdog(0.05), CallbackHook(after_backward=a_place_to_hang)).train(0, 5)
    assert exits == [EXIT_HUNG] == [124]
    printed = capfd.readouterr().err
    assert printed.count("rank 0 has made no progress for 0.05 s") == 1
    assert "rank 0 has made no progress for 0.05 s" in caplog.text
    assert "in a_place_to_hang" in printed
    assert "bad_runs.py" in printed  # the watchdog's own thread


@pytest.mark.parametrize("fail_at", [-1, 1])
def test_the_thread_ends_with_the_run(fail_at: int, exits: list[int]) -> None:
    with pytest.raises(ValueError, match="broken") if fail_at > 0 else nullcontext():
        Idle(Watchdog(CALM_SECONDS), fail_at=fail_at).train(0, 3)
    assert exits == []
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


class Looks:
    """In place of the event that the thread waits for: lets it look so many times."""

    def __init__(self, meanwhile: list[Callable[[], object]]) -> None:
        self.meanwhile = iter(meanwhile)

    def wait(self, _: float) -> bool:
        step = next(self.meanwhile, None)
        if step is not None:
            step()
        return step is None


def watch(*meanwhile: Callable[[], object], first_s: float = 0) -> None:
    watchdog = Watchdog(8.0, first_s)  # four looks
    watchdog._end = Looks([*meanwhile])  # type: ignore[assignment]
    watchdog._watch()


def test_each_batch_of_an_evaluation_is_progress(exits: list[int]) -> None:
    def nothing() -> None:
        pass

    def evaluate() -> None:
        inference_on_dataset(abs, [1], None)

    watch(*[nothing] * 3, evaluate, *[nothing] * 3)
    assert exits == []
    watch(*[nothing] * 4)
    assert exits == [EXIT_HUNG]


def test_the_first_iteration_may_take_longer(exits: list[int]) -> None:
    def nothing() -> None:
        pass

    watch(*[nothing] * 5, first_s=12.0)
    assert exits == []
    watch(*[nothing] * 6, first_s=12.0)
    assert exits == [EXIT_HUNG]
    watchdog = Watchdog(8.0, first_s=12.0)
    limits: list[float] = []
    look = CallbackHook(before_step=lambda _: limits.append(watchdog._limit_s))
    Idle(watchdog, look).train(0, 3)
    assert limits == [12.0, 8.0, 8.0]


def test_a_process_that_was_suspended_does_not_seem_to_hang(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def years_pass() -> None:
        monkeypatch.setattr(time, "monotonic", lambda: 1e9)

    watch(years_pass)
    assert exits == []


def print_where_it_hangs(folder: Path) -> None:
    rank = comm.get_rank()
    with open(folder / str(rank), "w") as printed:
        os.dup2(printed.fileno(), 2)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "collectives_")
    dist.all_reduce(torch.zeros(3, 5))
    if rank < 4:
        place = "waits" if rank != 1 else "hangs"
        report_hang("stands", f"Thread (most recent call first):\n in {place}", 2.0)
    comm.synchronize()


@needs_records
def test_ranks_that_hang_at_one_place_print_it_once_with_who_is_there(
    tmp_path: Path,
) -> None:
    run_ranks(print_where_it_hangs, 5, tmp_path)
    printed = "".join(path.read_text() for path in tmp_path.glob("?"))
    assert printed.count("rank 1 stands") == 1
    assert printed.count(" in waits") == printed.count(" in hangs") == 1
    assert "rank 1 stands, as do [1], not here: [0, 2, 3, 4]" in printed
    assert re.search(r"as do \[[023], [023], [023]\], not here: \[1, 4\]", printed)
    assert f"Its collectives: {tmp_path}/collectives_1. Its threads" in printed
    for rank in range(4):
        record = pickle.loads((tmp_path / f"collectives_{rank}").read_bytes())
        (entry,) = record["entries"]
        assert entry["profiling_name"] == "gloo:all_reduce"
        assert entry["input_sizes"] == [[3, 5]]


def test_the_flight_record_is_that_of_nccl_also_beside_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    recorders: Any = torch._C._distributed_c10d
    monkeypatch.setattr(recorders, "_dump_nccl_trace", lambda: b"nccl", raising=False)
    monkeypatch.setattr(recorders, "_dump_fr_trace", lambda: b"gloo", raising=False)
    for config in ("cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:gloo,cuda:gloo"):
        monkeypatch.setattr(dist, "get_backend_config", lambda config=config: config)
        record = Path(write_flight_record()).read_bytes()
        assert record == (b"nccl" if "nccl" in config else b"gloo")
