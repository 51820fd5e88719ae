"""Model and optimizer that do not belong together are refused, or warned about."""

import logging
import math
import re
from collections import UserDict
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from gloo import run_ranks, torchrun
from hooktrain.checkpoint import Checkpointer
from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer, create_ddp_model, hooks
from hooktrain.engine.hooks import CallbackHook
from hooktrain.engine.preflight import (
    check_parts,
    log_modes,
    log_parts,
    log_zero_gradients,
    warn_about_events,
    warn_about_rank_differences,
    without_masks,
)
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from hooktrain.utils import comm
from toys import LinearLoss, batches, linear_trainer, sgd


def test_a_run_is_refused_before_its_hooks_begin() -> None:
    trainer = SimpleTrainer(LinearLoss(), [], sgd(LinearLoss()))
    begun: list[object] = []
    trainer.register_hooks([CallbackHook(before_train=begun.append)])
    with pytest.raises(ValueError, match="another model"):
        trainer.train(max_iter=1)
    assert begun == []


def test_trainable_parameters_without_an_optimizer_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(LinearLoss(), nn.Linear(2, 2))
    check_parts(model, OptimWrapper(sgd(model[0])))
    assert "1.weight" in caplog.text
    caplog.clear()
    model[1].requires_grad_(False)
    check_parts(model, OptimWrapper(sgd(model[0])))
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_in_lower_precision_are_told_if_they_are_trained(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    model[1].float()
    check_parts(model, OptimWrapper(sgd(model)))
    told = [str(dtype)] if dtype.itemsize == 2 else []
    assert [m for m in caplog.messages if "lose updates" in m] == caplog.messages
    assert len(caplog.messages) == len(told)
    assert all(name in caplog.text for name in told)
    caplog.clear()
    model[0].requires_grad_(False)
    check_parts(model, OptimWrapper(sgd(model[1])))
    assert caplog.messages == []


def test_a_layer_that_is_replaced_in_a_run_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LinearLoss()
    model.fc.requires_grad_(False)
    model.late = nn.Linear(4, 1)
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.compute_loss = lambda x: model(x) + model.late(x).square().mean()  # type: ignore[method-assign]
    trainer.sync_period = 2

    def change(trainer: SimpleTrainer) -> None:
        if trainer.iter == 1:  # the optimizer has it
            model.fc.requires_grad_(True)
        if trainer.iter == 3:
            model.fc = nn.Linear(4, 3)

    trainer.register_hooks([CallbackHook(before_step=change)])
    trainer.train(max_iter=2)
    assert caplog.messages == []
    trainer.train(max_iter=8)
    old, new = caplog.messages
    assert "2 parameters of the optimizer are not the model's" in old
    assert "in no optimizer" in new
    assert "fc.weight" in new


def test_several_optimizers_may_share_a_model(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(LinearLoss(), nn.Linear(2, 2))
    wrappers = [OptimWrapper(sgd(part)) for part in model]
    check_parts(model, OptimWrapperDict(one=wrappers[0], two=wrappers[1]))
    assert caplog.messages == []


def warnings_of_ranks(told: list[str]) -> None:
    own = [batch + comm.get_rank() for batch in batches(2)]
    for model in (create_ddp_model(LinearLoss()), LinearLoss()):
        assert told == []
        trainer = SimpleTrainer(model, own, sgd(model))
        trainer.sync_period = 1
        trainer.train(max_iter=2)


def test_the_model_is_for_the_log_file_and_a_table_of_its_parts_for_the_console(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "hooktrain.engine.preflight")
    shared = nn.Linear(100, 10, bias=False)
    model = nn.Module()
    model.body = nn.Sequential(shared, nn.BatchNorm1d(10)).requires_grad_(False).eval()
    model.head = nn.Sequential(nn.Linear(10, 30), shared).double()
    model.late = nn.LazyLinear(2)
    model.tail = nn.Linear(4, 2, device="meta")
    model.scale = nn.Parameter(torch.ones(5000))
    log_parts(nn.DataParallel(model))
    structure, table = caplog.records
    assert (structure.levelname, table.levelname) == ("DEBUG", "INFO")
    assert repr(model) in structure.getMessage()
    text = """\
The model, on 1 x cpu:
name    type          parameters    trained  mode
------  ----------  ------------  ---------  ------
body    Sequential         1,020          0  eval
head    Sequential         1,330        330  train
late    LazyLinear             0          0  train
tail    Linear                10         10  train
        Module             6,360      5,340  train"""
    assert table.getMessage() == text


def test_a_run_whose_metrics_are_written_shows_the_parts_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer()
    with caplog.at_level(logging.INFO):
        trainer.train(max_iter=2)
        assert "parameters" not in caplog.text
        trainer.register_hooks([hooks.PeriodicWriter([])])
        trainer.train(max_iter=6)
    assert caplog.text.count("The model, on 1 x cpu") == 1
    assert re.search(r"fc +Linear +15 +15  train", caplog.text)


def warnings_of_two_periods() -> None:
    model: Any = LinearLoss()
    model.norm = nn.BatchNorm1d(2, affine=False)
    model.register_buffer("queue", torch.zeros(2))
    model.register_buffer("mask", torch.tensor(True))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    trainer = SimpleTrainer(
        create_ddp_model(model, broadcast_buffers=False), batches(2), sgd(model)
    )

    def differ(_: Any) -> None:
        for buffer in (model.norm.running_mean, model.queue, model.scratch):
            buffer[0] = comm.get_rank()

    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Module()
    weights = distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])
    sharded.register_buffer("weights", weights)
    sharded.register_parameter("trained", nn.Parameter(weights))
    # The shards differ, and a checkpoint has them all.
    warn_about_rank_differences(sharded)
    trainer.register_hooks([CallbackHook(before_step=differ)])
    trainer.sync_period = 1
    trainer.train(max_iter=2)


def warnings_of_two_ranks() -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    warnings_of_ranks(told)
    warnings_of_two_periods()
    return told


def test_ranks_that_train_apart_or_have_own_buffers_are_told_so_once() -> None:
    for apart, buffers in run_ranks(warnings_of_two_ranks, 2):
        assert "create_ddp_model" in apart
        assert buffers.endswith("['queue']")


class Undivided(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(batches(4))


def warnings_of_one_stream() -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    model = create_ddp_model(LinearLoss())
    trainer = SimpleTrainer(model, DataLoader(Undivided(), None), sgd(model))
    trainer.sync_period = 1
    trainer.train(max_iter=3)
    return told


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_process_that_has_joined_none_of_the_others_is_told_so_at_the_start(
    processes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in torchrun(int(processes)).items():
        monkeypatch.setenv(name, value)
    model = LinearLoss()
    SimpleTrainer(model, batches(1), sgd(model)).train(max_iter=1)
    told = [
        r.message for r in caplog.records if "has not joined the others" in r.message
    ]
    assert len(told) == int(processes) - 1
    assert all("2 processes" in each and "launch(main)" in each for each in told)


def test_ranks_that_read_one_stream_are_told_so_once() -> None:
    for told in run_ranks(warnings_of_one_stream, 2):
        (text,) = told
        assert "comm.data_parallel_rank()" in text


def warnings_of_streams(
    sizes: list[int], seeds: list[int], shift: int = 0
) -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    model = create_ddp_model(LinearLoss())
    size = sizes[comm.get_rank()]
    data: Any = batches(1, 2 * size)[0]
    first = shift * comm.get_rank()
    data = Subset(data, range(first, first + size))
    seed = seeds[comm.get_rank()]
    loader = build_train_loader(data, total_batch_size=4, seed=seed)
    trainer = SimpleTrainer(model, loader, sgd(model))
    trainer.sync_period = 2
    trainer.train(max_iter=4)
    return told


@pytest.mark.parametrize(
    ("sizes", "seeds", "told"),
    [([12, 12], [7, 8], 1), ([12, 16], [7, 7], 1), ([12, 12], [7, 7], 0)],
)
def test_ranks_that_divide_different_streams_are_told_so_once(
    sizes: list[int], seeds: list[int], told: int
) -> None:
    for texts in run_ranks(warnings_of_streams, 2, sizes, seeds):
        assert len(texts) == told
        assert all("different streams" in text for text in texts)


def test_ranks_that_divide_different_subsets_are_told_so_once() -> None:
    for texts in run_ranks(warnings_of_streams, 2, [12, 12], [7, 7], 1):
        assert len(texts) == 1
        assert "different streams" in texts[0]


class ByItself(SimpleTrainer):
    def run_step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.next_batch())
        loss.backward()
        self.after_backward()
        self.record_losses({"loss": loss})
        self.optimizer.step()


class ByTheWrapper(SimpleTrainer):
    def run_step(self) -> None:
        loss = self.model(self.next_batch())
        self.record_losses({"loss": loss})
        self.optim_wrapper.update_params(loss)
        assert self.optimizer.state_dict()


@pytest.mark.parametrize("kind", [ByItself, ByTheWrapper])
@pytest.mark.parametrize(
    ("make", "does_more"),
    [
        (OptimWrapper, False),
        (lambda opt: OptimWrapper(opt, 2), True),
        (lambda opt: OptimWrapper(opt, clip_grad={"max_norm": 1.0}), True),
        (lambda opt: AmpOptimWrapper(opt, "bfloat16"), True),
    ],
)
def test_a_step_that_leaves_out_what_the_wrapper_does_is_told_once(
    kind: type[SimpleTrainer],
    make: Any,
    does_more: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LinearLoss()
    trainer = kind(model, batches(2), make(sgd(model)))
    trainer.sync_period = 2
    trainer.train(max_iter=4)
    told = sum("the OptimWrapper around it" in text for text in caplog.messages)
    assert told == (does_more and kind is ByItself)


class Multiplied(SimpleTrainer):
    """Its loss is multiplied by a number."""

    factor = 1.0

    def compute_loss(self, data: Any) -> Any:
        return self.model(data) * self.factor


class FreesInPlace(Multiplied):
    def run_step(self) -> None:
        super().run_step()
        self.optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("kind", "factor", "is_told"),
    [
        (Multiplied, 0.0, True),
        (Multiplied, 1.0, False),
        (Multiplied, 1e-30, False),
        (FreesInPlace, 1.0, False),
    ],
)
def test_gradients_that_are_all_0_are_told_once(
    kind: type[Multiplied],
    factor: float,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = LinearLoss()
    model.unused = nn.Linear(1, 1)
    trainer = kind(model, batches(2), sgd(model))
    trainer.factor = factor
    trainer.sync_period = 2
    trainer.train(max_iter=6)
    told = [text for text in caplog.messages if "All gradients" in text]
    assert len(told) == is_told
    assert all("AmpOptimWrapper" in text for text in told)


def test_sparse_gradients_and_a_model_without_any_are_no_gradients_of_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rows = nn.Embedding(3, 4, sparse=True)
    rows(torch.tensor([0])).sum().backward()
    log_zero_gradients(rows)
    log_zero_gradients(LinearLoss())
    assert caplog.messages == []
    (rows(torch.tensor([0])).sum() * 0).backward()
    assert rows.weight.grad is not None
    rows.weight.grad *= 0
    log_zero_gradients(rows)
    assert "All gradients" in caplog.text


class Base:
    def __init__(self) -> None:
        self.seen = 0

    def after_step(self) -> None:
        self.seen += 1

    def before_step(self) -> None:
        """Does nothing."""


def decorated(method: Any) -> Any:
    @wraps(method)
    def called(self: Any) -> None:
        method(self)

    return called


class CallsSuper(Base):
    @decorated
    def after_step(self) -> None:
        super().after_step()


class CallsByName(Base):
    def __init__(self) -> None:
        Base.__init__(self)


class SwitchesOff(Base):
    def after_step(self) -> None:
        """Does nothing, on purpose."""


class OfNothing(Base):
    def before_step(self) -> None:
        self.seen = 7


class Forgets(Base):
    @decorated
    def after_step(self) -> None:
        self.seen = 7


class ForgetsConstructor(Base):
    def __init__(self) -> None:
        self.mine = 7


class CallsItsOwn(Base):
    def training_step(self) -> None:
        self.on_train_start()

    def on_train_start(self) -> None:
        self.seen = 7

    def before_step(self) -> None:
        self.training_step()


class StepsLikeLightning(Base):
    def on_before_optimizer_step(self) -> None:
        self.seen = 7


class SavesLikeLightning(Base):
    def on_save_checkpoint(self, checkpoint: dict[str, int]) -> None:
        checkpoint["seen"] = self.seen


class LogsLikeTransformers(Base):
    def on_log(self) -> None:
        self.seen = 7


class SavesLikeUltralytics(Base):
    def on_model_save(self) -> None:
        self.seen = 7


class OfLightning(Base):
    def training_step(self) -> None:
        super().training_step()  # type: ignore[misc]


@pytest.mark.parametrize(
    "kind", [CallsSuper, CallsByName, SwitchesOff, OfNothing, CallsItsOwn]
)
def test_a_method_that_leaves_nothing_out_is_not_told(
    kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    warn_about_events(kind)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Forgets, "Forgets.after_step"),
        (ForgetsConstructor, "ForgetsConstructor.__init__"),
        (
            OfLightning,
            "OfLightning.training_step is not an event, so only your own code",
        ),
        (StepsLikeLightning, "on_before_optimizer_step is not an event"),
        (SavesLikeLightning, "on_save_checkpoint is not an event"),
        (LogsLikeTransformers, "on_log is not an event"),
        (SavesLikeUltralytics, "on_model_save is not an event"),
    ],
)
def test_a_method_that_is_not_called_or_lacks_its_super_is_told(
    kind: type, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_about_events(kind)
    (message,) = caplog.messages
    assert name in message


def weights_of_ranks(calls_inner: bool) -> tuple[list[str], float]:
    """The warnings, and the sum of the weights, if the step calls DDP or the module in it."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    inner = LinearLoss()
    inner.quantized = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    model = create_ddp_model(inner)
    own = [batch + comm.get_rank() for batch in batches(4)]
    trainer = SimpleTrainer(model, own, sgd(model))
    called = model.module if calls_inner else model
    trainer.compute_loss = called.__call__  # type: ignore[method-assign]
    trainer.sync_period = 2
    trainer.train(max_iter=4)
    return told, float(model.module.fc.weight.sum())


@pytest.mark.parametrize("calls_inner", [False, True])
def test_ranks_that_train_different_weights_are_told_once(calls_inner: bool) -> None:
    (told, weights), (told_too, others) = run_ranks(weights_of_ranks, 2, calls_inner)
    assert (weights != others) is calls_inner
    assert told == told_too
    assert len(told) == calls_inner
    assert all("different weights" in text for text in told)


def warnings_of_late_differences(folder: str) -> list[list[str]]:
    """The warnings of runs in which the ranks differ after the first period, or never."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)

    def change(name: str, ranks: Any, trainer: SimpleTrainer) -> None:
        if trainer.iter == 3 and comm.get_rank() in ranks:
            trainer.model.module.state_dict()[name].mul_(0.5)

    of_runs = []
    for name, ranks in (("fc.weight", [0, 1]), ("fc.weight", [0]), ("queue", [1])):
        told.clear()
        model: Any = LinearLoss()
        model.register_buffer("queue", torch.ones(2))
        model = create_ddp_model(model, broadcast_buffers=False)
        trainer = SimpleTrainer(model, batches(2), sgd(model))
        trainer.sync_period = 2
        saver = Checkpointer(model, f"{folder}/{len(of_runs)}", trainer=trainer)
        trainer.register_hooks(
            [
                CallbackHook(after_step=partial(change, name, ranks)),
                hooks.PeriodicCheckpointer(saver, 2),
            ]
        )
        trainer.train(max_iter=8)
        of_runs.append([*told])
    return of_runs


def test_ranks_that_differ_later_are_told_once_before_a_save(tmp_path: Path) -> None:
    for alike, weights, buffers in run_ranks(
        warnings_of_late_differences, 2, str(tmp_path)
    ):
        assert alike == []
        assert ["on every rank" in text for text in weights] == [True]
        assert [text.endswith("['queue']") for text in buffers] == [True]


class RecordsItself(SimpleTrainer):
    """Records values of all kinds; some of them differ between the ranks."""

    def compute_loss(self, data: Any) -> Any:
        rank = comm.get_rank()
        self.storage.put_scalar("accuracy", torch.tensor(0.5 + rank))
        self.storage.put_scalar("step_seconds", rank)
        self.storage.put_scalar("speed_of_rank", rank)
        self.storage.put_scalar("free", rank, reproducible=False)
        self.storage.put_scalar("alike", self.iter)
        self.storage.put_scalar("nan", math.nan)
        if rank == 0:
            self.storage.put_scalar("of_main", 7)
        return {"loss": self.model(data), "size": torch.tensor(float(rank))}


def lines_about_metrics() -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hooktrain")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = create_ddp_model(LinearLoss())
    trainer = RecordsItself(model, batches(2), sgd(model))
    trainer.sync_period = 2
    trainer.train(max_iter=6)
    return [text for text in told if "different values" in text]


def test_metrics_whose_values_differ_between_the_ranks_are_named_once() -> None:
    assert run_ranks(lines_about_metrics, 1) == [[]]
    for told in run_ranks(lines_about_metrics, 2):
        (text,) = told
        assert "['accuracy']" in text
        assert "compute_loss returns" in text


@pytest.mark.parametrize("count", [1, 3])
def test_the_log_says_what_an_iteration_and_an_epoch_are(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = LinearLoss()
    data = [torch.ones(4)] * 24
    loader = build_train_loader(data, total_batch_size=4, seed=0)
    trainer = SimpleTrainer(model, loader, OptimWrapper(sgd(model), count))
    trainer.train(max_iter=1)
    said = f"{4 * count} samples of all ranks.*: {count}.*an epoch is {6 // count} iter"
    assert sum(bool(re.search(said, text)) for text in caplog.messages) == 1
    assert "is one update" not in caplog.text  # a StepTrainer's may be none, or several
    caplog.clear()
    SimpleTrainer(model, batches(2), sgd(model)).train(max_iter=1)
    assert "an epoch is" not in caplog.text


@pytest.mark.parametrize(("count", "is_told"), [(1, False), (2, True)])
def test_a_loss_that_makes_or_frees_gradients_in_an_accumulation_is_told(
    count: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Freeing(SimpleTrainer):
        def compute_loss(self, data: Any) -> Any:
            self.model(data).backward()
            self.optimizer.zero_grad()
            return self.model(data)

    class Adversarial(SimpleTrainer):
        def compute_loss(self, data: Any) -> Any:
            data.requires_grad_().grad = None
            self.model(data).backward()
            return self.model((data + data.grad.sign()).detach())

    for kind, calls in ((SimpleTrainer, 0), (Adversarial, 1), (Freeing, 2)):
        caplog.clear()
        model = LinearLoss()
        kind(model, batches(2), OptimWrapper(sgd(model), count)).train(max_iter=1)
        told = [text for text in caplog.messages if "compute_loss calls" in text]
        assert len(told) == (is_told and calls > 0)
        assert ("zero_grad" in caplog.text) == (is_told and calls > 1)


class ScalesByHand(SimpleTrainer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def compute_loss(self, data: Any) -> Any:
        with torch.autocast("cpu", torch.float16):
            return self.scaler.scale(self.model(data))


class WeighsByHand(SimpleTrainer):
    scale = 0.5

    def compute_loss(self, data: Any) -> Any:
        return self.model(data) * self.scale


class Casts(SimpleTrainer):
    def compute_loss(self, data: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(data)


@pytest.mark.parametrize("kind", [ScalesByHand, WeighsByHand, Casts])
def test_a_loss_that_a_scaler_of_its_own_scales_is_told_once(
    kind: type[SimpleTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    model = LinearLoss()
    trainer = kind(model, batches(2), sgd(model, lr=1e-6))
    trainer.train(max_iter=2)
    told = [text for text in caplog.messages if "AmpOptimWrapper" in text]
    assert len(told) == (kind is ScalesByHand)


class Labelled(SimpleTrainer):
    def compute_loss(self, data: Any) -> Any:
        return self.model(torch.ones(2, 4))


class Weighed(Labelled):
    def weight(self, data: Any) -> Any:
        return 2


class Encoding(UserDict[str, torch.Tensor]):
    """Like transformers' BatchEncoding, which has a method to()."""

    def to(self, device: Any, **_: Any) -> "Encoding":
        return self


IGNORED = torch.tensor([[5, -100], [3, 2]])


@pytest.mark.parametrize(
    ("batch", "kind", "count", "is_told"),
    [
        ({"labels": IGNORED}, Labelled, 2, True),
        (Encoding(labels=IGNORED), Labelled, 2, True),
        ([IGNORED, {"targets": IGNORED}], Labelled, 2, True),
        ({"labels": IGNORED}, Weighed, 2, False),
        ({"labels": IGNORED}, Labelled, 1, False),
        ({"labels": IGNORED + 1}, Labelled, 2, False),
        (["a text", None], Labelled, 2, False),
        ([IGNORED.to_sparse()], Labelled, 2, False),
    ],
)
def test_ignored_labels_in_an_accumulation_are_told_once(
    batch: Any,
    kind: type[SimpleTrainer],
    count: int,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = LinearLoss()
    kind(model, [batch], OptimWrapper(sgd(model), count)).train(max_iter=2)
    told = [text for text in caplog.messages if "Labels of -100" in text]
    assert len(told) == is_told
    assert all("weight(data)" in text for text in told)


class Divided(SimpleTrainer):
    divisor: float = 2

    def compute_loss(self, data: Any) -> Any:
        loss = self.model(data) / self.divisor
        return (
            {"loss_a": loss, "size": torch.tensor(2.0)} if self.divisor == 2.0 else loss
        )


@pytest.mark.parametrize(
    ("divisor", "count", "names"),
    [
        (2.0, 2, ["total_loss", "loss_a"]),
        (3, 3, ["total_loss"]),
        (3, 2, []),
        (3, 1, []),
        (1, 1, []),
    ],
)
def test_a_loss_that_is_divided_by_the_number_of_accumulated_batches_is_told_once(
    divisor: float, count: int, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = LinearLoss()
    trainer = Divided(model, batches(6), OptimWrapper(sgd(model), count))
    trainer.divisor = divisor
    trainer.train(max_iter=2)
    told = [text for text in caplog.messages if "is divided by" in text]
    assert [text.split()[0] for text in told] == names


def test_layers_in_evaluation_mode_are_told_if_the_model_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(nn.Sequential(nn.Dropout()), nn.Dropout())
    model[0].eval()
    log_modes(model)
    assert caplog.messages == ["Layers that stay in evaluation mode: ['0']"]
    model.training, model[0].training = False, True
    log_modes(model)
    assert len(caplog.messages) == 1


def test_frozen_batch_norm_in_training_mode_is_told_since_its_statistics_move(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False))
    log_modes(model)
    assert not caplog.messages
    model[0].requires_grad_(False)
    log_modes(model)
    assert "A frozen BatchNorm" in caplog.text
    model[0].eval()
    log_modes(model)
    assert caplog.messages[1:] == ["Layers that stay in evaluation mode: ['0']"]


def test_a_buffer_with_infinities_above_0_is_no_mask() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_buffer("range", torch.tensor([math.inf, -math.inf]))
    broken = {"model.mask is inf", "ema.mask is inf", "model.range is inf"}
    assert without_masks(model, broken) == {"model.range is inf"}


class WithoutAfterBackward(SimpleTrainer):
    def run_step(self) -> None:
        loss = self.model(self.next_batch())
        self.record_losses({"loss": loss})
        self.optim_wrapper.zero_grad()
        loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize("event", ["after_backward", "after_step"])
def test_a_callback_is_told_to_be_lost_if_it_is_one_of_after_backward(
    event: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = LinearLoss()
    trainer = WithoutAfterBackward(model, batches(2), sgd(model))
    trainer.register_hooks([CallbackHook(**{event: lambda t: t.storage.iter})])
    trainer.sync_period = 2
    trainer.train(max_iter=4)
    assert ("['CallbackHook'] may need" in caplog.text) == (event == "after_backward")


class FreesByHand(SimpleTrainer):
    """Three passes add up in each iteration, and no more."""

    def run_step(self) -> None:
        data = self.next_batch()
        for parameter in self.model.parameters():
            parameter.grad = None
        for _ in range(3):
            self.model(data).backward()
        self.after_backward()
        self.optimizer.step()


@pytest.mark.parametrize("max_iter", [1, 2, 3, 9])
def test_gradients_of_a_short_run_that_are_freed_by_hand_are_not_told(
    max_iter: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = LinearLoss()
    FreesByHand(model, batches(2), sgd(model)).train(max_iter=max_iter)
    assert "add up" not in caplog.text


class Scaled(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale


class WithCriterion(SimpleTrainer):
    criterion_without_gradients = False

    def compute_loss(self, data: Any) -> Any:
        with torch.set_grad_enabled(not self.criterion_without_gradients):
            factor = self.criterion(torch.ones(()))
        return self.model(data) * factor


class WithOwnOptimizer(WithCriterion):
    """Trains the criterion by an optimizer that the trainer does not know."""

    def run_step(self) -> None:
        super().run_step()
        for parameter in self.criterion.parameters():
            parameter.grad = None


@pytest.mark.parametrize(
    ("case", "is_told"),
    [
        ("forgotten", True),
        ("accumulated", True),
        ("in the optimizer", False),
        ("frozen", False),
        ("without gradients", False),
        ("own optimizer", False),
        ("of the model", False),
    ],
)
def test_a_criterion_whose_parameters_no_optimizer_has_is_named_once(
    case: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = LinearLoss()
    criterion = Scaled()
    trained = [*model.parameters()]
    if case == "in the optimizer":
        trained += criterion.parameters()
    if case == "of the model":
        model.criterion = criterion
        trained = [*model.parameters()]
    wrapper = OptimWrapper(
        torch.optim.SGD(trained, lr=0.1), 2 if case == "accumulated" else 1
    )
    kind = WithOwnOptimizer if case == "own optimizer" else WithCriterion
    trainer = kind(model, batches(4), wrapper, gather_metric_period=5)
    trainer.criterion = criterion.requires_grad_(case != "frozen")
    trainer.teacher = LinearLoss()
    trainer.criterion_without_gradients = case == "without gradients"
    trainer.train(max_iter=10)
    told = [text for text in caplog.messages if "criterion gets" in text]
    assert len(told) == is_told
    assert "teacher" not in caplog.text


CRITERION = Scaled()
TEACHER = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))


class WithGlobalCriterion(SimpleTrainer):
    def compute_loss(self, data: Any) -> Any:
        return CRITERION(self.model(data))


class Distilled(SimpleTrainer):
    def compute_loss(self, data: Any) -> Any:
        with torch.no_grad():
            target = TEACHER(data).mean() + self.teacher(data).mean()
        return self.model(data) + self.criterion(target, target)


def test_a_criterion_beside_the_trainer_that_no_optimizer_has_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LinearLoss()
    WithGlobalCriterion(model, batches(2), sgd(model), 5).train(max_iter=5)
    assert "CRITERION gets gradients that no optimizer uses" in caplog.text


@pytest.mark.parametrize("training", [True, False])
def test_a_teacher_in_training_mode_is_told_once(
    training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = LinearLoss()
    TEACHER.eval()
    trainer = Distilled(model, batches(2), sgd(model), 2)
    trainer.teacher = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).train(training)
    trainer.criterion = nn.MSELoss()  # has no parameters
    trainer.train(max_iter=4)
    told = [text for text in caplog.messages if "is in training mode" in text]
    assert [text.split()[0] for text in told] == (["teacher"] if training else [])


def test_a_module_beside_the_model_that_is_trained_is_no_teacher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class TrainsIt(Distilled):
        def compute_loss(self, data: Any) -> Any:
            self.teacher(data).mean().backward()
            return self.model(data)

    caplog.set_level(logging.INFO)
    model = LinearLoss()
    trainer = TrainsIt(model, batches(2), sgd(model), 2)
    trainer.teacher = nn.Sequential(nn.Dropout(), nn.Linear(4, 1))
    trainer.train(max_iter=2)
    assert "is in training mode" not in caplog.text


class Adversarial(SimpleTrainer):
    """Trains a second module by an optimizer of its own, and frees its gradients."""

    def run_step(self) -> None:
        super().run_step()
        self.teacher(torch.ones(2, 4)).mean().backward()
        self.second.step()
        self.second.zero_grad()


def test_a_module_that_an_optimizer_of_the_step_trains_is_no_teacher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = LinearLoss()
    trainer = Adversarial(model, batches(2), sgd(model), 6)
    trainer.teacher = nn.Sequential(nn.Dropout(), nn.Linear(4, 1))
    trainer.second = sgd(trainer.teacher)
    trainer.train(max_iter=6)
    assert "is in training mode" not in caplog.text


class Counting(nn.Module):
    """Has numbers and tensors of its own, which a state_dict lacks."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = LinearLoss()
        self.calls = 0
        self.bank = torch.zeros(4)
        self.mean = torch.zeros(4)
        self.auxiliary: Any = torch.zeros(())
        self.fixed = torch.ones(4)
        with torch.inference_mode():  # which counts no changes
            self.inferred = torch.ones(2)
        self.name = "a"
        self.has_begun = False
        self.register_buffer("known", torch.zeros(4))
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(x)
        self.calls += 1
        self.has_begun = True
        self.temperature *= 0.9
        self.bank[0] += 1
        self.mean = self.mean + 1
        self.auxiliary = loss.square()
        self.known += 1
        self.cache = torch.ones(2)
        self.name += "b"
        return loss


def test_attributes_of_the_model_that_no_checkpoint_has_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(Counting())
    SimpleTrainer(model, batches(2), sgd(model), 2).train(max_iter=6)
    [told] = [text for text in caplog.messages if "a checkpoint has them only" in text]
    assert re.findall(r"'([^']+)'", told) == [
        f"model.0.{name}" for name in ("temperature", "calls", "bank", "mean")
    ]


def test_attributes_that_stay_as_they_are_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), LinearLoss()
    )
    SimpleTrainer(model, batches(2), sgd(model), 2).train(max_iter=6)
    assert "a checkpoint has them only" not in caplog.text
