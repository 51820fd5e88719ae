import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer, StepTrainer
from hooktrain.engine.hooks import PreciseBN
from hooktrain.model import BaseModel
from hooktrain.utils.events import get_event_storage


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
    trainer.register_hooks([PreciseBN(model=model, data_loader=data, **kwargs)])
    return trainer


def test_statistics_after_training_are_those_of_the_whole_data_set() -> None:
    data = [torch.randn(8, 2) for _ in range(4)]
    trainer = make(data, period=0, num_iter=4)
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


def test_whether_there_is_batch_norm_to_measure_is_decided_when_the_time_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make([torch.randn(8, 2)], period=0, num_iter=2)
    trainer.model.bn.eval()
    with caplog.at_level(logging.INFO):
        trainer.train(0, 1)
    assert "no batch norm in training mode" in caplog.text
    assert trainer.model.bn.num_batches_tracked == 0


def test_an_empty_loader_is_refused() -> None:
    trainer = make([torch.randn(8, 2)], period=0, num_iter=2)
    hook = PreciseBN(0, trainer.model, [], 2)
    trainer.register_hooks([hook])
    with pytest.raises(ValueError, match="data loader is empty"):
        hook.update_stats()


@pytest.mark.parametrize("num_iter", [3, 5])
def test_a_loader_that_is_exhausted_starts_again(num_iter: int) -> None:
    trainer = make([torch.randn(8, 2) for _ in range(3)], period=1, num_iter=num_iter)
    trainer.train(0, 3)
    assert trainer.iter == 3


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


def test_the_trainers_own_position_in_the_data_is_not_moved() -> None:
    loader = build_train_loader([torch.ones(2)] * 4, total_batch_size=2, seed=0)
    model = Net()
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer.register_hooks([PreciseBN(1, model, loader, 2)])
    with pytest.raises(ValueError, match="move the trainer's data_loader"):
        trainer.train(0, 1)
    assert loader.batches == 0
