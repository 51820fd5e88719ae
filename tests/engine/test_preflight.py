"""Model and optimizer that do not belong together are refused, or warned about."""

import pytest
from torch import nn

from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import CallbackHook
from hooktrain.engine.preflight import check_parts
from toys import LinearLoss, sgd


def test_parts_that_belong_together_are_accepted_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LinearLoss()
    check_parts(model, [sgd(model)])
    assert caplog.messages == []


def test_a_run_is_refused_before_its_hooks_begin() -> None:
    trainer = SimpleTrainer(LinearLoss(), [], sgd(LinearLoss()))
    begun: list[object] = []
    trainer.register_hooks([CallbackHook(before_train=begun.append)])
    with pytest.raises(ValueError, match="another model"):
        trainer.train(max_iter=1)
    assert begun == []


def test_trainable_parameters_without_an_optimizer_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(LinearLoss(), nn.Linear(2, 2))
    check_parts(model, [sgd(model[0])])
    assert "1.weight" in caplog.text
    caplog.clear()
    model[1].requires_grad_(False)
    check_parts(model, [sgd(model[0])])
    assert caplog.messages == []


def test_several_optimizers_may_share_a_model(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(LinearLoss(), nn.Linear(2, 2))
    check_parts(model, [sgd(model[0]), sgd(model[1])])
    assert caplog.messages == []
