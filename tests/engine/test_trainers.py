"""The steps of the trainers against loops written by hand, and what they save."""

import copy
import errno
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from collectives import Collectives
from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, checkpointer
from hooktrain.checkpoint.files import write_file
from hooktrain.data import build_train_loader
from hooktrain.engine import (
    AMPTrainer,
    HookBase,
    SimpleTrainer,
    StepTrainer,
    create_ddp_model,
    hooks,
)
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hooktrain.evaluation import inference_on_dataset
from hooktrain.events import EventStorage, JSONWriter
from hooktrain.model import SeparateDistributedDataParallel
from hooktrain.model.sharding import shard_model
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from hooktrain.utils import comm
from hooktrain.utils.env import seed_step
from hooktrain.utils.tensors import local_tensor
from toys import (
    LinearLoss,
    Net,
    StopOnce,
    Stream,
    batches,
    linear_trainer,
    net_trainer,
    sgd,
)


@pytest.mark.parametrize("zero_first", [False, True])
def test_training_equals_a_loop_written_by_hand_bit_for_bit(zero_first: bool) -> None:
    trainer = net_trainer(zero_grad_before_forward=zero_first)
    trainer.seed = 3
    trainer.train(0, 4)
    model, losses = Net(), []
    optimizer = sgd(model)
    for iteration, batch in enumerate(batches(4)):
        seed_step(3, iteration, rank=0)
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), iteration))
    assert trainer.storage.history("total_loss").values() == losses
    assert torch.equal(trainer.model.fc.weight, model.fc.weight)


class Bandit(SimpleTrainer):
    """Learns by REINFORCE which of four arms pays; each draws its own data."""

    def compute_loss(self, data: None) -> dict[str, Tensor]:
        chances = self.model.fc.weight[0].log_softmax(0)
        arms = torch.multinomial(chances.exp(), 16, replacement=True)
        rewards = (arms == 2).float() + torch.rand(16)
        return {"loss": -(chances[arms] * rewards).mean(), "reward": rewards.mean()}


def bandit(folder: Path) -> tuple[Bandit, Checkpointer]:
    model = LinearLoss()
    trainer = Bandit(model, None, sgd(model))
    trainer.seed = 5
    saver = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, 3)])
    return trainer, saver


def test_a_step_without_a_loader_goes_on_as_if_never_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = bandit(tmp_path / "whole")
    whole.train(max_iter=9)
    rewards = whole.storage.history("reward").values()
    assert len({value for value, _ in rewards}) == 9
    stopped, _ = bandit(tmp_path / "parts")
    stopped.register_hooks([StopOnce(5)])
    with pytest.raises(KeyboardInterrupt):
        stopped.train(max_iter=9)
    resumed, saver = bandit(tmp_path / "parts")
    saver.resume_or_load("")
    assert resumed.done == 3
    resumed.train(max_iter=9)
    assert resumed.storage.history("reward").values() == rewards
    assert torch.equal(resumed.model.fc.weight, whole.model.fc.weight)
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_what_needs_a_loader_says_so(tmp_path: Path) -> None:
    trainer, _ = bandit(tmp_path)
    with pytest.raises(ValueError, match=r"'2 epochs'.*trainer\.epoch_length"):
        trainer.train(max_epochs=2)
    model = LinearLoss()
    with pytest.raises(TypeError, match="NoneType") as caught:
        SimpleTrainer(model, None, sgd(model)).train(max_iter=1)
    if hasattr(caught.value, "__notes__"):  # from Python 3.11 on
        assert "compute_loss(data)" in caught.value.__notes__[0]


def test_a_trainer_has_so_few_attributes_that_python_finds_each_at_once() -> None:
    trainer = net_trainer()
    trainer.train(0, 2)
    # Up to 30 attributes have fixed places; with more a step takes some thousand instructions more.
    # Two are left for a subclass.
    assert len(vars(trainer)) <= 28


def test_a_prefix_stands_before_every_name() -> None:
    trainer = net_trainer()
    with trainer.storage:
        trainer._write_metrics({"loss_x": 1.0}, 0.5, prefix="gan/")
    assert {"gan/loss_x", "gan/total_loss"} <= set(trainer.storage.latest())


def test_a_total_of_a_step_of_ones_own_is_recorded_as_it_is() -> None:
    trainer = net_trainer()
    trainer._write_metrics({"loss_a": 1.0, "total_loss": torch.tensor(2.5)}, 0.5)
    expected = {"loss_a": 1.0, "total_loss": 2.5, "data_time": 0.5}
    latest = trainer.storage.latest()
    assert {name: value for name, (value, _) in latest.items()} == expected
    with pytest.raises(FloatingPointError):
        trainer._write_metrics({"loss_a": 1.0, "total_loss": math.nan}, 0.5)


def test_a_step_of_ones_own_records_its_losses_and_its_wait_for_all_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []
    written: list[Any] = []

    class TwoBatches(SimpleTrainer):
        def run_step(self) -> None:
            pair = [self.next_batch(), self.next_batch()]
            seen.extend(pair)
            losses = list(map(self.compute_loss, pair))
            self.optim_wrapper.zero_grad()
            sum(losses).backward()  # type: ignore[union-attr]
            self.after_backward()
            self.record_losses({"one": losses[0], "two": losses[1]})
            self.optimizer.step()

        def _write_metrics(self, loss_dict: Any, data_time: float, *more: Any) -> None:
            written.append((list(loss_dict), data_time))
            super()._write_metrics(loss_dict, data_time, *more)

        def prepare_batch(self, data: Any) -> Any:
            return -super().prepare_batch(data)

    times = (i**2 for i in range(100))
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("hooktrain.data.batches.time", clock)
    model, given = Net(), batches(4)
    trainer = TwoBatches(model, given, sgd(model))
    trainer.train(0, 2)
    assert [float(batch[0, 0]) for batch in seen] == [-float(b[0, 0]) for b in given]
    # From 0 to 1 and from 4 to 9, then from 16 to 25 and from 36 to 49.
    assert written == [(["one", "two"], 6), (["one", "two"], 22)]
    assert trainer.storage.history("data_time").values() == [(6.0, 0), (22.0, 1)]


class WeighsEach(SimpleTrainer):
    """Takes all batches of an iteration before the first pass."""

    def weight(self, data: Tensor) -> int:
        return len(data)


def test_the_wait_for_batches_that_are_weighted_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = (i**2 for i in range(100))
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("hooktrain.data.batches.time", clock)
    model = Net()
    trainer = WeighsEach(model, batches(4), OptimWrapper(sgd(model), 2))
    trainer.train(0, 1)
    # From 0 to 1, and from 4 to 9.
    assert trainer.storage.history("data_time").values() == [(6.0, 0)]


LOSS = torch.ones((), requires_grad=True)
HALF = torch.tensor(0.5)


class OutputWithLoss(dict[str, Tensor]):
    """As Hugging Face's: entries, and attributes that the class declares."""

    loss = LOSS


@pytest.mark.parametrize(
    ("output", "recorded"),
    [
        (LOSS, {"total_loss": 1}),
        ({"a": LOSS, "b": LOSS}, {"total_loss": 2, "a": 1, "b": 1}),  # detectron2's
        (
            {"loss": LOSS, "accuracy": HALF},
            {"total_loss": 1, "loss": 1, "accuracy": 0.5},
        ),
        (
            {"loss_a": LOSS, "loss_frozen": HALF},
            {"total_loss": 1, "loss_a": 1, "loss_frozen": 0.5},
        ),
        (OutputWithLoss(loss=LOSS, logits=torch.ones(2, 2)), {"total_loss": 1}),
        (SimpleNamespace(loss=LOSS, logits=torch.ones(2, 2)), {"total_loss": 1}),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_only_losses_are_added_up(
    output: Any, recorded: dict[str, float], count: int
) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return output

    model = Model()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=count)
    trainer = SimpleTrainer(model, batches(1), wrapper)
    trainer.train(0, 1)
    latest = {name: value for name, (value, _) in trainer.storage.latest().items()}
    assert {**latest, "data_time": 0} == {**recorded, "data_time": 0}
    assert LOSS.grad == recorded["total_loss"]
    LOSS.grad = None


class LossesOfEachBatch(LinearLoss):
    """The second batch has no boxes, and so no gradient of their loss."""

    def forward(self, x: Tensor) -> Any:
        of_class = super().forward(x)
        if len(x) == 1:
            return {"loss_cls": of_class, "loss_box": torch.zeros(())}
        return {"loss_cls": of_class, "loss_box": 2 * of_class}


def test_the_total_of_passes_of_which_one_lacks_a_gradient_is_what_was_trained() -> (
    None
):
    model = LossesOfEachBatch()
    first, second = (LinearLoss()(batches(1, size)[0]).item() for size in (2, 1))
    wrapper = OptimWrapper(sgd(model), accumulative_counts=2)
    parts = [batches(1, size)[0] for size in (2, 1)]
    trainer = SimpleTrainer(model, parts, wrapper)
    trainer.train(0, 1)
    latest = trainer.storage.latest()
    assert latest["total_loss"][0] == pytest.approx((3 * first + second) / 2)
    assert latest["loss_box"][0] == pytest.approx(first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_means_over_passes_are_no_coarser_than_float32(dtype: torch.dtype) -> None:
    class Coarse(LinearLoss):
        def forward(self, x: Tensor) -> Tensor:
            return (0 * super().forward(x) + 0.7734375).to(dtype)

    model = Coarse()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=100)
    trainer = SimpleTrainer(model, batches(100), wrapper)
    trainer.train(0, 1)
    mean = trainer.storage.latest()["total_loss"][0]
    assert mean == pytest.approx(0.7734375, rel=1e-5)


class WithFrozenParts(LinearLoss):
    """A BatchNorm and a teacher in evaluation mode, as the whole model may be."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.teacher = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
        for part in [self] if whole else [self.bn, self.teacher]:
            part.eval()
        self.teacher.requires_grad_(False)
        self.bn.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(self.bn(x)) - self.teacher(x)).square().mean()


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def trained_with_frozen_parts() -> tuple[list[bool], list[bool], int]:
    model = WithFrozenParts()
    before = modes(model)
    trainer = SimpleTrainer(create_ddp_model(model), batches(4), sgd(model.fc))

    def evaluate() -> dict[str, float]:
        inference_on_dataset(trainer.model, batches(1), None)
        return {"x": 1.0}

    trainer.register_hooks([EvalHook(2, evaluate)])
    trainer.train(0, 4)
    return before, modes(model), int(model.bn.num_batches_tracked or 0)


def test_layers_in_evaluation_mode_stay_there_and_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for before, after, tracked in [
        trained_with_frozen_parts(),
        *run_ranks(trained_with_frozen_parts, 2),
    ]:
        assert before == after == [True, True, False, False, False, False]
        assert tracked == 0
    assert caplog.text.count("['bn', 'teacher']") == 1


def modes_of_a_whole() -> list[bool]:
    found = []
    for wrap in (create_ddp_model, SeparateDistributedDataParallel):
        if wrap is create_ddp_model or comm.get_world_size() > 1:
            model = WithFrozenParts(whole=True)
            SimpleTrainer(wrap(model), batches(4), sgd(model))
            found += modes(model)
    return found


def test_a_model_in_evaluation_mode_as_a_whole_is_put_into_training_mode() -> None:
    assert all(modes_of_a_whole())
    assert all(map(all, run_ranks(modes_of_a_whole, 2)))


def test_a_model_of_which_only_a_child_trains_is_refused_in_the_first_step() -> None:
    model = WithFrozenParts(whole=True)
    model.fc.train()
    trainer = SimpleTrainer(model, batches(4), sgd(model))
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        trainer.train(0, 1)
    assert not model.bn.training


def poisoned(count: int, at: int) -> list[torch.Tensor]:
    data = batches(count)
    data[at][0, 0] = math.nan
    return data


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update() -> None:
    trainer = net_trainer(poisoned(3, at=1))
    with pytest.raises(FloatingPointError, match="iteration=1"):
        trainer.train(0, 3)
    assert trainer.model.fc.weight.isfinite().all()
    assert trainer.state_dict()["iteration"] == 0


def test_the_error_of_a_bad_loss_names_two_ways_on_that_work(tmp_path: Path) -> None:
    samples = batches(1, 24)[0]
    samples[5, 0] = math.nan

    def resumed(*more: HookBase) -> SimpleTrainer:
        model = LinearLoss()
        loader = build_train_loader(list(samples), total_batch_size=4, seed=0)  # type: ignore[arg-type]
        trainer = SimpleTrainer(model, loader, sgd(model))
        checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
        trainer.register_hooks([*more, PeriodicCheckpointer(checkpointer, 1)])
        checkpointer.resume_or_load("", resume=True)
        trainer.train(max_iter=6)
        return trainer

    with pytest.raises(FloatingPointError) as caught:
        resumed()
    assert r"hooks.SkipNonFinite()" in str(caught.value)
    assert r"torch.autograd.set_detect_anomaly(True)" in str(caught.value)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="PowBackward0"),
        pytest.raises(RuntimeError, match="PowBackward0"),
    ):
        resumed()
    assert resumed(hooks.SkipNonFinite()).optim_wrapper.skipped_updates == 1


def test_no_checkpoint_can_be_made_of_a_poisoned_state() -> None:
    trainer = net_trainer(poisoned(3, at=1), async_write_metrics=True)
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.state_dict())])
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        trainer.train(0, 9)
    assert trainer.iter == 1


def test_metrics_go_to_the_trainers_storage_whatever_storage_is_open_around() -> None:
    class Nested(HookBase):
        def after_backward(self) -> None:
            self.inner = EventStorage()
            self.inner.__enter__()

        def after_step(self) -> None:
            self.inner.__exit__(None, None, None)

    trainer = net_trainer()
    trainer.register_hooks([Nested()])
    trainer.train(0, 2)
    assert len(trainer.storage.history("total_loss").values()) == 2


@pytest.mark.parametrize(("accumulated", "expected"), [(1, 12), (2, 6), (3, 6)])
def test_max_epochs_counts_epochs_of_whole_iterations_from_the_beginning(
    accumulated: int, expected: int
) -> None:
    model = Net()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=accumulated)
    trainer = SimpleTrainer(model, batches(4), wrapper)
    trainer.train(0, 2)
    trainer.train(max_epochs=3)
    assert trainer.start_iter == 2
    assert trainer.iter == expected


def test_epochs_of_a_loader_without_a_length_need_one() -> None:
    trainer = net_trainer(Stream())
    with pytest.raises(ValueError, match="'2 epochs'"):
        trainer.train(max_epochs=2)
    trainer.epoch_length = 5
    trainer.train(max_epochs=1.5)
    assert trainer.iter == 8


def test_the_period_of_an_exchange_may_be_an_epoch() -> None:
    assert net_trainer(gather_metric_period="1 epoch").sync_period == 4


def test_the_length_of_an_epoch_follows_the_loader_and_the_accumulation() -> None:
    model = LinearLoss()
    trainer = SimpleTrainer(model, batches(8), OptimWrapper(sgd(model)))
    assert trainer.epoch_length == 8
    evaluated: list[int] = []

    def change(trainer: Any) -> None:
        if trainer.iter == 8:
            trainer.data_loader = batches(4)
        if trainer.iter == 16:
            trainer.optim_wrapper.accumulative_counts = 2

    def note() -> dict[str, float]:
        evaluated.append(trainer.done)
        return {"x": 1.0}

    trainer.register_hooks(
        [CallbackHook(before_step=change), EvalHook("1 epoch", note)]
    )
    trainer.train(max_iter=20)
    assert evaluated == [8, 12, 16, 18, 20]
    trainer.epoch_length = 5
    trainer.data_loader = batches(7)
    assert trainer.epoch_length == 5
    stream = SimpleTrainer(model, (batch for batch in batches(2)), sgd(model))
    assert stream.epoch_length is None


def epochs_of_uneven_ranks() -> Any:
    model = LinearLoss()
    loader = batches(4 + comm.get_rank())
    trainer = SimpleTrainer(create_ddp_model(model), loader, sgd(model))
    trainer.train(0, 1)
    agreed = trainer.epoch_length
    trainer.data_loader = batches(2)
    return agreed, trainer.epoch_length


def test_ranks_take_the_length_of_the_main_process_epoch() -> None:
    assert run_ranks(epochs_of_uneven_ranks, 2) == [(4, 2)] * 2


def test_an_iteration_takes_as_many_batches_as_the_wrapper_accumulates() -> None:
    model, reference = Net().eval(), Net().eval()
    model.dropout.p = reference.dropout.p = 0.0
    trainer = SimpleTrainer(
        model, batches(6), OptimWrapper(sgd(model), accumulative_counts=3)
    )
    trainer.train(0, 2)
    optimizer, losses = sgd(reference), []
    for first in (0, 3):
        for batch in batches(6)[first : first + 3]:
            loss = reference(batch) / 3
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.fc.weight, reference.fc.weight)
    means = [sum(losses[:3]), sum(losses[3:])]
    got = [v for v, _ in trainer.storage.history("total_loss").values()]
    assert got == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amp_trainer_equals_autocast_by_hand_bit_for_bit(dtype: torch.dtype) -> None:
    model, reference = Net(), Net()
    trainer = AMPTrainer(
        model, batches(3), sgd(model), precision=dtype, log_grad_scaler=True
    )
    trainer.seed = 3
    trainer.train(0, 3)
    optimizer = sgd(reference)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    scales = []
    for iteration, batch in enumerate(batches(3)):
        seed_step(3, iteration, rank=0)
        with torch.autocast("cpu", dtype):
            loss = reference(batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(model.fc.weight, reference.fc.weight)
    assert trainer.grad_scaler.is_enabled() == (dtype == torch.float16)
    logged = trainer.storage.history("[metric]grad_scaler").values()
    assert [scale for scale, _ in logged] == scales


def test_the_scale_is_recorded_without_waiting_for_the_device(
    transfers: list[int],
) -> None:
    model = Net()
    adam = torch.optim.Adam(model.parameters(), fused=True)
    trainer = AMPTrainer(model, batches(3), adam, log_grad_scaler=True)
    seen = []

    def look(_: object) -> None:
        seen.append(len(transfers))

    trainer.register_hooks([CallbackHook(after_backward=look)])
    trainer.train(0, 3)
    assert seen == [seen[0]] * 3
    scales = [
        scale for scale, _ in trainer.storage.history("[metric]grad_scaler").values()
    ]
    assert scales == [65536.0, 32768.0, 32768.0]  # the first one overflows


class OutsideLoss(SimpleTrainer):
    def compute_loss(self, data: Tensor) -> Any:
        return {"loss": self.model(data).square().mean(), "first": data[0, 0]}


def weights_by_a_loss(outside: bool) -> list[float]:
    """Two updates of bfloat16 and two batches, by a loss in the model or outside of it."""
    whole = LinearLoss()
    model: nn.Module = whole.fc if outside else whole
    data = batches(4 + comm.get_rank())[-4:]
    wrapper = AmpOptimWrapper(sgd(whole), "bfloat16", accumulative_counts=2)
    if comm.get_world_size() > 1:
        model = DistributedDataParallel(model)
    trainer = (OutsideLoss if outside else SimpleTrainer)(model, data, wrapper)
    steps: list[Any] = []
    trainer.register_hooks([CallbackHook(after_backward=steps.append)])
    trainer.train(0, 2)
    assert len(steps) == 2
    assert {"total_loss"} <= set(trainer.storage.latest())
    return whole.fc.weight.flatten().tolist()


def test_compute_loss_replaces_the_call_of_the_model_alone() -> None:
    alone = weights_by_a_loss(outside=True)
    assert alone == weights_by_a_loss(outside=False)
    first, second = run_ranks(weights_by_a_loss, 2, True)
    assert first == second != alone
    assert run_ranks(weights_by_a_loss, 2, False) == [first] * 2


class MeanOfRows(SimpleTrainer):
    """Its loss is a mean over the rows of a batch, of which there may be none."""

    def compute_loss(self, data: Tensor) -> Any:
        squares = self.model(data).square().sum()
        rows = max(len(data), 1)
        return {"loss": squares / rows, "first": data[:, 0].sum().detach() / rows}


class Weighted(MeanOfRows):
    def weight(self, data: Tensor) -> Any:
        return len(data) if len(data) % 2 else torch.tensor([len(data)])


def update_by_parts(
    kind: type[SimpleTrainer], sizes: list[list[int]], seen: list[str] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """One update by batches of these sizes of 16 rows; a list a rank, in one batch a pass."""
    whole = batches(1, size=16)[0][: sum(map(sum, sizes))]
    every = iter(whole.split([size for of_rank in sizes for size in of_rank]))
    parts = [[next(every) for _ in of_rank] for of_rank in sizes][comm.get_rank()]
    model: nn.Module = LinearLoss().fc
    bare = model
    if comm.get_world_size() > 1:
        model = DistributedDataParallel(model)
    wrapper = OptimWrapper(sgd(bare), accumulative_counts=len(parts))
    trainer = kind(model, parts, wrapper)
    collectives = Collectives()
    around = CallbackHook(
        before_step=lambda _: collectives.__enter__(),
        after_backward=lambda _: collectives.__exit__(None, None, None),
    )
    trainer.register_hooks([around])
    trainer.train(0, 1)
    if seen is not None:
        seen += collectives.seen
    latest = trainer.storage.latest()
    return bare.weight.detach(), {n: latest[n][0] for n in ("loss", "first")}


def weighted_on_ranks() -> list[Any]:
    results: list[Any] = []
    for sizes in ([[3], [13]], [[5, 4], [0, 7]]):
        seen: list[str] = []
        results.append((*update_by_parts(Weighted, sizes, seen), seen))
    seen = []
    equal = [[4, 4], [4, 4]]
    plain = update_by_parts(MeanOfRows, equal, seen)
    weighted = update_by_parts(Weighted, equal)
    results.append((torch.equal(plain[0], weighted[0]), plain[1] == weighted[1], seen))
    return results


def test_batches_of_unequal_weights_train_as_one_large_batch() -> None:
    expected, values = update_by_parts(MeanOfRows, [[16]])
    plain, _ = update_by_parts(MeanOfRows, [[3, 13]])
    assert not torch.allclose(plain, expected, rtol=1e-3)
    for sizes in ([16], [3, 13], [1, 0, 10, 5]):
        weight, got = update_by_parts(Weighted, [sizes])
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
        assert got == pytest.approx(values, rel=1e-6)
    for unequal, accumulated, equal in run_ranks(weighted_on_ranks, 2):
        for weight, got, seen in (unequal, accumulated):
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
            assert got == pytest.approx(values, rel=1e-6)
            # A sum of the weights, and one of the gradients.
            assert seen.count("allreduce_") == 2
        # Without a weight, or with equal ones, the bits are the same.
        assert equal[:2] == (True, True)
        assert equal[2].count("allreduce_") == 1


def test_iterations_whose_weights_are_all_0_change_nothing_and_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    update_by_parts(Weighted, [[0, 3]])
    assert "0 for all batches" not in caplog.text
    weight, values = update_by_parts(Weighted, [[0, 0]])
    assert values == {"loss": 0, "first": 0}
    assert torch.equal(weight, LinearLoss().fc.weight)
    assert caplog.text.count("0 for all batches") == 1


@pytest.mark.parametrize(
    ("weight", "shown"),
    [
        (-1, "-1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (torch.ones(2), r"tensor\(\[1., 1.\]\)"),
        ([1, 2], r"\[1, 2\]"),
        (None, "None"),
    ],
)
def test_a_weight_that_is_no_weight_is_refused(weight: Any, shown: str) -> None:
    model = LinearLoss()
    kind = type("BadWeight", (SimpleTrainer,), {"weight": lambda self, data: weight})
    with pytest.raises(ValueError, match=f"weight.*at least 0.*{shown}"):
        kind(model, batches(2), sgd(model)).train(0, 1)


@pytest.mark.parametrize("name", ["weight", "compute_loss"])
def test_a_step_trainer_refuses_what_only_the_other_one_calls(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} .*train_step"):
        type("Mine", (StepTrainer,), {name: lambda self, data: 1})
    own = {name: lambda self, data: 1, "run_step": lambda self: None}
    assert issubclass(type("Mine", (StepTrainer,), own), StepTrainer)


def test_a_state_without_an_optimizer_leaves_it_as_it_is_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "hooktrain")
    trainer = net_trainer()
    trainer.train(max_iter=2)
    before = copy.deepcopy(trainer.optimizer.state_dict())
    caplog.clear()
    trainer.load_state_dict({"iteration": 4})
    assert trainer.iter == 4
    assert str(trainer.optimizer.state_dict()) == str(before)
    assert "no optimizer" in caplog.text


@pytest.mark.parametrize(
    "place", ["dataset", "sampler", "batch_sampler", "batch_sampler.sampler"]
)
def test_an_exhausted_loader_starts_again_with_the_next_epoch(place: str) -> None:
    class Loader(list[Tensor]):
        pass

    epochs: list[int] = []
    loader = Loader(batches(2))
    sampler: Any = loader
    for name in place.split("."):
        setattr(sampler, name, SimpleNamespace())
        sampler = getattr(sampler, name)
    sampler.set_epoch = epochs.append
    trainer = net_trainer(loader)
    trainer.train(0, 5)
    assert trainer.iter == 5
    assert epochs == [1, 2]


def test_a_loader_that_cannot_be_positioned_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved, loaded = net_trainer(), net_trainer()
    saved.train(0, 1)
    loaded.load_state_dict(saved.state_dict())
    assert "position in the data" in caplog.text


def test_the_epoch_of_a_finite_loader_resumes_with_its_order() -> None:
    announced: list[int] = []

    class Loader(list[Tensor]):
        class sampler:  # noqa: N801
            set_epoch = announced.append

    first = net_trainer(Loader(batches(2)))
    first.train(0, 5)
    assert announced == [1, 2]
    second = net_trainer(Loader(batches(2)))
    second.load_state_dict(first.state_dict())
    second.train(max_iter=6)
    assert announced == [1, 2, 2]


def plateau_of_the_main_rank() -> float:
    trainer = linear_trainer(lr=1.0)
    scheduler = ReduceLROnPlateau(trainer.optimizer, factor=0.5, patience=0)
    results = {"val": {"loss": 0.5}, "ood": {"loss": 1.0}}
    evaluate = EvalHook(2, lambda: results if comm.is_main_process() else {})
    watching = LRScheduler(scheduler=scheduler, metric="ood/loss")
    trainer.register_hooks([evaluate, watching])
    trainer.train(0, 8)
    return float(trainer.optimizer.param_groups[0]["lr"])


def test_what_the_main_rank_evaluates_moves_the_rates_of_all() -> None:
    assert run_ranks(plateau_of_the_main_rank, 2) == [0.125, 0.125]


def metrics_of_any_kind() -> list[list[float]]:
    class Telling(LinearLoss):
        def __init__(self) -> None:
            super().__init__()
            self.count: Tensor
            # An integer that float32 cannot hold, as the share below.
            self.register_buffer("count", torch.tensor(16777216))

        def forward(self, x: Tensor) -> Any:
            self.count += 1
            share = torch.tensor(0.1, dtype=torch.float64)
            loss = super().forward(x).reshape(1)
            return {"loss": loss, "count": self.count, "share": share}

    model = Telling()
    trainer = SimpleTrainer(model, batches(1), sgd(model))
    trainer.train(0, 3)
    histories = [trainer.storage.history(name) for name in ("count", "share")]
    return [[value for value, _ in history.values()] for history in histories]


def test_metrics_of_several_ranks_are_as_precise_as_those_of_one() -> None:
    counts = [16777217.0, 16777218.0, 16777219.0]
    expected = [counts, [0.1] * 3]
    assert metrics_of_any_kind() == expected
    assert run_ranks(metrics_of_any_kind, 2) == [expected] * 2


def stop_before_the_first_step() -> list[int]:
    ends = []
    for rank in (0, 1):

        def ask(trainer: Any, rank: int = rank) -> None:
            if comm.get_rank() == rank:
                trainer.request_stop("nothing to do")

        trainer = linear_trainer(CallbackHook(before_train=ask))
        trainer.train(0, 50)
        ends.append(trainer.iter)
    return ends


def test_a_stop_asked_for_by_any_rank_before_the_first_step_runs_none_on_all() -> None:
    assert run_ranks(stop_before_the_first_step, 2) == [[0, 0]] * 2


def bad_loss_before_a_checkpoint_of_the_main_rank(folder: Path) -> str:
    class BadOnce(LinearLoss):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            bad = comm.get_rank() == 1 and self.calls == 3
            return super().forward(x) * (math.nan if bad else 1.0)

    model = BadOnce()
    trainer = SimpleTrainer(model, batches(4), sgd(model), gather_metric_period=8)
    trainer.register_hooks(
        [
            CallbackHook(
                after_backward=lambda _: [p.grad.zero_() for p in model.parameters()]
            )
        ]
    )
    if comm.is_main_process():
        checkpointer = Checkpointer(model, folder, trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 5)])
    try:
        trainer.train(0, 8)
    except FloatingPointError as error:
        return str(error).partition("!")[0]
    return "trained to the end"


def test_a_checkpoint_of_the_main_rank_alone_does_not_change_its_verdict(
    tmp_path: Path,
) -> None:
    verdicts = run_ranks(bad_loss_before_a_checkpoint_of_the_main_rank, 2, tmp_path)
    assert verdicts == ["Loss became infinite or NaN at iteration=2"] * 2


def last_saved_loss(folder: Path) -> Any:
    trainer = linear_trainer(gather_metric_period=8)
    checkpointer = Checkpointer(trainer.model, folder, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 5)])
    trainer.train(0, 7)
    storage = EventStorage()
    saved = checkpointer.read(folder / "model_0000004.pth")
    storage.load_state_dict(saved["trainer"]["storage"])
    return storage.latest()["total_loss"][1]


def test_a_checkpoint_between_two_exchanges_has_the_metrics_of_all_iterations(
    tmp_path: Path,
) -> None:
    assert run_ranks(last_saved_loss, 2, tmp_path) == [4, 4]


def trained_after_half_an_accumulation(folder: Path) -> list[float]:
    model: nn.Module = Net()
    generator = torch.Generator().manual_seed(comm.get_rank())
    data = [torch.randn(8, 4, generator=generator) for _ in range(4)]
    wrapper = OptimWrapper(sgd(model), accumulative_counts=2)
    trainer = SimpleTrainer(DistributedDataParallel(model), data, wrapper)
    # What an error between the two backward passes of a step leaves behind.
    wrapper.backward(model(data[0]))
    trainer.train(0, 3)
    return model.fc.weight.flatten().tolist()  # type: ignore[operator, union-attr]


def test_an_accumulation_cut_short_does_not_shift_those_that_follow(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(trained_after_half_an_accumulation, 2, tmp_path)
    assert first == second


def best_on_a_full_disk(folder: Path, background: bool) -> float | None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, folder, background=background, trainer=trainer)
    calls = []

    def full_at_first(state: dict[str, Any], path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(state, path)

    checkpointer.write_file = full_at_first  # of this process only
    values = iter([0.5, 0.25, 0.125])
    best = BestCheckpointer(saver, "acc", "max")
    trainer.register_hooks([EvalHook(1, lambda: {"acc": next(values)}), best])
    trainer.train(0, 3)
    return best.best_metric


@pytest.mark.parametrize("background", [False, True])
def test_a_best_model_that_the_main_rank_could_not_save_is_forgotten_by_all(
    background: bool, tmp_path: Path
) -> None:
    assert run_ranks(best_on_a_full_disk, 2, tmp_path, background) == [0.25, 0.25]
    assert torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"] == 1


def spoil_the_shard_of_rank_1(folder: Path) -> tuple[str, list[str]]:
    def spoil(trainer: Any) -> None:
        if trainer.iter == 1 and comm.get_rank() == 1:
            local_tensor(trainer.model.get_parameter("fc.weight"))[0, 0] = math.nan

    model = shard_model(LinearLoss())
    trainer = SimpleTrainer(model, batches(4), sgd(model))
    checkpointer = Checkpointer(model, folder, sharded=True, trainer=trainer)
    saving = PeriodicCheckpointer(checkpointer, 1)
    trainer.register_hooks([CallbackHook(after_step=spoil), saving])
    with pytest.raises(FloatingPointError, match=r"fc\.weight") as caught:
        trainer.train(0, 4)
    return str(caught.value), sorted(path.name for path in folder.glob("[!.]*"))


class FailsOnRank1(HookBase):
    def state_dict(self) -> dict[str, Any]:
        if comm.get_rank() == 1 and self.trainer.done == 1:
            raise ValueError("no state of rank 1")
        return {}


class Gathers(HookBase):
    def state_dict(self) -> dict[str, Any]:
        return {"ranks": comm.all_gather(comm.get_rank())}


def bad_saves(folder: Path) -> tuple[tuple[str, list[str]], str]:
    spoiled = spoil_the_shard_of_rank_1(folder)
    model = create_ddp_model(LinearLoss())
    trainer = SimpleTrainer(model, batches(4), sgd(model))
    save = CallbackHook(after_step=lambda trainer: trainer.prepare_save())
    trainer.register_hooks([FailsOnRank1(), Gathers(), save])
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer.train(0, 1)
    return spoiled, str(caught.value)


def test_what_one_rank_cannot_save_ends_the_run_on_all(tmp_path: Path) -> None:
    (main, _), (other, error) = run_ranks(bad_saves, 2, tmp_path)
    assert main == other
    assert main[1] == ["last_checkpoint", "model_0000000"]
    # Another hook may gather its state at that time, and must not get this error for it.
    assert error == "no state of rank 1"


@pytest.mark.parametrize(("period", "found_at"), [(3, 2), (20, 8)])
def test_a_bad_loss_is_found_at_the_end_of_a_period_or_of_the_run(
    period: int, found_at: int
) -> None:
    data = poisoned(9, at=1)
    trainer = net_trainer(data, async_write_metrics=True, gather_metric_period=period)
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        trainer.train(0, 9)
    assert trainer.iter == found_at


def poison_rank_1(folder: Path) -> tuple[str, list[str]]:
    """The error of this rank, and the checkpoints, where rank 1 has a bad loss at iteration 3."""
    data = poisoned(9, at=3) if comm.get_rank() == 1 else batches(9)
    model = create_ddp_model(LinearLoss())
    trainer = SimpleTrainer(model, data, sgd(model))
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2)])
    with pytest.raises(FloatingPointError) as caught:
        trainer.train(0, 9)
    return str(caught.value), sorted(path.name for path in folder.glob("model*"))


def test_a_bad_loss_of_one_rank_is_the_same_error_on_all_and_in_no_checkpoint(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(poison_rank_1, 2, tmp_path)
    assert first == second
    assert "iteration=3!" in first[0]
    assert first[1] == ["model_0000001.pth"]  # of iteration 3 there is none


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_last_metric_reaches_the_file(tmp_path: Path, asynchronous: bool) -> None:
    trainer = net_trainer(async_write_metrics=asynchronous)
    file = tmp_path / "metrics.json"
    trainer.register_hooks([PeriodicWriter([JSONWriter(file, window_size=1)])])
    trainer.train(0, 3)
    trainer.train(max_iter=5)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    history = {i: v for v, i in trainer.storage.history("total_loss").values()}
    assert [(line["iteration"], line["total_loss"]) for line in lines] == [
        (2, history[2]),
        (4, history[4]),
    ]


def test_a_failure_in_the_last_iteration_is_no_success(tmp_path: Path) -> None:
    evaluated: list[Any] = []
    trainer = net_trainer(poisoned(4, at=3))
    checkpointer = Checkpointer(trainer.model, str(tmp_path), trainer=trainer)

    def put(trainer: Any) -> None:
        trainer.storage.put_scalar("accuracy", 0.5, False)

    trainer.register_hooks(
        [
            CallbackHook(before_step=put),
            EvalHook(0, lambda: evaluated.append(trainer.iter)),
            BestCheckpointer(checkpointer, "accuracy", "max"),
            PeriodicCheckpointer(checkpointer, period=100),
        ]
    )
    with pytest.raises(FloatingPointError, match="iteration=3!"):
        trainer.train(0, 4)
    assert evaluated == []
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_an_evaluation_that_fails_leaves_a_trainer_that_goes_on() -> None:
    evaluate = Mock(
        side_effect=[OSError("gone"), {"accuracy": 0.5}, {"accuracy": 0.75}]
    )
    trainer = net_trainer()
    trainer.register_hooks([EvalHook(2, evaluate)])
    with pytest.raises(OSError, match="gone"):
        trainer.train(0, 6)
    # Iteration 1 was finished when the evaluation after it failed.
    trainer.train(max_iter=6)
    values = trainer.storage.history("accuracy").values()
    assert values == [(0.5, 3), (0.75, 5)]


@pytest.mark.parametrize("event", ["before_step", "after_backward", "after_step"])
def test_a_run_that_broke_off_goes_on_exactly_from_a_checkpoint(event: str) -> None:
    def trained(**interrupt: Any) -> SimpleTrainer:
        trainer = net_trainer(Stream())
        trainer.seed = 3
        schedule = ExponentialLR(trainer.optimizer, 0.5)
        trainer.register_hooks(
            [CallbackHook(**interrupt), LRScheduler(scheduler=schedule)]
        )
        return trainer

    def ctrl_c(trainer: SimpleTrainer) -> None:
        if trainer.iter == 2 and not states[1:]:
            states.append({})
            raise KeyboardInterrupt

    whole, broken = trained(), trained(**{event: ctrl_c})
    whole.train(0, 5)
    states: list[Any] = []
    broken.train(0, 2)
    states.append(copy.deepcopy((broken.model.state_dict(), broken.state_dict())))
    with pytest.raises(KeyboardInterrupt):
        broken.train(max_iter=5)
    with pytest.raises(RuntimeError, match="iteration 2"):
        broken.train(max_iter=5)
    broken.model.load_state_dict(states[0][0])
    broken.load_state_dict(states[0][1])
    broken.train(max_iter=5)
    assert torch.equal(broken.model.fc.weight, whole.model.fc.weight)
    for name in ("lr", "total_loss"):
        assert (
            broken.storage.history(name).values()
            == whole.storage.history(name).values()
        )


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_run_interrupted_inside_a_step_goes_on_with_that_step(precision: str) -> None:
    def trained(*hooks: HookBase) -> SimpleTrainer:
        model = LinearLoss()
        wrapper = OptimWrapper(sgd(model))
        if precision == "float16":
            clip = {"max_norm": 1.0}
            wrapper = AmpOptimWrapper(sgd(model), precision, clip_grad=clip)
            # One that does not overflow.
            wrapper.grad_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        trainer = SimpleTrainer(model, batches(1), wrapper)
        trainer.register_hooks(hooks)
        return trainer

    whole, interrupted = trained(), trained(StopOnce(at=1))
    whole.train(0, 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(0, 4)
    interrupted.train(1, 4)
    assert torch.equal(interrupted.model.fc.weight, whole.model.fc.weight)
    scalers = [
        t.optim_wrapper.state_dict().get("grad_scaler") for t in (interrupted, whole)
    ]
    assert scalers[0] == scalers[1]


def test_in_a_run_the_optimizer_is_not_replaced() -> None:
    def replace(trainer: Any) -> None:
        trainer.optimizer = sgd(trainer.model)

    trainer = linear_trainer(CallbackHook(before_step=replace))
    with pytest.raises(RuntimeError, match="between two runs"):
        trainer.train(max_iter=1)
    replace(trainer)


def test_an_index_out_of_range_says_from_where_labels_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Classifier(LinearLoss):
        def forward(self, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.fc(batch[0]), batch[1])

    model = Classifier()
    trainer = SimpleTrainer(model, [(torch.ones(1, 4), torch.tensor([3]))], sgd(model))
    with pytest.raises(IndexError, match="3") as caught:
        trainer.train(max_iter=1)
    notes = getattr(caught.value, "__notes__", caplog.messages)
    assert "labels count from 0" in "".join(notes)
