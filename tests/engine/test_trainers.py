"""The steps of the trainers against loops written by hand, and what they save."""

import gc
import math
import os
import weakref
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from trainer_toys import Net, Stream, batches, make, sgd

from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.files import load_file, save_file
from hooktrain.config import LazyConfig
from hooktrain.data import build_train_loader
from hooktrain.engine import AMPTrainer, DefaultTrainer, HookBase, SimpleTrainer, hooks
from hooktrain.engine.trainers import Batches
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from hooktrain.utils.env import seed_step
from hooktrain.utils.events import EventStorage, EventWriter, get_event_storage


def losses_by_hand(count: int, zero_first: bool = False) -> tuple[list[float], Net]:
    model, losses = Net(), []
    optimizer = sgd(model)
    for iteration, batch in enumerate(batches(count)):
        seed_step(3, iteration, rank=0)
        if zero_first:
            optimizer.zero_grad()
        loss = model(batch)
        assert isinstance(loss, Tensor)
        if not zero_first:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("zero_first", [False, True])
def test_losses_and_weights_equal_a_loop_written_by_hand_bit_for_bit(
    zero_first: bool,
) -> None:
    trainer = make(zero_grad_before_forward=zero_first)
    trainer.seed = 3
    trainer.train(0, 4)
    losses, model = losses_by_hand(4, zero_first)
    assert [v for v, _ in trainer.storage.history("total_loss").values()] == losses
    assert torch.equal(trainer.model.fc.weight, model.fc.weight)


def test_a_prefix_stands_before_every_name() -> None:
    trainer = make()
    with trainer.storage:
        trainer._write_metrics({"loss_x": 1.0}, 0.5, prefix="gan/")
    assert {"gan/loss_x", "gan/total_loss"} <= set(trainer.storage.latest())


def test_a_total_of_a_step_of_ones_own_is_recorded_as_it_is() -> None:
    trainer = make()
    trainer._write_metrics(
        {"loss_a": 1.0, "loss_b": 2.0, "total_loss": torch.tensor(2.5)}, 0.5
    )
    assert {k: v for k, (v, _) in trainer.storage.latest().items() if "loss" in k} == {
        "loss_a": 1.0,
        "loss_b": 2.0,
        "total_loss": 2.5,
    }
    with pytest.raises(FloatingPointError):
        trainer._write_metrics({"loss_a": 1.0, "total_loss": float("nan")}, 0.5)


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
            {"total_loss": 1.5, "loss_a": 1, "loss_frozen": 0.5},
        ),
        (OutputWithLoss(loss=LOSS, logits=torch.ones(2, 2)), {"total_loss": 1}),
        (SimpleNamespace(loss=LOSS, logits=torch.ones(2, 2)), {"total_loss": 1}),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_a_loss_is_added_up_and_metrics_are_recorded_only(
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
    assert LOSS.grad == recorded["total_loss"] - recorded.get("loss_frozen", 0)
    LOSS.grad = None


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="for several take StepTrainer"):
        SimpleTrainer(Net(), batches(1), OptimWrapperDict(a=OptimWrapper(sgd(Net()))))
    with pytest.raises(TypeError, match="a torch optimizer or a dict, but got 'sgd'"):
        SimpleTrainer(Net(), [], "sgd")
    with pytest.raises(ValueError, match=r"gather_metric_period .* got 0"):
        make(gather_metric_period=0)


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update() -> None:
    data = batches(3)
    data[1][0, 0] = math.nan
    trainer = make(data)
    with pytest.raises(FloatingPointError, match=r"iteration=1!\nloss_dict = .*nan"):
        trainer.train(0, 3)
    assert trainer.model.fc.weight.isfinite().all()
    assert trainer.state_dict()["iteration"] == 0


def test_async_write_metrics_finds_the_loss_at_the_end_of_the_period_and_names_its_iteration() -> (
    None
):
    data = batches(3)
    data[1][0, 0] = math.inf
    trainer = make(data, async_write_metrics=True, gather_metric_period=3)
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        trainer.train(0, 9)
    assert trainer.iter == 2


def test_no_checkpoint_can_be_made_of_a_poisoned_state() -> None:
    data = batches(3)
    data[1][0, 0] = math.inf

    class Save(HookBase):
        def after_step(self) -> None:
            if self.trainer.iter == 1:
                self.trainer.state_dict()

    trainer = make(data, async_write_metrics=True)
    trainer.register_hooks([Save()])
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        trainer.train(0, 9)


def test_metrics_go_to_the_trainers_storage_whatever_storage_is_open_around() -> None:
    class Nested(HookBase):
        def after_backward(self) -> None:
            self.inner = EventStorage()
            self.inner.__enter__()

        def after_step(self) -> None:
            self.inner.__exit__(None, None, None)

    trainer = make()
    trainer.register_hooks([Nested()])
    trainer.train(0, 2)
    assert len(trainer.storage.history("total_loss").values()) == 2


def test_hooks_see_the_gradients_between_backward_and_update() -> None:
    class Zero(HookBase):
        def after_backward(self) -> None:
            for parameter in self.trainer.model.parameters():
                parameter.grad.zero_()

    trainer = make()
    before = trainer.model.fc.weight.clone()
    trainer.register_hooks([Zero()])
    trainer.train(0, 2)
    assert torch.equal(trainer.model.fc.weight, before)


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
    trainer = make(Stream())
    with pytest.raises(ValueError, match="how many iterations '2 epochs' are"):
        trainer.train(max_epochs=2)
    trainer.epoch_length = 5
    trainer.train(max_epochs=1.5)
    assert trainer.iter == 8


class Recorder(EventWriter):
    def __init__(self) -> None:
        self.iters: list[int] = []

    def write(self) -> None:
        self.iters.append(get_event_storage().iter)


def test_every_period_may_be_one_of_epochs(tmp_path: Path) -> None:
    trainer = make(gather_metric_period="1 epoch")
    assert trainer.sync_period == 4
    evaluated: list[int] = []
    checkpointer = Checkpointer(trainer.model, str(tmp_path), trainer=trainer)

    def evaluate() -> dict[str, float]:
        evaluated.append(trainer.iter)
        return {"loss": 1.0 / trainer.iter}

    recorder = Recorder()
    trainer.register_hooks(
        [
            hooks.EvalHook("1 epoch", evaluate),
            hooks.BestCheckpointer("1 epoch", checkpointer, "loss"),
            hooks.PeriodicWriter([recorder], "0.5 epochs"),
            hooks.PeriodicCheckpointer(checkpointer, "2 epochs"),
        ]
    )
    trainer.train(max_epochs=2.5)
    assert evaluated == [3, 7, 10]
    assert recorder.iters == [1, 3, 5, 7, 9, 10]
    saved = [name for name in os.listdir(tmp_path) if name.endswith(".pth")]
    assert sorted(saved) == ["model_0000007.pth", "model_best.pth", "model_final.pth"]


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
            loss.backward()  # type: ignore[union-attr]
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.fc.weight, reference.fc.weight)
    means = [sum(losses[:3]), sum(losses[3:])]
    got = [v for v, _ in trainer.storage.history("total_loss").values()]
    assert got == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amp_trainer_works_on_the_cpu_and_uses_a_scaler_for_float16_only(
    dtype: torch.dtype,
) -> None:
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


def test_the_learned_state_resumes_bit_for_bit_with_momentum_and_dropout() -> None:
    whole = make(batches(6))
    torch.manual_seed(3)
    whole.train(0, 6)
    first = make(batches(6))
    torch.manual_seed(3)
    first.train(0, 2)
    state = first.state_dict()
    second = make(batches(6)[2:])
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(state)
    second.train(max_iter=6)
    assert torch.equal(second.model.fc.weight, whole.model.fc.weight)
    histories = [t.storage.history("total_loss").values() for t in (second, whole)]
    assert histories[0] == histories[1]


def test_the_optimizer_alone_can_be_loaded() -> None:
    saved, loaded = make(), make()
    saved.train(0, 2)
    loaded.load_state_dict(saved.state_dict(), only={"optimizer"})
    assert loaded.state_dict()["iteration"] == -1
    state = loaded.optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(
        state, saved.optimizer.state_dict()["state"][0]["momentum_buffer"]
    )


def test_a_state_without_optimizer_is_refused_unless_left_out() -> None:
    trainer = make()
    state = {"iteration": 4}
    with pytest.raises(ValueError, match="no optimizer"):
        trainer.load_state_dict(state)
    trainer.load_state_dict(state, only={"iteration"})
    assert trainer.iter == 4


def test_the_layouts_of_detectron2s_trainers_load() -> None:
    model = Net()
    optimizer = sgd(model)
    model(batches(1)[0]).backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # makes it create its state
    amp = {
        "iteration": 9,
        "optimizer": optimizer.state_dict(),
        "grad_scaler": scaler.state_dict(),
    }
    nested = {"iteration": 9, "hooks": {}, "_trainer": amp}
    for state in (amp, nested):
        other = Net()
        trainer = AMPTrainer(other, batches(1), sgd(other))
        trainer.load_state_dict(state)
        assert trainer.iter == 9
        assert trainer.grad_scaler.get_scale() == 8.0
        buffer = trainer.optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(
            buffer, optimizer.state_dict()["state"][0]["momentum_buffer"]
        )


CONFIG = Path(__file__).parents[2] / "configs" / "digits_cnn.py"


def test_a_default_trainer_is_freed_without_the_garbage_collector(
    tmp_path: Path,
) -> None:
    config = LazyConfig.load(str(CONFIG))
    config.train.output_dir = str(tmp_path)
    trainer = DefaultTrainer(config)
    model = weakref.ref(trainer.model)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("place", ["sampler", "batch_sampler", "batch_sampler.sampler"])
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
    trainer = make(loader)
    trainer.train(0, 5)
    assert trainer.iter == 5
    assert epochs == [1, 2]


def test_an_empty_loader_is_an_error_not_an_endless_loop() -> None:
    for data in ([], iter(batches(1))):
        with pytest.raises(
            ValueError, match=r"data loader is empty .*or starts only once"
        ):
            make(data).train(0, 2)


def test_a_loader_that_cannot_be_positioned_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved, loaded = make(), make()
    saved.train(0, 1)
    loaded.load_state_dict(saved.state_dict())
    assert "position in the data could not be restored" in caplog.text


def test_a_loader_with_state_continues_where_it_was() -> None:
    saved, loaded = make(Stream()), make(Stream())
    saved.train(0, 3)
    loaded.load_state_dict(saved.state_dict())
    loaded.train(max_iter=5)
    assert loaded.data_loader.position == 5  # type: ignore[attr-defined]


class Numbers(IterableDataset[int]):
    """From 0 to 9, shared by the workers."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, 10, worker.num_workers) if worker else range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_torchdata_continues_where_it_was(
    workers: int, tmp_path: Path
) -> None:
    def stream() -> Batches:
        return Batches(
            build_train_loader(Numbers(), total_batch_size=2, num_workers=workers)
        )

    whole = [batch.tolist() for batch in islice(stream(), 14)]
    assert sorted(chain.from_iterable(whole[: 6 if workers else 5])) == list(range(10))
    for stop in (2, 6, 7):
        first, second = stream(), stream()
        before = [batch.tolist() for batch in islice(first, stop)]
        save_file(first.state_dict(), tmp_path / "state.pth")
        second.load_state_dict(load_file(tmp_path / "state.pth"))
        after = [batch.tolist() for batch in islice(second, 14 - stop)]
        assert before + after == whole


def test_the_epoch_of_a_finite_loader_resumes_with_its_order() -> None:
    announced: list[int] = []

    class Loader(list[Tensor]):
        class sampler:  # noqa: N801
            set_epoch = announced.append

    first = make(Loader(batches(2)))
    first.train(0, 5)
    assert announced == [1, 2]
    second = make(Loader(batches(2)))
    second.load_state_dict(first.state_dict())
    second.train(max_iter=6)
    assert announced == [1, 2, 2]


def test_another_loader_is_used_from_the_next_batch_on() -> None:
    trainer = make()
    trainer.train(0, 1)
    seen: list[Tensor] = []
    trainer.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    trainer.data_loader = batches(3)[2:]
    trainer.train(max_iter=2)
    assert torch.equal(seen[0], batches(3)[2])


def test_reset_data_loader_frees_the_old_loader_before_it_builds_the_new_one() -> None:
    class Loader(list[Tensor]):
        pass

    old = Loader(batches(2))
    gone = weakref.ref(old)
    trainer = make(old)
    del old
    trainer.train(0, 1)
    seen = []

    def build() -> Loader:
        gc.collect()
        seen.append(gone() is None)
        return Loader(batches(1))

    trainer.reset_data_loader(build)
    assert seen == [True]
    trainer.train(max_iter=3)
    assert trainer.iter == 3
