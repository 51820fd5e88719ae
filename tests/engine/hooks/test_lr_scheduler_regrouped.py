"""Schedules of a run that goes on with other parameter groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import LRScheduler
from hooktrain.solver import CosineAnnealingLR, LinearLR, LinearParamScheduler, MultiStepLR
from toy import LinearLoss

Make = Callable[[torch.optim.Optimizer], Any]


def warmed_up(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        LinearLR(optimizer, start_factor=0.25, by_epoch=False, end=3),
        CosineAnnealingLR(optimizer, by_epoch=False, begin=3, end=12, eta_min=0.125),
        MultiStepLR(optimizer, milestones=[8], by_epoch=False),
    ]


def make(schedule: Make, split: bool) -> SimpleTrainer:
    model = LinearLoss()
    named = {"weight": model.fc.weight, "bias": model.fc.bias}
    names = [["weight"], ["bias"]] if split else [["weight", "bias"]]
    groups = [{"params": [named[n] for n in group], "param_names": group} for group in names]
    optimizer = torch.optim.SGD(groups, lr=8.0)
    trainer = SimpleTrainer(model, [torch.zeros(1, 4)], optimizer)
    trainer.register_hooks([LRScheduler(scheduler=schedule(optimizer))])
    return trainer


@pytest.mark.parametrize("schedule", [lambda optimizer: LinearParamScheduler(1.0, 0.0), warmed_up])
@pytest.mark.parametrize("split_first", [True, False])
@pytest.mark.parametrize("stop", [2, 6, 9])
def test_the_rates_go_on_when_a_group_is_split_or_two_are_merged(
    schedule: Make, split_first: bool, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make(schedule, split_first)
    whole.train(0, 12)
    expected = [value for value, _ in whole.storage.history("lr").values()]

    class Stop(Exception):  # noqa: N818
        pass

    first = make(schedule, split_first)
    run_step = first.run_step

    def stop_there() -> None:
        if first.iter == stop:
            raise Stop
        run_step()

    first.run_step = stop_there  # type: ignore[method-assign]
    with pytest.raises(Stop):
        first.train(0, 12)
    second = make(schedule, not split_first)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=12)
    rates = [value for value, _ in second.storage.history("lr").values()][-(12 - stop) :]
    assert rates == pytest.approx(expected[stop:], rel=1e-12)
    assert "groups" in caplog.text
