"""A trainer inside of another one, which makes its steps as detectron2's DefaultTrainer does."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from hooktrain import engine
from hooktrain.compat.detectron2 import LRScheduler, SimpleTrainer, TrainerBase, hooks
from hooktrain.data import build_train_loader
from hooktrain.engine import StepTrainer
from hooktrain.solver import OptimWrapper, OptimWrapperDict

DATA = list(torch.arange(12.0).reshape(6, 2) / 12)
EVENTS = ("before_train", "before_step", "after_backward", "after_step", "after_train")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + torch.rand(2)).square().mean()

    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> dict[str, Any]:
        loss = self(data)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def made(kind: Any, accumulative_counts: int = 1) -> Any:
    model = Net()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=accumulative_counts)
    stream: Any = build_train_loader(DATA, total_batch_size=1, seed=0)  # type: ignore[arg-type]
    trainer = kind(model, stream, wrapper)
    trainer.seed = 3
    return trainer


class Copied(TrainerBase):
    """A copy of detectron2's SimpleTrainer, with a state of its own."""

    def __init__(self, model: Net, data: Any, wrapper: OptimWrapper) -> None:
        super().__init__()
        self.model = model
        self.optimizer = wrapper.optimizer

    def run_step(self) -> None:
        loss = self.model(DATA[self.iter % len(DATA)])
        self.optimizer.zero_grad()
        loss.backward()
        self.after_backward()
        SimpleTrainer.write_metrics({"total_loss": loss}, 0.0, self.iter)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer"])


class WithScale(SimpleTrainer):
    """A trainer whose state has one more entry, and which is not loaded in parts."""

    scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"scale": self.scale}

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self.scale = state_dict["scale"]


class Outer(TrainerBase):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._trainer = inner
        self.seed = 3

    def run_step(self) -> None:
        self._trainer.iter = self.iter
        self._trainer.run_step()


def noting(seen: list[str]) -> hooks.CallbackHook:
    def note(event: str) -> Callable[[Any], None]:
        return lambda trainer: seen.append(event)

    return hooks.CallbackHook(**{event: note(event) for event in EVENTS})


KINDS = [engine.SimpleTrainer, SimpleTrainer, StepTrainer, Copied, WithScale]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_trains_inside_as_it_does_alone(kind: Any) -> None:
    alone = made(kind)
    alone.train(0, 5)
    outer = Outer(made(kind))
    seen: list[str] = []
    outer.register_hooks([noting(seen)])
    outer.train(0, 5)
    assert torch.equal(outer._trainer.model.fc.weight, alone.model.fc.weight)
    assert outer.storage.histories().keys() == alone.storage.histories().keys()
    assert seen == ["before_train", *EVENTS[1:4] * 5, "after_train"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_inside_is_resumed_bit_for_bit(kind: Any) -> None:
    whole = Outer(made(kind))
    whole.train(0, 4)
    state = copy.deepcopy((whole._trainer.model.state_dict(), whole.state_dict()))
    whole.train(4, 6)
    again = Outer(made(kind))
    again._trainer.model.load_state_dict(state[0])
    again.load_state_dict(state[1])
    assert again.iter == 3
    again.train(4, 6)
    assert torch.equal(again._trainer.model.fc.weight, whole._trainer.model.fc.weight)


def test_what_a_trainer_inside_adds_to_the_state_is_loaded() -> None:
    first, second = Outer(made(WithScale)), Outer(made(WithScale))
    first._trainer.scale = 2.0
    second.load_state_dict(first.state_dict())
    assert second._trainer.scale == 2.0


@pytest.mark.parametrize("kind", [SimpleTrainer, StepTrainer, Copied])
@pytest.mark.parametrize("nested", [False, True])
def test_the_optimizer_of_a_trainer_inside_is_loaded_alone(
    kind: Any, nested: bool
) -> None:
    first = Outer(made(kind))
    first.train(0, 3)
    state = first.state_dict()
    if nested:  # as detectron2 saves it
        inner = {"iteration": 2, "optimizer": state.pop("optimizer")}
        state["_trainer"] = inner
    second = Outer(made(kind))
    second.load_state_dict(
        {name: state[name] for name in state.keys() & {"optimizer", "_trainer"}}
    )
    buffers = []
    for trainer in (first, second):
        saved = trainer._trainer.optimizer.state_dict()
        buffers.append(saved["state"][0]["momentum_buffer"])
    assert torch.equal(*buffers)
    assert second.done == 0
    untouched = Outer(made(kind))
    untouched.load_state_dict({"iteration": state["iteration"]})
    assert untouched._trainer.optimizer.state_dict()["state"] == {}
    assert untouched.done == 3


def test_a_stop_completes_the_accumulation_of_a_trainer_inside() -> None:
    outer = Outer(made(StepTrainer, accumulative_counts=2))
    saved: list[bool] = []

    def stop(trainer: Any) -> None:
        saved.append(trainer.can_save)
        if trainer.iter == 2:
            trainer.request_stop("enough")

    outer.register_hooks([hooks.CallbackHook(after_step=stop)])
    outer.train(0, 10)
    assert (outer.done, outer.max_iter, outer._trainer.max_iter) == (4, 4, 4)
    assert saved == [False, True, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_run_leaves_nothing_behind(kind: Any) -> None:
    inner = made(kind)
    seen: list[str] = []
    for event in ("before_train", "after_step", "after_train"):
        outer = Outer(inner)
        outer.register_hooks(
            [hooks.CallbackHook(**{event: lambda trainer: 1 / 0}), noting(seen)]
        )
        with pytest.raises(ZeroDivisionError):
            outer.train(0, 1)
        assert seen.count("after_train") == seen.count("before_train")
        assert inner.hooks == ()
        assert inner._run.begun is None
        if kind is not Copied:
            assert inner.optim_wrapper.after_backward is None
    calls: list[str] = []
    last = Outer(inner)
    last.register_hooks([noting(calls)])
    last.train(0, 1)
    assert calls == list(EVENTS)


def test_parts_that_do_not_belong_together_are_refused_when_the_run_begins() -> None:
    outer = Outer(SimpleTrainer(Net(), DATA, sgd(Net())))
    with pytest.raises(ValueError, match="optimizer"):
        outer.train(0, 1)
    assert outer._trainer.hooks == ()


class AsThere(SimpleTrainer):
    """With a step as copies of detectron2's have it."""

    def run_step(self) -> None:
        loss = self.model(next(self._data_loader_iter))
        self.optimizer.zero_grad()
        loss.backward()
        self.after_backward()
        self.concurrent_executor.submit(
            self._write_metrics, {"loss": loss}, 0.0, iter=self.iter
        )
        self.optimizer.step()


def test_a_step_may_submit_its_metrics() -> None:
    alone = made(SimpleTrainer)
    alone.train(0, 5)
    trainer = made(AsThere)
    trainer.train(0, 5)
    losses = [each.storage.history("total_loss").values() for each in (alone, trainer)]
    assert losses[0] == losses[1]
    trainer.concurrent_executor.shutdown(wait=True)


def test_a_property_that_would_hide_the_batches_is_refused() -> None:
    with pytest.raises(TypeError, match="prepare_batch"):

        class _Own(SimpleTrainer):
            @property
            def _data_loader_iter(self) -> Any:
                return iter(self.data_loader)


class Loader(list[torch.Tensor]):
    """A list that can be seen to be freed."""


def test_reset_data_loader_frees_the_old_loader_before_it_builds_the_new_one() -> None:
    trainer = made(SimpleTrainer)
    trainer.data_loader = Loader(DATA)
    old = weakref.ref(trainer.data_loader)
    trainer.train(0, 1)

    def build() -> Loader:
        gc.collect()
        assert old() is None
        return Loader(DATA[:1])

    trainer.reset_data_loader(build)
    trainer.train(max_iter=3)
    assert trainer.iter == 3


class OwnRate(LRScheduler):
    """It notes the rate by the names that detectron2's hook has."""

    def after_step(self) -> None:
        assert isinstance(self._optimizer, torch.optim.Optimizer)
        group = self._optimizer.param_groups[self._best_param_group_id]
        rates.append(group["lr"])
        super().after_step()


rates: list[float] = []


def test_a_hook_of_schedules_has_its_optimizer_and_the_group_of_the_rate() -> None:
    rates.clear()
    trainer = made(SimpleTrainer)
    trainer.optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 1.0})
    trainer.scheduler = StepLR(trainer.optimizer, 1, 0.5)
    trainer.register_hooks([OwnRate()])
    for end in (2, 3):
        trainer.train(max_iter=end)
    assert rates == [0.1, 0.05, 0.025]
    both = OptimWrapperDict(a=OptimWrapper(sgd(Net())))
    several = StepTrainer(Net(), DATA, both)
    hook = LRScheduler(scheduler=[])
    several.register_hooks([hook])
    hook.before_train()
    assert hook._optimizer is None


class Assigned(SimpleTrainer):
    """It calls the constructor of another base, or none."""

    def __init__(self, model: Net, data: Any, wrapper: OptimWrapper) -> None:
        self.model = model
        self.data_loader = data
        self.optimizer = wrapper.optimizer


class AssignedBase(Assigned):
    def __init__(self, *args: Any) -> None:
        TrainerBase.__init__(self)
        super().__init__(*args)


class Empty(TrainerBase):
    def __init__(self) -> None:
        pass


def test_a_constructor_that_was_not_called_is_named() -> None:
    for use in (
        lambda: made(Assigned),
        lambda: made(AssignedBase),
        lambda: Empty().train(0, 1),
        lambda: Empty().register_hooks([]),
    ):
        with pytest.raises(RuntimeError, match=r"super\(\).__init__"):
            use()


class OfTwo(Outer):
    """It steps two trainers, of which one is not its ``_trainer``."""

    def run_step(self) -> None:
        super().run_step()
        second = made(SimpleTrainer)
        second.iter = self.iter
        second.run_step()


def test_a_second_trainer_inside_is_refused() -> None:
    outer = OfTwo(made(SimpleTrainer))
    with pytest.raises(RuntimeError, match="no run has begun"):
        outer.train(0, 2)


def test_hooks_of_a_trainer_inside_are_called() -> None:
    outer = Outer(made(SimpleTrainer))
    seen: list[str] = []
    outer._trainer.register_hooks([noting(seen)])
    outer.train(0, 2)
    assert seen == ["before_train", *EVENTS[1:4] * 2, "after_train"]


def test_a_hook_of_a_trainer_inside_may_stop_the_run() -> None:
    outer = Outer(made(SimpleTrainer))

    def stop(trainer: Any) -> None:
        if trainer.done == 2:
            trainer.request_stop("enough")

    outer._trainer.register_hooks([hooks.CallbackHook(after_step=stop)])
    outer.train(0, 4)
    assert outer.done == 2
    assert outer.stop_reason == "enough"


def test_a_trainer_inside_is_inside_of_one_trainer_after_the_other() -> None:
    inner = made(SimpleTrainer)
    calls: dict[str, list[str]] = {"first": [], "second": []}
    for start, seen in enumerate(calls.values()):
        outer = Outer(inner)
        outer.register_hooks([noting(seen)])
        outer.train(start, start + 1)
    assert list(calls.values()) == [list(EVENTS)] * 2
    inner.train(2, 3)


class SeveralValues(Net):
    """In detectron2 all values are added up, whatever their names and gradients."""

    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x)
        values = {"loss": 2 * loss, "loss_cls": loss, "sim": loss}
        return {**values, "accuracy": torch.tensor(0.5)}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_all_values_of_a_dict_of_losses_are_added_up(accumulated: int) -> None:
    model = SeveralValues()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=accumulated)
    trainer = SimpleTrainer(model, [DATA[0]] * 4, wrapper)
    before = model.fc.bias.detach().clone()
    trainer.train(0, 1)
    latest = {name: value for name, (value, _) in trainer.storage.latest().items()}
    assert latest["total_loss"] == pytest.approx(4 * latest["loss_cls"] + 0.5)
    single = Net()
    wrapper = OptimWrapper(sgd(single), accumulative_counts=accumulated)
    engine.SimpleTrainer(single, [DATA[0]] * 4, wrapper).train(0, 1)
    torch.testing.assert_close(before - model.fc.bias, 4 * (before - single.fc.bias))


def test_the_order_of_registration_alone_decides_whatever_the_phases() -> None:
    seen: list[str] = []

    class Named(hooks.HookBase):
        def __init__(self, name: str, phase: str) -> None:
            self.name, self.phase = name, phase

        def after_step(self) -> None:
            seen.append(self.name)

    trainer = made(SimpleTrainer)
    trainer.register_hooks([Named("a", "end"), Named("b", "time")])
    trainer.register_hooks([Named("c", "save"), Named("d", "no phase")])
    trainer.train(0, 1)
    assert seen == ["a", "b", "c", "d"]
