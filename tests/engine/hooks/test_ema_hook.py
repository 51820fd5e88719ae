import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA, CallbackHook
from hooktrain.model import (
    BaseAveragedModel,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from toys import linear_trainer


def test_the_average_follows_the_weights_and_the_model_keeps_the_raw_ones() -> None:
    plain, trainer = linear_trainer(), linear_trainer()
    ema = EMA(trainer.model, decay=0.5, warmup=False)
    start = trainer.model.fc.weight.detach().clone()
    trainer.register_hooks([ema])
    trainer.train(0, 1)
    plain.train(0, 1)
    raw = trainer.model.fc.weight
    assert torch.equal(raw, plain.model.fc.weight)
    torch.testing.assert_close(ema.average.module.fc.weight, 0.5 * start + 0.5 * raw)


def test_it_starts_from_the_weights_that_the_training_starts_from() -> None:
    trainer = linear_trainer(lr=0.0)
    ema = EMA(trainer.model)
    trainer.register_hooks([ema])
    torch.nn.init.ones_(trainer.model.fc.weight)  # as loading does
    trainer.train(0, 2)
    assert torch.equal(ema.average.module.fc.weight, torch.ones(3, 4))


def test_until_it_begins_the_average_is_a_copy() -> None:
    trainer = linear_trainer()
    average = StochasticWeightAverage(trainer.model, interval=2)
    hook = EMA(trainer.model, average=average, begin_iter=3)
    weights, seen = [], []

    def watch(trainer: SimpleTrainer) -> None:
        weights.append(trainer.model.fc.weight.detach().clone())
        seen.append(average.module.fc.weight.clone())

    trainer.register_hooks([hook, CallbackHook(after_step=watch)])
    trainer.train(0, 6)
    assert hook.average is average
    assert average.steps == 4
    assert [torch.equal(a, b) for a, b in zip(weights, seen, strict=True)] == [
        True
    ] * 3 + [False] * 3
    assert torch.equal(seen[3], weights[2])
    torch.testing.assert_close(seen[5], (weights[2] + weights[4]) / 2)


AVERAGES: dict[str, Callable[[nn.Module], BaseAveragedModel | None]] = {
    "usual": lambda model: None,
    "annealing": lambda model: MomentumAnnealingEMA(model, 0.4, 2, interval=2),
}


@pytest.mark.parametrize(
    ("kind", "begin_iter"), [("usual", 1), *(("annealing", i) for i in (1, 3, 4, 5, 6))]
)
def test_any_average_resumes_exactly_before_and_after_it_begins(
    kind: str, begin_iter: int
) -> None:
    def make() -> tuple[EMA, SimpleTrainer]:
        trainer = linear_trainer()
        hook = EMA(
            trainer.model, average=AVERAGES[kind](trainer.model), begin_iter=begin_iter
        )
        trainer.register_hooks([hook])
        return hook, trainer

    whole, whole_trainer = make()
    whole_trainer.train(0, 4)
    resumed, resumed_trainer = make()
    resumed_trainer.model.load_state_dict(whole_trainer.model.state_dict())
    resumed_trainer.load_state_dict(copy.deepcopy(whole_trainer.state_dict()))
    whole_trainer.train(max_iter=10)
    resumed_trainer.train(max_iter=10)
    assert resumed.average.steps == whole.average.steps == 11 - begin_iter
    assert torch.equal(resumed.average.module.fc.weight, whole.average.module.fc.weight)
    raw = resumed_trainer.model.fc.weight.detach().clone()
    with resumed.swap():
        assert torch.equal(
            resumed_trainer.model.fc.weight, resumed.average.module.fc.weight
        )
    assert torch.equal(resumed_trainer.model.fc.weight, raw)


def test_a_run_that_ends_before_the_average_begins_is_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for max_iter in (3, 2):
        assert caplog.records == []
        trainer = linear_trainer()
        trainer.register_hooks([EMA(trainer.model, begin_iter=3)])
        trainer.train(0, max_iter)
    assert "begins after 3 of 2 iterations" in caplog.text


def test_arguments_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(1, 1)
    average = StochasticWeightAverage(model)
    for arguments in ({"decay": 0.5}, {"warmup": False}):
        with pytest.raises(
            ValueError, match="give decay and warmup to the average itself"
        ):
            EMA(model, average=average, **arguments)
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\): 1\.0"):
        EMA(model, decay=1.0)
