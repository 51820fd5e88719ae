"""float16 that is broken off or spelled in another way."""

import pytest
import torch
from torch import nn
from trainer_toys import Net, StopOnce, batches, sgd

from hooktrain.engine import AMPTrainer, HookBase
from hooktrain.solver import AmpOptimWrapper


@pytest.mark.parametrize("dtype", [torch.float16, "float16"])
def test_float16_has_a_scaler_however_it_is_spelled(dtype: torch.dtype | str) -> None:
    assert AmpOptimWrapper(sgd(nn.Linear(1, 1)), dtype).grad_scaler.is_enabled()


def test_a_float16_run_interrupted_inside_a_step_goes_on_with_that_step() -> None:
    def trained(*hooks: HookBase) -> AMPTrainer:
        model = Net()
        model.dropout.p = 0.0
        trainer = AMPTrainer(model, [batches(1)[0]], sgd(model))
        trainer.register_hooks(hooks)
        return trainer

    whole, interrupted = trained(), trained(StopOnce(at=1))
    whole.train(0, 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(0, 4)
    interrupted.train(max_iter=4)
    assert torch.equal(interrupted.model.fc.weight, whole.model.fc.weight)
