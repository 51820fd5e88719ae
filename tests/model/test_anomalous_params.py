from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.model import detect_anomalous_params


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.dropped = nn.Linear(2, 1)
        self.never = nn.Parameter(torch.ones(3, 2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.used(self.frozen(x))
        return hidden, self.dropped(hidden)


def test_parameters_that_were_not_used_are_logged_as_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    hidden, _ = model(torch.ones(1, 2))
    names = detect_anomalous_params(hidden.sum(), model)
    assert names == ["never", "dropped.weight", "dropped.bias"]
    assert caplog.record_tuples == [
        (
            "hooktrain.model.anomalous_params",
            40,
            f"{name} with shape torch.Size({shape}) is not in the computational graph",
        )
        for name, shape in [("never", [3, 2]), ("dropped.weight", [1, 2]), ("dropped.bias", [1])]
    ]


@pytest.mark.parametrize("nest", [lambda a, b: {"a": a, "b": [b]}, lambda a, b: [(a,), {"b": b}]])
def test_losses_in_dicts_and_lists_count_together(nest: Any) -> None:
    model = Net()
    hidden, dropped = model(torch.ones(1, 2))
    both = [hidden.sum(), dropped.sum()]
    assert detect_anomalous_params(nest(*both), model) == ["never"]
    assert detect_anomalous_params(nest(torch.ones(1), hidden), model) == [
        "never",
        "dropped.weight",
        "dropped.bias",
    ]


def test_after_the_backward_pass_it_finds_the_same() -> None:
    model = Net()
    loss = model(torch.ones(1, 2))[1].sum()
    loss.backward()
    assert detect_anomalous_params(loss, model) == ["never"]


def test_a_parameter_that_is_the_loss_itself_is_found() -> None:
    model = Net()
    assert "never" not in detect_anomalous_params(model.never, model)


def test_a_graph_deeper_than_the_stack_is_no_trouble() -> None:
    model = nn.Linear(1, 1)
    value = model.weight.sum()
    for _ in range(5000):
        value = value + 1
    assert detect_anomalous_params(value, model) == ["bias"]


def test_a_graph_with_many_paths_is_walked_once() -> None:
    model = nn.Linear(1, 1)
    value = model.weight.sum()
    for _ in range(60):
        value = 2 * value + 3 * value  # 2 ** 60 paths
    assert detect_anomalous_params(value, model) == ["bias"]


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tensors, or dicts or lists of tensors, but got 1\.0"):
        detect_anomalous_params({"a": torch.ones(1), "b": 1.0}, nn.Linear(1, 1))
