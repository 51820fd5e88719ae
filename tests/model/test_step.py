import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_toys import PairPreprocessor, ToyModel, batch, sgd
from torch import Tensor, nn

from hooktrain.model.step import parse_losses, predict_step, train_step
from hooktrain.solver import AmpOptimWrapper


def test_losses_are_means_and_sums_of_means_and_all_of_them_are_added_up() -> None:
    losses = {
        "loss_a": torch.tensor([1.0, 3.0]),
        "accuracy": torch.tensor([0.0, 1.0]),
        "aux_loss": [torch.tensor([[2.0], [4.0]]), torch.tensor(5.0)],
        "losses": (torch.tensor(0.5),),
    }
    total, log_vars = parse_losses(losses)
    assert total.item() == 2 + 3 + 5 + 0.5
    assert {k: v.item() for k, v in log_vars.items()} == {
        "loss": 10.5,
        "loss_a": 2.0,
        "accuracy": 0.5,
        "aux_loss": 8.0,
        "losses": 0.5,
    }
    assert list(log_vars) == ["loss", "loss_a", "accuracy", "aux_loss", "losses"]


def test_what_is_counted_in_whole_numbers_is_logged_as_its_mean() -> None:
    correct, count = torch.tensor([True, False]), torch.tensor([1, 2])
    _, log_vars = parse_losses({"loss": torch.ones(1), "correct": correct, "count": [count, count]})
    assert (log_vars["correct"].item(), log_vars["count"].item()) == (0.5, 3.0)


def test_a_models_own_loss_beside_others_does_not_hide_the_sum() -> None:
    weight = torch.tensor(1.0, requires_grad=True)
    total, log_vars = parse_losses({"loss_b": 2 * weight, "loss": weight})
    assert total.item() == 3.0
    assert {k: v.item() for k, v in log_vars.items()} == {
        "total_loss": 3.0,
        "loss_b": 2.0,
        "loss": 1.0,
    }
    assert next(iter(log_vars)) == "total_loss"


def test_a_single_loss_is_its_own_sum() -> None:
    total, log_vars = parse_losses({"accuracy": torch.tensor(0.5), "loss": torch.tensor(2.0)})
    assert total.item() == 2.0
    assert [(k, v.item()) for k, v in log_vars.items()] == [("loss", 2.0), ("accuracy", 0.5)]


def test_values_to_log_have_no_gradient_and_the_sum_has() -> None:
    weight = torch.ones(2, requires_grad=True)
    total, log_vars = parse_losses({"loss_a": weight, "score": weight.sum()})
    assert total.requires_grad
    assert not any(value.requires_grad for value in log_vars.values())


@pytest.mark.parametrize("wrong", [3.0, None, [], [torch.ones(1), 2.0], {"a": torch.ones(1)}, "x"])
def test_a_loss_that_is_no_tensor_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(TypeError, match="'loss_a' must be a tensor or a list or tuple of tensors"):
        parse_losses({"loss_b": torch.ones(1), "loss_a": wrong})


def test_losses_without_a_loss_are_refused_with_their_names() -> None:
    with pytest.raises(ValueError, match=r"'loss' in its name.*\['ce', 'acc'\]"):
        parse_losses({"ce": torch.ones(1), "acc": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'loss' in its name.*\[\]"):
        parse_losses({})


def test_a_sum_that_has_no_name_left_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out 'total_loss'"):
        parse_losses({"loss": torch.ones(1), "total_loss": torch.ones(1)})


def test_losses_that_are_no_dict_are_refused() -> None:
    with pytest.raises(TypeError, match="must return a dict of losses, but returned tensor"):
        parse_losses(torch.ones(1))  # type: ignore[arg-type]


def test_a_step_is_the_one_written_by_hand() -> None:
    model, by_hand = ToyModel(), ToyModel()
    by_hand.load_state_dict(model.state_dict())
    wrapper, optimizer = sgd(model), torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for seed in range(3):
        img, label = batch(4, seed)
        log_vars = train_step(model, [img, label], wrapper)
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
    """Takes its arguments by name, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.data_preprocessor = lambda data, training: data | {"training": training}
        self.parse_losses = parse_losses

    def forward(self, x: Tensor, training: bool, mode: str) -> Any:
        self.called = (training, mode)
        return {"loss": self.weight * x}


def test_a_dict_of_the_preprocessor_gives_arguments_by_name() -> None:
    model = Named()
    train_step(model, {"x": torch.tensor(2.0)}, sgd(model))
    assert model.called == (True, "loss")
    assert model.weight.item() == pytest.approx(0.8)
    predicted = predict_step(model, {"x": torch.tensor(2.0)})
    assert model.called == (False, "predict")
    assert predicted["loss"].item() == pytest.approx(1.6)


def test_a_pair_of_the_preprocessor_gives_arguments_by_place() -> None:
    model = ToyModel(PairPreprocessor())
    img, label = batch(2)
    expected = (model.linear(2 * img) - label).abs().mean()
    log_vars = train_step(model, {"x": img, "y": label}, sgd(model))
    assert torch.equal(log_vars["loss2"], expected.detach())
    predicted = predict_step(model, {"x": img, "y": label})
    assert torch.equal(torch.stack(predicted), model.linear(3 * img))


def test_another_result_of_the_preprocessor_is_refused() -> None:
    model = ToyModel()
    with pytest.raises(TypeError, match=r"dict of those by name or a list.*type Tensor"):
        train_step(model, torch.ones(1), sgd(model))
    with pytest.raises(TypeError, match="type NoneType"):
        predict_step(model, None)


class Traced:
    """An optimizer wrapper that records the order of what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextlib.contextmanager
    def _context(self, name: str) -> Iterator[None]:
        self.events.append(name)
        yield
        self.events.append(f"end {name}")

    def sync_context(self, model: nn.Module) -> Any:
        self.model = model
        return self._context("sync")

    def precision_context(self) -> Any:
        return self._context("precision")

    def update_params(self, loss: Tensor) -> None:
        self.events.append("update")


def test_the_backward_pass_is_inside_of_sync_and_outside_of_the_lower_precision() -> None:
    wrapper, model = Traced(), ToyModel()
    model.linear.register_forward_hook(lambda *_: wrapper.events.append("forward"))
    train_step(model, batch(1), wrapper)
    assert wrapper.model is model
    assert wrapper.events == ["sync", "precision", "forward", "end precision", "update", "end sync"]


def test_inside_a_wrapper_that_one_is_called_and_the_models_parts_are_used() -> None:
    wrapper, model, img = Traced(), ToyModel(), batch(2)
    around = nn.Sequential()
    around.forward = lambda *args, mode: model(*args, mode=mode) | {"loss3": torch.ones(1)}
    log_vars = train_step(model, img, wrapper, around)
    assert wrapper.model is around
    assert "loss3" in log_vars


def test_the_forward_pass_is_in_the_precision_of_the_wrapper() -> None:
    model = ToyModel()
    seen = []
    model.linear.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, batch(2), AmpOptimWrapper(optimizer, "bfloat16"))
    assert seen == [torch.bfloat16]


def test_parameters_that_the_sum_does_not_depend_on_are_named_before_the_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ToyModel()
    model.extra = nn.Linear(3, 2, bias=False)
    train_step(model, batch(2), sgd(model))
    assert caplog.messages == []
    train_step(model, batch(2), sgd(model), detect_anomalous=True)
    assert caplog.messages == [
        "extra.weight with shape torch.Size([2, 3]) is not in the computational graph"
    ]
