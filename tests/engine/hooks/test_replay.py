"""A past iteration is computed again, and shows in which layer its numbers went wrong."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equality import assert_equal
from hooktrain.config import LazyConfig
from hooktrain.engine import DefaultTrainer, SimpleTrainer, hooks
from hooktrain.utils.logger import close_logger

CONFIG = Path(__file__).parent.parent.parent.parent / "configs" / "digits_cnn.py"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out"
    close_logger()


class Digits(DefaultTrainer):
    """Notes the state and the gradients of iteration 7."""

    def build_hooks(self) -> list[Any]:
        self.seen: dict[str, Any] = {}

        def note(trainer: Any) -> None:
            if trainer.iter == 7:
                self.seen["model"] = {
                    k: v.clone() for k, v in trainer.model.state_dict().items()
                }
                self.seen["gradients"] = [
                    p.grad.clone() for p in trainer.model.parameters()
                ]

        return [*super().build_hooks(), hooks.CallbackHook(after_backward=note)]


def digits(folder: Path) -> Digits:
    cfg = LazyConfig.load(str(CONFIG))
    options = ["max_iter=10", "checkpointer.period=3", "eval_period=4", "log_period=2"]
    options = [f"train.{option}" for option in options]
    options += [f"train.output_dir={folder}", "model.channels=2", "model.dropout=0.5"]
    return Digits(LazyConfig.apply_overrides(cfg, options))


@pytest.mark.parametrize("checkpoint", ["model_0000005.pth", "none"])
def test_an_iteration_is_computed_again_bit_for_bit_and_nothing_is_written(
    folder: Path, checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = digits(folder)
    first.train()
    if checkpoint == "none":
        for path in folder.glob("model_0*"):
            path.unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = digits(folder)
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as end:
        again.replay(7)
    assert end.value.code == 0
    assert ("Starting training from iteration 6" in caplog.text) == (
        checkpoint != "none"
    )
    assert_equal(again.seen, first.seen)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not torch.is_anomaly_enabled()
    mean = again.seen["gradients"][-1].double().mean()
    assert re.search(f"head.bias +\\| gradient +\\| +0 \\| +{mean:.4g} ", caplog.text)


def test_an_iteration_that_the_run_does_not_have_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="no iteration 10 to replay"):
        digits(folder).replay(10)


class RootOfZero(nn.Module):
    """A finite loss with a gradient that is not: the root's at 0, times 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.fc(x).sum().sqrt() * 0
        return loss


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_the_operation_and_the_layer_where_a_nan_begins_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = RootOfZero()
    trainer = SimpleTrainer(
        model, [torch.zeros(1, 2)], torch.optim.SGD(model.parameters())
    )
    trainer.register_hooks([hooks.Replay(1)])
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(RuntimeError, match="SqrtBackward0' returned nan values"),
    ):
        trainer.train(max_iter=4)
    assert trainer.iter == 1
    assert (
        "Not finite, the first one first: fc.weight (before), fc (output)"
        in caplog.text
    )
