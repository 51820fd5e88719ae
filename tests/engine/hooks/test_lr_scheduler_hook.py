from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from hooktrain.engine.hooks import CallbackHook, LRScheduler
from hooktrain.solver import (
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
    StepParamScheduler,
)
from toy import linear_trainer


def rates(trainer: Any) -> list[float]:
    return [value for value, _ in trainer.storage.history("lr").values()]


def test_the_rate_that_is_logged_is_the_one_used_in_the_iteration() -> None:
    trainer = linear_trainer(LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)), lr=8.0)
    trainer.train(0, 4)
    assert rates(trainer) == [8.0, 6.0, 4.0, 2.0]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_a_second_longer_run_lays_the_schedule_over_its_whole_length() -> None:
    trainer = linear_trainer(LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)), lr=8.0)
    trainer.train(0, 2)
    trainer.train(max_iter=4)
    assert rates(trainer) == [8.0, 4.0, 4.0, 2.0]


def test_a_torch_scheduler_is_stepped_once_an_iteration() -> None:
    trainer = linear_trainer(lr=1.0)
    trainer.register_hooks([LRScheduler(scheduler=StepLR(trainer.optimizer, 2, gamma=0.5))])
    trainer.train(0, 5)
    assert rates(trainer) == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_scheduler_of_the_trainer_is_found() -> None:
    trainer = linear_trainer(LRScheduler(), lr=1.0)
    trainer.scheduler = StepLR(trainer.optimizer, 1, gamma=0.5)  # type: ignore[attr-defined]
    trainer.train(0, 2)
    assert rates(trainer) == [1.0, 0.5]


@pytest.mark.parametrize(
    "scheduler", [ConstantParamScheduler(1.0), StepParamScheduler(4, [1.0, 0.5])]
)
def test_schedules_that_end_with_the_run_survive_its_last_iteration(
    scheduler: ParamScheduler,
) -> None:
    trainer = linear_trainer(LRScheduler(scheduler=scheduler))
    trainer.train(0, 4)
    assert len(rates(trainer)) == 4


@pytest.mark.parametrize("parts", [None, {"iteration", "hooks"}, {"iteration"}])
def test_a_multiplier_continues_where_it_was_even_without_the_optimizers_state(
    parts: Any,
) -> None:
    def make() -> Any:
        return linear_trainer(LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)))

    whole, first, second = make(), make(), make()
    whole.train(0, 8)
    first.train(0, 3)
    # The schedule is laid over max_iter, so the first part must know the whole length.
    state = linear_trainer(LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)))
    stop = CallbackHook(after_step=lambda t: t.iter == 2 and t.request_stop("half way"))
    state.register_hooks([stop])
    state.train(0, 8)
    second.load_state_dict(state.state_dict(), only=parts)
    second.train(max_iter=8)
    assert rates(second)[-5:] == pytest.approx(rates(whole)[3:], rel=1e-12)


def test_reduce_on_plateau_steps_after_each_new_value_of_its_metric() -> None:
    values = {1: 1.0, 3: 1.0, 5: 1.0}
    put = CallbackHook(
        after_step=lambda t: t.iter in values and t.storage.put_scalar("val", values[t.iter])
    )
    trainer = linear_trainer(put, lr=1.0)
    scheduler = ReduceLROnPlateau(trainer.optimizer, factor=0.5, patience=1)
    trainer.register_hooks([LRScheduler(scheduler=scheduler, metric="val")])
    trainer.train(0, 8)
    assert rates(trainer) == [1.0] * 6 + [0.5] * 2


def test_reduce_on_plateau_without_a_metric_is_refused_and_a_metric_without_it_too() -> None:
    optimizer = linear_trainer().optimizer
    with pytest.raises(ValueError, match="metric="):
        LRScheduler(scheduler=ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="'val'"):
        LRScheduler(scheduler=StepLR(optimizer, 1), metric="val")
    with pytest.raises(TypeError, match=r"0\.5"):
        LRScheduler(scheduler=0.5)  # type: ignore[arg-type]


def test_the_group_with_most_parameters_stands_for_all() -> None:
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    groups = [{"params": [a], "lr": 1.0}, {"params": [b, c], "lr": 2.0}]
    best = LRScheduler.get_best_param_group_id
    assert best(torch.optim.SGD(groups, lr=0.1)) == 1
    single = [{"params": [p], "lr": lr} for p, lr in ((a, 1.0), (b, 2.0), (c, 2.0))]
    assert best(torch.optim.SGD(single, lr=0.1)) == 1


def test_an_optimizer_put_in_between_two_runs_is_scheduled_in_the_second() -> None:
    trainer = linear_trainer(LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)), lr=8.0)
    trainer.train(0, 4)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=4.0)
    trainer.train(0, 4)
    assert rates(trainer) == [4.0, 3.0, 2.0, 1.0]
