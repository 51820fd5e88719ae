"""Models that own their step, trained."""

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_toys import Stream

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import StepTrainer
from hooktrain.engine.hooks import CallbackHook
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from toys import LinearLoss, linear_trainer


class OwnStep(LinearLoss):
    """The usual step, with the noise that makes a lost random state visible."""

    def train_step(
        self, data: Tensor, optim_wrapper: OptimWrapper
    ) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(data + 0.1 * torch.randn_like(data)).float()
        optim_wrapper.update_params(loss)
        return {"loss": loss, "acc": loss * 2}


class Plain(LinearLoss):
    def train_step(
        self, data: Tensor, optim_wrapper: OptimWrapper
    ) -> dict[str, Tensor]:
        loss = self(data)
        optim_wrapper.update_params(loss)
        return {"loss": loss}


class Two(nn.Module):
    """Two parts, the second of which is updated twice as often."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = LinearLoss(), LinearLoss()

    def train_step(
        self, data: Tensor, optim_wrapper: OptimWrapperDict
    ) -> dict[str, Tensor]:
        losses = {}
        for name in ("a", "b", "b"):
            losses[f"loss_{name}"] = loss = getattr(self, name)(data)
            optim_wrapper[name].update_params(loss)
        return losses


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 4, generator=generator) for _ in range(4)]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_models_own_step_equals_the_trainers_bit_for_bit() -> None:
    reference = linear_trainer()
    reference.train(0, 6)
    model = Plain()
    StepTrainer(model, data(), sgd(model)).train(0, 6)
    assert torch.equal(weights(model), weights(reference.model))


def test_what_the_step_returns_is_logged_as_it_is() -> None:
    model = OwnStep()
    trainer = StepTrainer(model, data(), sgd(model))
    trainer.train(0, 3)
    latest = trainer.storage.latest()
    assert latest["acc"][0] == 2 * latest["loss"][0]
    assert "total_loss" not in latest
    assert [i for _, i in trainer.storage.history("loss").values()] == [0, 1, 2]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_loss_that_is_not_finite_ends_the_run_and_a_metric_does_not(
    at_once: bool,
) -> None:
    class Broken(Plain):
        def train_step(
            self, data: Tensor, optim_wrapper: OptimWrapper
        ) -> dict[str, Tensor]:
            return {"ratio": torch.tensor(torch.inf), "loss_x": torch.tensor(torch.nan)}

    model = Broken()
    trainer = StepTrainer(model, data(), sgd(model), async_write_metrics=not at_once)

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
    trainer = StepTrainer(model, data(), wrapper)
    trainer.register_hooks([CallbackHook(after_backward=look)])
    trainer.train(0, 4)
    assert len(norms) == 2
    assert max(norms) < 10  # the scale is 65536
    assert wrapper.after_backward is None


def test_the_trainer_is_freed_although_its_wrapper_calls_it() -> None:
    model = Plain()
    wrapper = OptimWrapper(sgd(model))
    trainer = StepTrainer(model, data(), wrapper)
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
    StepTrainer(model, data(), wrappers).train(0, 6)
    assert [w.inner_count for w in wrappers.values()] == [6, 12]
    stream = [data()[i % 4] for i in range(6)]
    for name, size, repeat in (("a", 2, 1), ("b", 4, 2)):
        reference = LinearLoss()
        optimizer = sgd(reference)
        passes = [batch for batch in stream for _ in range(repeat)]
        while passes:
            for _ in range(size):
                (reference(passes.pop(0)) / size).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(weights(getattr(model, name)), weights(reference))


def test_the_last_update_of_one_optimizer_takes_what_is_left() -> None:
    model, reference = Plain(), LinearLoss()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=2)
    StepTrainer(model, data(), wrapper).train(0, 3)
    optimizer = sgd(reference)
    for group in (data()[:2], data()[2:3]):
        for batch in group:
            (reference(batch) / len(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weights(model), weights(reference))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stops", [[6], [2, 5]])
def test_a_run_that_is_asked_to_stop_inside_a_window_stops_at_its_end_and_resumes_bit_for_bit(
    tmp_path: Path, kind: str, stops: list[int]
) -> None:
    def make() -> tuple[StepTrainer, Checkpointer]:
        model = OwnStep()
        options: Any = {"accumulative_counts": 3, "clip_grad": {"max_norm": 0.5}}
        wrapper = (
            OptimWrapper(sgd(model), **options)
            if kind == "float32"
            else AmpOptimWrapper(sgd(model), kind, **options)
        )
        trainer = StepTrainer(model, Stream(), wrapper)
        return trainer, Checkpointer(model, str(tmp_path), trainer=trainer)

    torch.manual_seed(8)
    whole, _ = make()
    whole.train(0, 8)
    torch.manual_seed(8)
    part, saver = make()
    for stop in stops:
        part.register_hooks(
            [
                CallbackHook(
                    after_step=lambda t, at=stop: (
                        t.iter + 1 == at and t.request_stop("x")
                    )
                )
            ]
        )
        part.train(max_iter=8)
        assert part.iter == -(-stop // 3) * 3
        saver.save("stopped")
        torch.manual_seed(9)
        part, saver = make()
        saver.resume_or_load("", resume=True)
    part.train(max_iter=8)
    assert torch.equal(weights(part.model), weights(whole.model))
    losses = [v for v, i in part.storage.history("loss").values() if i >= 6]
    assert losses == [v for v, i in whole.storage.history("loss").values() if i >= 6]


def test_a_run_that_ends_inside_of_a_window_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Rarely(Plain):
        calls = 0

        def train_step(
            self, data: Tensor, optim_wrapper: OptimWrapper
        ) -> dict[str, Tensor]:
            self.calls += 1
            return (
                super().train_step(data, optim_wrapper) if self.calls % 2 == 0 else {}
            )

    model = Rarely()
    StepTrainer(model, data(), OptimWrapper(sgd(model), accumulative_counts=4)).train(
        0, 6
    )
    assert "its last backward passes made no update" in caplog.text


def test_a_step_that_broke_off_leaves_nothing_in_the_next_window() -> None:
    def failing(at: int) -> Callable[..., Any]:
        calls = [0]

        def step(
            model: nn.Module, data: Tensor, optim_wrapper: OptimWrapper
        ) -> dict[str, Tensor]:
            calls[0] += 1
            loss = model(data)
            if calls[0] == at:
                loss.backward()
                raise KeyboardInterrupt
            optim_wrapper.update_params(loss)
            return {"loss": loss}

        return step

    class Failing(LinearLoss):
        train_step = failing(at=3)

    model = Failing()
    batch = data()[:1]
    trainer = StepTrainer(model, batch, OptimWrapper(sgd(model), accumulative_counts=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 4)
    trainer.train(2, 4)
    reference = Plain()
    StepTrainer(
        reference, batch, OptimWrapper(sgd(reference), accumulative_counts=2)
    ).train(0, 4)
    assert torch.equal(weights(model), weights(reference))


class Silent(Plain):
    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> Any:
        super().train_step(data, optim_wrapper)


def test_hooks_see_the_last_batch_and_what_the_step_returned_if_anything() -> None:
    for kind in (Plain, Silent):
        model, batches, seen = kind(), data()[:2], []  # type: ignore[var-annotated]
        trainer = StepTrainer(model, batches, sgd(model))
        note = partial(
            lambda seen, t: seen.append((t.last_batch, t.last_outputs)), seen
        )
        trainer.register_hooks([CallbackHook(after_step=note)])
        trainer.train(0, 2)
        assert all(
            batch is given for (batch, _), given in zip(seen, batches, strict=True)
        )
        assert [list(outputs) for _, outputs in seen] == [
            ["loss"] if kind is Plain else []
        ] * 2


class Counting(OptimWrapper):
    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int
    ) -> None:
        self.counts = init_counts, max_counts


def test_a_wrapper_is_told_of_the_length_of_the_run_as_in_mmengine() -> None:
    model = Plain()
    wrapper = Counting(sgd(model))
    StepTrainer(model, data(), wrapper).train(max_iter=3)
    assert wrapper.counts == (0, 3)


class Plainly(Two):
    """Calls plain optimizers, as code without wrappers does."""

    def train_step(self, data: Tensor, optimizers: Any) -> None:  # type: ignore[override]
        for name in ("a", "b"):
            optimizers[name].zero_grad()
            getattr(self, name)(data).backward(retain_graph=True)
            optimizers[name].step()


def test_a_dict_of_torch_optimizers_is_what_several_wrappers_are() -> None:
    model, expected = Plainly(), Plainly()
    expected.load_state_dict(model.state_dict())
    optimizers = {name: sgd(getattr(expected, name)) for name in ("a", "b")}
    for batch in data():
        expected.train_step(batch, optimizers)
    made = {name: sgd(getattr(model, name)) for name in ("a", "b")}
    trainer = StepTrainer(model, data(), made)
    trainer.train(0, 4)
    assert isinstance(trainer.optim_wrapper, OptimWrapperDict)
    assert torch.equal(weights(model), weights(expected))
