import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer, StepTrainer
from hooktrain.engine.hooks import EMA, CallbackHook, PreciseBN
from hooktrain.events import get_event_storage
from hooktrain.model import BaseModel, StochasticWeightAverage
from toys import LinearLoss, linear_trainer


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


@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (lambda model: EMA(model, 0.99, warmup=False), True),
        (lambda model: EMA(model, 0.99), False),
        (lambda model: EMA(model, 0.9, warmup=False), False),
        (lambda model: EMA(model, 0.9, warmup=False, begin_iter=5), True),
        (lambda model: EMA(model, begin_iter=11), True),
        (lambda m: EMA(m, average=StochasticWeightAverage(m), begin_iter=11), True),
        (lambda m: EMA(m, average=StochasticWeightAverage(m, 4), begin_iter=6), False),
    ],
)
def test_an_average_that_has_hardly_begun_when_the_run_ends_is_told_at_the_start(
    make: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer()
    trainer.register_hooks([make(trainer.model)])
    trainer.train(max_iter=10)
    assert len(caplog.messages) == is_told
    assert all("before the average" in message for message in caplog.messages)


def test_the_log_says_which_weights_an_evaluation_sees(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer()
    trainer.register_hooks([EMA(trainer.model)])
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(max_iter=2)
    assert "Evaluations outside EMA.swap() see the raw weights" in caplog.text


def registered(ema: EMA, trainer: SimpleTrainer) -> None:
    trainer.register_hooks([ema])


def updated_by_hand(ema: EMA, trainer: SimpleTrainer) -> None:
    ema.average.update_parameters(trainer.model)


def loaded(ema: EMA, trainer: SimpleTrainer) -> None:
    other = EMA(trainer.model)
    updated_by_hand(other, trainer)
    ema.load_state_dict(other.state_dict())


@pytest.mark.parametrize("prepare", [None, registered, updated_by_hand, loaded])
def test_an_average_that_nothing_updates_is_told_when_it_is_used(
    prepare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer()
    ema = EMA(trainer.model)
    if prepare:
        prepare(ema, trainer)
    with ema.swap():
        pass
    assert len(caplog.messages) == (prepare is None)
    assert all("register the hook" in message for message in caplog.messages)


@pytest.mark.parametrize("begin_iter", [1, 3, 4, 5, 6])
def test_an_average_resumes_exactly_before_and_after_it_begins(begin_iter: int) -> None:
    def make() -> tuple[EMA, SimpleTrainer]:
        trainer = linear_trainer()
        hook = EMA(trainer.model, begin_iter=begin_iter)
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


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


def test_the_average_of_a_model_with_extra_state_resumes() -> None:
    saved, resumed = linear_trainer(), linear_trainer()
    averages = []
    for trainer in (saved, resumed):
        trainer.model.fc.__class__ = WithExtraState
        hook = EMA(trainer.model)
        trainer.register_hooks([hook])
        averages.append(hook.average.module.fc)
    saved.train(0, 2)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert torch.equal(averages[0].weight, averages[1].weight)


def test_the_average_of_another_model_is_refused_before_anything_is_loaded() -> None:
    saved = linear_trainer()
    saved.register_hooks([EMA(saved.model)])
    saved.train(0, 1)
    other = linear_trainer()
    extended = copy.deepcopy(other.model)
    extended.fc = nn.Linear(4, 5)  # the average was made before the head was replaced
    ema = EMA(extended)
    other.register_hooks([ema])
    before = copy.deepcopy(ema.state_dict())
    with pytest.raises(ValueError, match="fc"):
        other.load_state_dict(saved.state_dict())
    assert other.done == 0
    for name, value in ema.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "make", [EMA, lambda model: PreciseBN(1, model, [torch.ones(2, 2)], 1)]
)
def test_the_model_of_another_trainer_is_refused(make: Any) -> None:
    trainer = linear_trainer(make(LinearLoss()))
    with pytest.raises(ValueError, match="another model"):
        trainer.train(0, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        get_event_storage().put_scalar("seen", 1.0)
        return self.bn(x).square().sum()


def make(data: list[Tensor], **kwargs: Any) -> SimpleTrainer:
    model = Net()
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.0))
    kwargs = {"model": model, "data_loader": data, **kwargs}
    trainer.register_hooks([PreciseBN(**kwargs)])
    return trainer


@pytest.mark.parametrize("own", [{}, {"model": None}])
def test_precise_statistics_are_those_of_the_whole_data_set(own: Any) -> None:
    data = [torch.randn(8, 2) for _ in range(4)]
    trainer = make(data, period=0, num_iter=4, **own)
    trainer.train(0, 3)
    everything = torch.cat(data)
    torch.testing.assert_close(trainer.model.bn.running_mean, everything.mean(0))
    torch.testing.assert_close(
        trainer.model.bn.running_var, everything.var(0, unbiased=False)
    )
    assert trainer.model.bn.momentum == 0.1


def test_what_the_model_records_while_measuring_is_not_part_of_the_run() -> None:
    trainer = make([torch.randn(8, 2)], period=0, num_iter=7)
    trainer.train(0, 2)
    assert len(trainer.storage.history("seen").values()) == 2


@pytest.mark.parametrize("num_iter", [3, 5])
def test_a_loader_that_is_exhausted_starts_again(num_iter: int) -> None:
    trainer = make([torch.randn(8, 2) for _ in range(3)], period=1, num_iter=num_iter)
    trainer.train(0, 3)
    assert trainer.iter == 3


def test_a_lost_position_is_told_of_the_hook_by_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = [torch.randn(8, 2)]
    make(data, period=0, num_iter=1).load_state_dict(
        make(data, period=0, num_iter=1).state_dict()
    )
    lost = [text.partition(" could not")[0] for text in caplog.messages]
    assert sorted(lost) == [
        "The position in the data",
        "The position in the data of PreciseBN",
    ]


class Norm(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        return {"loss": self.bn(x).square().sum()} if mode == "loss" else None


def test_a_base_model_is_measured_as_it_is_trained() -> None:
    model, data = Norm(), [(torch.randn(8, 2),) for _ in range(3)]
    trainer = StepTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer.register_hooks([PreciseBN(0, model, data, 3)])
    trainer.train(0, 1)
    torch.testing.assert_close(
        model.bn.running_mean, torch.cat([x for (x,) in data]).mean(0)
    )


def test_the_state_of_other_data_is_refused_before_anything_is_loaded() -> None:
    def hook(size: int) -> PreciseBN:
        data = [torch.ones(2)] * size
        return PreciseBN(
            1, Net(), build_train_loader(data, total_batch_size=2, seed=0), 2
        )

    with pytest.raises(ValueError, match="dataset_size=4"):
        hook(6).check_state_dict(hook(4).state_dict())


def test_the_trainers_own_position_in_the_data_is_not_moved() -> None:
    loader = build_train_loader([torch.ones(2)] * 4, total_batch_size=2, seed=0)
    model = Net()
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer.register_hooks([PreciseBN(1, model, loader, 2)])
    with pytest.raises(ValueError, match="data_loader"):
        trainer.train(0, 1)
    assert loader.batches == 0
