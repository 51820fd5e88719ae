"""Models that own their step, and the one step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equality import assert_equal
from hooktrain.model import BaseDataPreprocessor, BaseModel
from toys import ToyModel, batch, sgd_wrapper


def test_a_preprocessor_is_a_module_of_the_model() -> None:
    assert type(ToyModel().data_preprocessor) is BaseDataPreprocessor
    layer = nn.Linear(1, 1)
    model = ToyModel(layer)
    assert model.data_preprocessor is layer
    assert "data_preprocessor.weight" in dict(model.named_parameters())


def test_steps_of_an_evaluation_leave_the_mode_alone() -> None:
    model = ToyModel()
    img, label = batch(3)
    for step in (model.val_step, model.test_step):
        predicted = step((img, label))
        assert torch.equal(torch.stack(predicted), model.linear(img))
        assert model.training


def test_losses_are_weighed_by_a_models_own_parse_losses() -> None:
    class Weighted(ToyModel):
        def parse_losses(self, losses: Any) -> Any:
            return super().parse_losses({**losses, "loss1": losses["loss1"] * 0})

    model = Weighted()
    values = model.train_step(batch(2), sgd_wrapper(model))
    assert values["loss1"].item() == 0.0
    assert torch.equal(values["total_loss"], values["loss2"])


def test_the_preprocessor_goes_where_the_model_goes() -> None:
    with torch.device("meta"):
        assert ToyModel().data_preprocessor.device.type == "meta"
    model = ToyModel()
    assert list(model.buffers()) == []  # nothing to broadcast
    assert model.data_preprocessor.device == torch.device("cpu")
    model.to("meta", torch.float64)
    assert model.data_preprocessor(torch.ones(1)).is_meta
    model.to_empty(device="cpu")
    assert model.data_preprocessor.device == torch.device("cpu")


def test_losses_are_told_from_metrics_as_trainers_do() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    more = torch.tensor(0.5)
    metric = torch.tensor(0.25)
    losses = {"accuracy": metric, "ce": loss, "loss_frozen": more}
    total, values = ToyModel().parse_losses(losses)
    assert total.requires_grad
    assert not any(value.requires_grad for value in values.values())
    assert list(values) == ["total_loss", "accuracy", "ce", "loss_frozen"]
    assert [value.item() for value in values.values()] == [2.0, 0.25, 2.0, 0.5]


def test_a_step_is_the_one_written_by_hand() -> None:
    model, by_hand = ToyModel(), ToyModel()
    by_hand.load_state_dict(model.state_dict())
    wrapper = sgd_wrapper(model)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for seed in range(3):
        img, label = batch(4, seed)
        values = model.train_step([img, label], wrapper)
        error = by_hand.linear(img) - label
        losses = error.pow(2).mean(), error.abs().mean()
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        assert torch.equal(values["total_loss"], sum(losses))  # type: ignore[arg-type]
        assert torch.equal(values["loss1"], losses[0])
        assert list(values) == ["total_loss", "loss1", "loss2"]
    assert_equal(model.state_dict(), by_hand.state_dict())


class Named(nn.Module):
    """Gives arguments by name."""

    def forward(
        self, data: dict[str, Tensor], training: bool = False
    ) -> dict[str, Any]:
        return {**data, "label": torch.zeros(1), "training": training}


class Weight(BaseModel):
    def __init__(self) -> None:
        super().__init__(Named())
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, label: Tensor, training: bool, mode: str) -> Any:  # type: ignore[override]
        self.called = (training, mode)
        return {"loss": (self.weight * x + label).sum()}


def test_a_dict_of_the_preprocessor_gives_arguments_by_name() -> None:
    model = Weight()
    model.train_step({"x": torch.tensor(2.0)}, sgd_wrapper(model))
    assert model.called == (True, "loss")
    assert model.weight.item() == pytest.approx(0.8)
    predicted = model.val_step({"x": torch.tensor(2.0)})
    assert model.called == (False, "predict")
    assert predicted["loss"].item() == pytest.approx(1.6)


def test_another_result_of_the_preprocessor_is_refused() -> None:
    model = ToyModel()
    with pytest.raises(TypeError, match="Tensor"):
        model.train_step(torch.ones(1), sgd_wrapper(model))
    with pytest.raises(TypeError, match="NoneType"):
        model.val_step(None)


def test_the_backward_pass_is_outside_of_the_context_of_the_forward_pass() -> None:
    events: list[str] = []

    class Traced:
        @contextlib.contextmanager
        def optim_context(self, model: nn.Module) -> Iterator[None]:
            events.append("context")
            yield
            events.append("end of context")

        def update_params(self, loss: Tensor) -> None:
            events.append("update")

    model = ToyModel()
    model.linear.register_forward_hook(lambda *_: events.append("forward"))
    model.train_step(batch(1), Traced())
    assert events == ["context", "forward", "end of context", "update"]
