"""Mixed precision, state and ranks of the trainers."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_toys import Net, batches, make, sgd

from gloo import run_ranks
from hooktrain.engine import AMPTrainer, HookBase, SimpleTrainer
from hooktrain.solver import AmpOptimWrapper
from hooktrain.utils import comm
from hooktrain.utils.env import seed_step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amp_trainer_works_on_the_cpu_and_uses_a_scaler_for_float16_only(
    dtype: torch.dtype,
) -> None:
    model, reference = Net(), Net()
    trainer = AMPTrainer(model, batches(3), sgd(model), precision=dtype, log_grad_scaler=True)
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


def test_amp_trainer_passes_all_its_arguments_on() -> None:
    model = Net()
    data = batches(2)
    data[0][0, 0] = math.nan
    trainer = AMPTrainer(
        model,
        data,
        sgd(model),
        gather_metric_period=2,
        zero_grad_before_forward=True,
        precision=torch.bfloat16,
        async_write_metrics=True,
    )
    with pytest.raises(FloatingPointError, match="iteration=0"):
        trainer.train(0, 2)
    assert trainer.iter == 1  # asynchronous: noticed at the end of the period
    assert trainer.zero_grad_before_forward


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


def test_a_loader_that_cannot_be_positioned_is_told(caplog: pytest.LogCaptureFixture) -> None:
    saved, loaded = make(), make()
    saved.train(0, 1)
    loaded.load_state_dict(saved.state_dict())
    assert "position in the data could not be restored" in caplog.text


class Countdown:
    """A loader with a position of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield torch.full((1, 4), float(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def test_a_loader_with_state_continues_where_it_was() -> None:
    saved, loaded = make(Countdown()), make(Countdown())
    saved.train(0, 3)
    loaded.load_state_dict(saved.state_dict())
    loaded.train(max_iter=5)
    assert loaded.data_loader.position == 5  # type: ignore[attr-defined]


def test_the_optimizer_alone_can_be_loaded() -> None:
    saved, loaded = make(), make()
    saved.train(0, 2)
    loaded.load_state_dict(saved.state_dict(), only={"optimizer"})
    assert loaded.state_dict()["iteration"] == -1
    state = loaded.optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(state, saved.optimizer.state_dict()["state"][0]["momentum_buffer"])


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
    amp = {"iteration": 9, "optimizer": optimizer.state_dict(), "grad_scaler": scaler.state_dict()}
    nested = {"iteration": 9, "hooks": {}, "_trainer": amp}
    for state in (amp, nested):
        other = Net()
        trainer = AMPTrainer(other, batches(1), sgd(other))
        trainer.load_state_dict(state)
        assert trainer.iter == 9
        assert trainer.grad_scaler.get_scale() == 8.0
        buffer = trainer.optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(buffer, optimizer.state_dict()["state"][0]["momentum_buffer"])


def test_another_optimizer_can_be_put_in() -> None:
    trainer = make()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    before = trainer.model.fc.weight.clone()
    trainer.train(0, 2)
    assert torch.equal(trainer.model.fc.weight, before)


def test_a_wrapper_of_your_own_is_used_as_it_is() -> None:
    model = Net()
    wrapper = AmpOptimWrapper(sgd(model), "bfloat16", clip_grad={"max_norm": 0.1})
    trainer = SimpleTrainer(model, batches(2), wrapper)
    assert trainer.optim_wrapper is wrapper
    assert trainer.optimizer is wrapper.optimizer
    trainer.train(0, 2)
    assert trainer.storage.latest()["grad_norm"][1] == 1


def gathered_metrics() -> tuple[Any, ...]:
    class OneMore(Net):
        """Rank 1 has a loss that rank 0 has not."""

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            loss = self.fc(x).mean() * 0 + comm.get_rank() + 1
            return {"loss": loss, "extra_loss": loss} if comm.get_rank() else {"loss": loss}

    model = OneMore()
    trainer = SimpleTrainer(model, batches(5), sgd(model), gather_metric_period=2)
    read: list[list[int]] = []

    class Read(HookBase):
        def after_step(self) -> None:
            histories = self.trainer.storage.histories()
            read.append([i for _, i in histories["loss"].values()] if "loss" in histories else [])

    trainer.register_hooks([Read()])
    trainer.train(0, 5)
    values = {n: h.values() for n, h in trainer.storage.histories().items() if "loss" in n}
    return read, values


def test_metrics_of_a_period_become_the_means_over_the_ranks_that_have_them() -> None:
    for read, values in run_ranks(gathered_metrics, 2):
        assert read == [[], [0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
        assert values["loss"] == [(1.5, i) for i in range(5)]
        assert values["extra_loss"] == [(2.0, i) for i in range(5)]
        assert values["total_loss"] == [(2.5, i) for i in range(5)]


def poisoned_rank() -> str:
    data = batches(6)
    if comm.get_rank() == 1:
        data[2][0, 0] = math.nan
    model = Net()
    trainer = SimpleTrainer(model, data, sgd(model), gather_metric_period=4)
    try:
        trainer.train(0, 6)
    except FloatingPointError as error:
        return f"{trainer.iter}: {error}"
    return "trained to the end"


def test_all_ranks_reach_the_same_verdict_on_a_loss_that_is_not_finite_on_one() -> None:
    first, second = run_ranks(poisoned_rank, 2)
    assert first == second
    assert first.startswith("3: Loss became infinite or NaN at iteration=2!")


def test_training_logs_from_where_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make().train(0, 1)
    assert "Starting training from iteration 0" in caplog.text


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
