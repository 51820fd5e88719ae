"""Models that own their step, and the one step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooktrain.model import (
    BaseDataPreprocessor,
    BaseModel,
)
from hooktrain.solver import AmpOptimWrapper
from toys import PairPreprocessor, ToyModel, batch, sgd_wrapper


def test_a_preprocessor_is_a_module_or_built_from_a_dict() -> None:
    assert type(ToyModel().data_preprocessor) is BaseDataPreprocessor
    cfg = {"type": "BaseDataPreprocessor", "non_blocking": True}
    assert ToyModel(cfg).data_preprocessor.non_blocking
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


def test_a_subclass_may_weigh_its_losses_by_its_own_parse_losses() -> None:
    class Weighted(ToyModel):
        def parse_losses(self, losses: Any) -> Any:
            return super().parse_losses(
                {"loss1": losses["loss1"] * 0, "loss2": losses["loss2"]}
            )

    model = Weighted()
    log_vars = model.train_step(batch(2), sgd_wrapper(model))
    assert log_vars["loss1"].item() == 0.0
    assert torch.equal(log_vars["loss"], log_vars["loss2"])
    assert log_vars["loss2"].item() > 0


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


T = torch.tensor


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (  # means, and sums of means; "loss" anywhere in the name
            {
                "loss_a": T([1.0, 3.0]),
                "accuracy": T([0.0, 1.0]),
                "aux_loss": [T([[2.0], [4.0]]), T(5.0)],
                "losses": (T(0.5),),
            },
            {
                "loss": 10.5,
                "loss_a": 2.0,
                "accuracy": 0.5,
                "aux_loss": 8.0,
                "losses": 0.5,
            },
        ),
        # A model's own "loss" beside others does not hide the sum; alone it is the sum.
        (
            {"loss_b": T(2.0), "loss": T(1.0)},
            {"total_loss": 3.0, "loss_b": 2.0, "loss": 1.0},
        ),
        ({"accuracy": T(0.5), "loss": T(2.0)}, {"loss": 2.0, "accuracy": 0.5}),
        (  # what is counted in whole numbers
            {
                "loss": T(1.0),
                "correct": T([True, False]),
                "count": [T([1, 2]), T([1, 2])],
            },
            {"loss": 1.0, "correct": 0.5, "count": 3.0},
        ),
    ],
)
def test_means_of_losses_are_added_up(
    losses: dict[str, Any], expected: dict[str, float]
) -> None:
    total, log_vars = ToyModel().parse_losses(losses)
    assert total.item() == next(iter(expected.values()))
    assert [(k, v.item()) for k, v in log_vars.items()] == list(expected.items())


@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        *(
            (
                {"loss_b": T(1.0), "loss_a": wrong},
                TypeError,
                "'loss_a' must be a tensor or a list",
            )
            for wrong in (3.0, None, [], [T(1.0), 2.0], {"a": T(1.0)}, "x")
        ),
        (
            {"ce": T(1.0), "acc": T(1.0)},
            ValueError,
            r"'loss' in its name.*\['ce', 'acc'\]",
        ),
        ({}, ValueError, r"'loss' in its name.*\[\]"),
    ],
)
def test_losses_without_a_sum_are_refused_by_name(
    losses: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        ToyModel().parse_losses(losses)


def test_a_step_is_the_one_written_by_hand() -> None:
    model, by_hand = ToyModel(), ToyModel()
    by_hand.load_state_dict(model.state_dict())
    wrapper, optimizer = (
        sgd_wrapper(model),
        torch.optim.SGD(by_hand.parameters(), lr=0.1),
    )
    for seed in range(3):
        img, label = batch(4, seed)
        log_vars = model.train_step([img, label], wrapper)
        error = by_hand.linear(img) - label
        loss1, loss2 = error.pow(2).mean(), error.abs().mean()
        optimizer.zero_grad()
        (loss1 + loss2).backward()
        optimizer.step()
        assert torch.equal(log_vars["loss"], (loss1 + loss2).detach())
        assert torch.equal(log_vars["loss1"], loss1.detach())
        assert list(log_vars) == ["loss", "loss1", "loss2"]
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


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
        return {"loss": self.weight * x + label}


def test_a_dict_of_the_preprocessor_gives_arguments_by_name() -> None:
    model = Weight()
    model.train_step({"x": torch.tensor(2.0)}, sgd_wrapper(model))
    assert model.called == (True, "loss")
    assert model.weight.item() == pytest.approx(0.8)
    predicted = model.val_step({"x": torch.tensor(2.0)})
    assert model.called == (False, "predict")
    assert predicted["loss"].item() == pytest.approx(1.6)


def test_a_pair_of_the_preprocessor_gives_arguments_by_place() -> None:
    model = ToyModel(PairPreprocessor())
    img, label = batch(2)
    expected = (model.linear(2 * img) - label).abs().mean()
    log_vars = model.train_step({"x": img, "y": label}, sgd_wrapper(model))
    assert torch.equal(log_vars["loss2"], expected.detach())
    predicted = model.val_step({"x": img, "y": label})
    assert torch.equal(torch.stack(predicted), model.linear(3 * img))


def test_another_result_of_the_preprocessor_is_refused() -> None:
    model = ToyModel()
    with pytest.raises(TypeError, match=r"a dict, list or tuple, not .*Tensor"):
        model.train_step(torch.ones(1), sgd_wrapper(model))
    with pytest.raises(TypeError, match="NoneType"):
        model.val_step(None)


class Traced:
    """An optimizer wrapper that records the order of what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextlib.contextmanager
    def _context(self, name: str) -> Iterator[None]:
        self.events.append(name)
        yield
        self.events.append(f"end {name}")

    def optim_context(self, model: nn.Module) -> Any:
        self.model = model
        return self._context("context")

    def update_params(self, loss: Tensor) -> None:
        self.events.append("update")


def test_the_backward_pass_is_outside_of_the_context_of_the_forward_pass() -> None:
    wrapper, model = Traced(), ToyModel()
    model.linear.register_forward_hook(lambda *_: wrapper.events.append("forward"))
    model.train_step(batch(1), wrapper)
    assert wrapper.model is model
    assert wrapper.events == ["context", "forward", "end context", "update"]


def test_the_forward_pass_is_in_the_precision_of_the_wrapper() -> None:
    model = ToyModel()
    seen = []
    model.linear.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train_step(batch(2), AmpOptimWrapper(optimizer, "bfloat16"))
    assert seen == [torch.bfloat16]
