"""Models with a step of their own, against loops written by hand."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import StepTrainer
from hooktrain.engine.hooks import CallbackHook
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from toys import LinearLoss, Stream, batches, linear_trainer, sgd


class NoisyStep(LinearLoss):
    """The usual step, with the noise that makes a lost random state visible."""

    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> Any:
        with optim_wrapper.optim_context(self):
            loss = self(data + 0.1 * torch.randn_like(data)).float()
        optim_wrapper.update_params(loss)
        return {"loss": loss, "acc": loss * 2}


class Plain(LinearLoss):
    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> Any:
        loss = self(data)
        optim_wrapper.update_params(loss)
        return {"loss": loss}


class Two(nn.Module):
    """Two parts, the second of which is updated twice as often."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = LinearLoss(), LinearLoss()

    def train_step(self, data: Tensor, optim_wrapper: OptimWrapperDict) -> Any:
        losses = {}
        for name in ("a", "b", "b"):
            losses[f"loss_{name}"] = loss = getattr(self, name)(data)
            optim_wrapper[name].update_params(loss)
        return losses


def weights_of(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters())


def test_the_models_own_step_equals_the_trainers_bit_for_bit() -> None:
    reference = linear_trainer()
    reference.train(0, 6)
    model = Plain()
    StepTrainer(model, batches(4), sgd(model)).train(0, 6)
    assert torch.equal(weights_of(model), weights_of(reference.model))


def test_what_the_step_returns_is_logged_as_it_is() -> None:
    model = NoisyStep()
    trainer = StepTrainer(model, batches(4), sgd(model))
    trainer.train(0, 3)
    latest = trainer.storage.latest()
    assert latest["acc"][0] == 2 * latest["loss"][0]
    assert "total_loss" not in latest
    assert [i for _, i in trainer.storage.history("loss").values()] == [0, 1, 2]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_step_whose_loss_is_not_finite_ends_the_run(at_once: bool) -> None:
    class Broken(Plain):
        def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> Any:
            return {"ratio": torch.tensor(torch.inf), "loss_x": torch.tensor(torch.nan)}

    model = Broken()
    trainer = StepTrainer(
        model, batches(4), sgd(model), async_write_metrics=not at_once
    )

    def train_and_save() -> None:
        trainer.train(0, 1)
        trainer.state_dict()

    with pytest.raises(FloatingPointError, match=r"iteration=0!"):
        train_and_save()


def test_after_backward_hooks_run_in_each_update_with_the_true_gradients() -> None:
    norms: list[float] = []

    def look(trainer: Any) -> None:
        norms.append(trainer.model.fc.weight.grad.norm().item())

    model = Plain()
    wrapper = AmpOptimWrapper(sgd(model), "float16", accumulative_counts=2)
    trainer = StepTrainer(model, batches(4), wrapper)
    trainer.register_hooks([CallbackHook(after_backward=look)])
    trainer.train(0, 4)
    assert len(norms) == 2
    assert max(norms) < 10  # the scale is 65536
    assert wrapper.after_backward is None


def test_the_trainer_is_freed_although_its_wrapper_calls_it() -> None:
    model = Plain()
    wrapper = OptimWrapper(sgd(model))
    trainer = StepTrainer(model, batches(4), wrapper)
    trainer.train(0, 1)
    alive = weakref.ref(trainer)
    del trainer
    assert alive() is None


def test_several_optimizers_each_accumulate_on_their_own() -> None:
    model = Two()
    wrappers = OptimWrapperDict(
        a=OptimWrapper(sgd(model.a), accumulative_counts=2),
        b=OptimWrapper(sgd(model.b), accumulative_counts=4),
    )
    StepTrainer(model, batches(4), wrappers).train(0, 6)
    assert [w.inner_count for w in wrappers.values()] == [6, 12]
    stream = [batches(4)[i % 4] for i in range(6)]
    for name, size, repeat in (("a", 2, 1), ("b", 4, 2)):
        reference = LinearLoss()
        optimizer = sgd(reference)
        passes = [batch for batch in stream for _ in range(repeat)]
        while passes:
            for _ in range(size):
                (reference(passes.pop(0)) / size).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(weights_of(getattr(model, name)), weights_of(reference))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stops", [[6], [2, 5]])
def test_a_run_stopped_inside_an_accumulation_resumes_bit_for_bit(
    tmp_path: Path, kind: str, stops: list[int]
) -> None:
    def make(stop: int = 0) -> tuple[StepTrainer, Checkpointer]:
        model = NoisyStep()
        options: Any = {"accumulative_counts": 3, "clip_grad": {"max_norm": 0.5}}
        wrapper = OptimWrapper(sgd(model), **options)
        if kind != "float32":
            wrapper = AmpOptimWrapper(sgd(model), kind, **options)
        trainer = StepTrainer(model, Stream(), wrapper)
        trainer.seed = 8

        def ask(trainer: Any) -> None:
            if trainer.iter + 1 == stop:
                trainer.request_stop("enough")

        trainer.register_hooks([CallbackHook(after_step=ask)])
        return trainer, Checkpointer(model, str(tmp_path), trainer=trainer)

    whole, _ = make()
    whole.train(0, 8)
    for stop in stops:
        part, saver = make(stop)
        saver.resume_or_load("", resume=True)
        part.train(max_iter=8)
        assert part.iter == -(-stop // 3) * 3
        saver.save("stopped")
    part, saver = make()
    saver.resume_or_load("", resume=True)
    part.train(max_iter=8)
    assert torch.equal(weights_of(part.model), weights_of(whole.model))
    losses = [v for v, i in part.storage.history("loss").values() if i >= 6]
    assert losses == [v for v, i in whole.storage.history("loss").values() if i >= 6]


def test_a_run_that_ends_inside_an_accumulation_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Rarely(Plain):
        calls = 0

        def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> Any:
            self.calls += 1
            if self.calls % 2 == 0:
                super().train_step(data, optim_wrapper)

    model = Rarely()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=4)
    StepTrainer(model, batches(4), wrapper).train(0, 6)
    assert "not used" in caplog.text


class BreaksOff(Plain):
    calls = 0

    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> Any:
        self.calls += 1
        if self.calls == 3:
            self(data).backward()
            raise KeyboardInterrupt
        return super().train_step(data, optim_wrapper)


def test_a_step_that_broke_off_leaves_nothing_in_the_next_accumulation() -> None:
    def make(model: nn.Module) -> StepTrainer:
        wrapper = OptimWrapper(sgd(model), accumulative_counts=2)
        return StepTrainer(model, batches(1), wrapper)

    whole, broken = make(Plain()), make(BreaksOff())
    whole.train(0, 4)
    with pytest.raises(KeyboardInterrupt):
        broken.train(0, 4)
    broken.train(2, 4)
    assert torch.equal(weights_of(broken.model), weights_of(whole.model))


class Silent(Plain):
    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> Any:
        super().train_step(data, optim_wrapper)


@pytest.mark.parametrize(("kind", "names"), [(Plain, ["loss"]), (Silent, [])])
def test_hooks_see_the_last_batch_with_its_outputs(
    kind: type[Plain], names: list[str]
) -> None:
    model, data = kind(), batches(2)
    seen: list[tuple[Tensor, Any]] = []
    trainer = StepTrainer(model, data, sgd(model))
    note = CallbackHook(
        after_step=lambda t: seen.append((t.last_batch, t.last_outputs))
    )
    trainer.register_hooks([note])
    trainer.train(0, 2)
    assert [list(outputs) for _, outputs in seen] == [names] * 2
    assert all(batch is given for (batch, _), given in zip(seen, data, strict=True))


class Counting(OptimWrapper):
    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int
    ) -> None:
        self.counts = init_counts, max_counts


def test_a_wrapper_is_told_of_the_length_of_the_run_as_in_mmengine() -> None:
    model = Plain()
    wrapper = Counting(sgd(model))
    StepTrainer(model, batches(4), wrapper).train(max_iter=3)
    assert wrapper.counts == (0, 3)


def test_an_optimizer_that_the_step_forgets_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Forgets(Two):
        def train_step(self, data: Tensor, optim_wrapper: OptimWrapperDict) -> Any:
            loss = self.a(data) + self.b(data)
            optim_wrapper["a"].update_params(loss)  # which accumulates longer
            return {"loss": loss}

    model = Forgets()
    waiting = OptimWrapper(sgd(model.a), accumulative_counts=40)
    wrappers = OptimWrapperDict(a=waiting, b=OptimWrapper(sgd(model.b)))
    StepTrainer(model, batches(4), wrappers).train(0, 40)
    text = "The optimizer b has not made a step so far"
    assert [record.message for record in caplog.records] == [text]
