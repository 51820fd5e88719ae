"""Tests of `hooktrain.model.losses`."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from hooktrain.model.losses import parse_losses
from hooktrain.utils.names import is_loss

ONE = torch.tensor(1.0, requires_grad=True)
TWO = torch.tensor(2.0, requires_grad=True)
HALF = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("output", "total"),
    [
        ({"loss": ONE}, 1),
        ({"total_loss": TWO}, 2),
        ({"ce": ONE, "kl": TWO}, 3),
        ({"loss_cls": ONE, "loss_box": TWO}, 3),
        ({"loss": TWO, "loss_cls": HALF, "acc": HALF}, 2),
        ({"total_loss": TWO, "loss_cls": HALF}, 2),
        ({"loss_cls": ONE, "loss_frozen": HALF}, 1),
        ({"loss": HALF, "loss_cls": ONE}, 1),
        ({"acc": HALF, "ce": TWO}, 2),
    ],
)
def test_what_has_a_gradient_is_trained_and_the_rest_is_recorded(
    output: dict[str, Tensor], total: float
) -> None:
    loss, values = parse_losses(output)
    assert loss.requires_grad
    assert loss.item() == total
    assert next(iter(values)) == "total_loss"
    assert values == {"total_loss": loss, **output}


@pytest.mark.parametrize("name", ["loss", "total_loss", "loss_total", "total"])
def test_a_sum_beside_its_parts_is_refused_with_both_ways_on(name: str) -> None:
    output = {"loss_cls": ONE, name: TWO, "loss_box": ONE}
    for _ in range(2):  # not only the first time
        with pytest.raises(ValueError, match=f"'{name}'.*detach.*another name"):
            parse_losses(output)
    output = {key: value.detach() for key, value in output.items()}
    loss, _ = parse_losses({**output, name: TWO})
    assert loss is TWO
    loss, _ = parse_losses({"loss_cls": ONE, "loss_main": TWO, "loss_box": ONE})
    assert loss.item() == 4


@pytest.mark.parametrize("name", ["pos_sim", "accuracy", "Loss_cls"])
def test_a_metric_with_a_gradient_beside_losses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"\['{name}'\].*detach.*'loss'"):
        parse_losses({"loss_cls": ONE, name: TWO})
    loss, values = parse_losses({"loss_cls": ONE, name: TWO.detach()})
    assert loss is ONE
    assert values[name].item() == 2


def test_a_total_without_a_gradient_beside_losses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'total_loss'.*leave it out"):
        parse_losses({"loss_cls": ONE, "total_loss": TWO.detach()})


def test_names_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(name: str) -> Any:
        asked.append(name)
        return is_loss(name)

    monkeypatch.setattr("hooktrain.model.losses.is_loss", ask)
    for _ in range(3):
        parse_losses({"loss_seen_once": ONE, "loss_seen_too": TWO})
    assert asked == ["loss_seen_once", "loss_seen_too"]


def test_the_names_of_what_is_added_up_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        parse_losses({"ce": ONE, "confidence": TWO, "acc": HALF})
        parse_losses({"loss": ONE, "loss_aux": HALF})
        parse_losses({"loss": ONE})
    text = (
        "The loss is the sum of %s; only recorded, since they have no gradient (after detach(), "
        "for example): %s"
    )
    summed = [(["ce", "confidence"], ["acc"]), (["loss"], ["loss_aux"])]
    assert caplog.messages == [text % names for names in summed]


def test_what_is_no_loss_is_told_by_its_types_and_shapes() -> None:
    logits = torch.zeros(8, 3)
    with pytest.raises(
        TypeError, match=r"with one element, not .*float32.*Size\(\[8, 3\]\)"
    ):
        parse_losses((ONE, logits))
    with pytest.raises(TypeError, match=r"'logits': .*Size\(\[8, 3\]\)"):
        parse_losses({"loss": ONE, "logits": logits})
