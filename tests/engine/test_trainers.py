"""The step of SimpleTrainer and AMPTrainer, against loops written by hand."""

import gc
import math
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from trainer_toys import Net, batches, make, sgd

from hooktrain.engine import HookBase, SimpleTrainer
from hooktrain.solver import OptimWrapper
from hooktrain.utils.env import seed_step
from hooktrain.utils.events import EventStorage


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
def test_losses_and_weights_equal_a_loop_written_by_hand_bit_for_bit(zero_first: bool) -> None:
    trainer = make(zero_grad_before_forward=zero_first)
    trainer.seed = 3
    trainer.train(0, 4)
    losses, model = losses_by_hand(4, zero_first)
    assert [v for v, _ in trainer.storage.history("total_loss").values()] == losses
    assert torch.equal(trainer.model.fc.weight, model.fc.weight)


def test_every_loss_of_every_iteration_is_kept_under_its_own_name_and_as_a_sum() -> None:
    trainer = make(two_losses=True)
    trainer.train(0, 4)
    a, b, total = (
        [v for v, _ in trainer.storage.history(n).values()]
        for n in ("loss_a", "loss_b", "total_loss")
    )
    assert len(a) == 4
    assert b == [2 * v for v in a]
    assert total == [x + y for x, y in zip(a, b, strict=True)]


def test_a_single_loss_in_a_dict_is_logged_under_its_name_too() -> None:
    class One(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss_cls": self.fc(x).mean()}

    model = One()
    trainer = SimpleTrainer(model, batches(1), sgd(model))
    trainer.train(0, 1)
    latest = trainer.storage.latest()
    assert latest["loss_cls"] == latest["total_loss"]


def test_a_prefix_stands_before_every_name() -> None:
    trainer = make()
    with trainer.storage:
        trainer._write_metrics({"loss_x": 1.0}, 0.5, prefix="gan/")
    assert {"gan/loss_x", "gan/total_loss"} <= set(trainer.storage.latest())


@pytest.mark.parametrize("name", ["data_time", "rank_data_time"])
def test_a_loss_cannot_take_the_name_of_the_trainers_own_metrics(name: str) -> None:
    class Clash(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {name: self.fc(x).mean()}

    model = Clash()
    with pytest.raises(ValueError, match=name):
        SimpleTrainer(model, batches(1), sgd(model)).train(0, 1)


LOSS = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ((1, 2), TypeError, r"must return a loss or a dict.*\(1, 2\)"),
        ({"loss": 1.0}, TypeError, "must return a loss or a dict"),
        ({}, TypeError, "must return a loss or a dict"),
        (dict.fromkeys(["total_loss", "loss"], LOSS), ValueError, "total_loss"),
    ],
)
def test_what_is_no_loss_is_refused(output: Any, error: type[Exception], message: str) -> None:
    class Wrong(Net):
        def forward(self, x: Tensor) -> Any:
            return output

    model = Wrong()
    with pytest.raises(error, match=message):
        SimpleTrainer(model, batches(1), sgd(model)).train(0, 1)


def test_a_model_in_evaluation_mode_is_refused() -> None:
    trainer = make()
    trainer.model.eval()
    with pytest.raises(RuntimeError, match="evaluation mode"):
        trainer.train(0, 1)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a torch optimizer"):
        SimpleTrainer(Net(), [], "sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gather_metric_period must be at least 1, but got 0"):
        make(gather_metric_period=0)


def test_an_exhausted_loader_starts_again_with_the_next_epoch() -> None:
    class Sampler:
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader(list[Tensor]):
        sampler = Sampler()

    trainer = make(Loader(batches(2)))
    trainer.train(0, 5)
    assert trainer.iter == 5
    assert Sampler.epochs == [1, 2]


def test_an_empty_loader_is_an_error_not_an_endless_loop() -> None:
    with pytest.raises(ValueError, match="data loader is empty"):
        make([]).train(0, 1)


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


def test_an_iteration_takes_as_many_batches_as_the_wrapper_accumulates() -> None:
    model, reference = Net().eval(), Net().eval()
    model.dropout.p = reference.dropout.p = 0.0
    trainer = SimpleTrainer(model, batches(6), OptimWrapper(sgd(model), accumulative_counts=3))
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


def test_another_loader_is_used_from_the_next_batch_on() -> None:
    trainer = make()
    trainer.train(0, 1)
    seen: list[Tensor] = []
    trainer.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    trainer.data_loader = batches(3)[2:]
    trainer.train(max_iter=2)
    assert torch.equal(seen[0], batches(3)[2])
