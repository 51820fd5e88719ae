"""Optimizer wrappers that tell their rates and momenta, and take states of MMEngine."""

from typing import Any

import pytest
import torch

from hooktrain import solver
from hooktrain.compat.mmengine import (
    AmpOptimWrapper,
    CosineAnnealingMomentum,
    OptimWrapper,
    OptimWrapperDict,
)
from hooktrain.compat.mmengine.optim_wrapper import as_mmengine
from hooktrain.solver.optim_state import without_schedules
from toys import LinearLoss, batches, sgd


def test_a_momentum_may_be_the_first_beta() -> None:
    parameters = [*LinearLoss().parameters()]
    adam = OptimWrapper(torch.optim.Adam(parameters, betas=(0.8, 0.99)))
    sgd = OptimWrapper(torch.optim.SGD(parameters, momentum=0.9))
    plain = OptimWrapper(torch.optim.Adagrad(parameters))
    several = OptimWrapperDict(a=sgd, b=adam)
    assert several.get_momentum() == {"a.momentum": [0.9], "b.momentum": [0.8]}
    assert plain.get_momentum() == {"momentum": [0.0]}
    assert sgd.defaults["momentum"] == 0.9


def test_rates_of_several_optimizers_have_their_names() -> None:
    amp = AmpOptimWrapper(sgd(LinearLoss(), lr=0.2), "bfloat16")
    assert isinstance(amp, OptimWrapper)
    core = solver.OptimWrapper(sgd(LinearLoss(), lr=0.1))
    assert OptimWrapperDict(a=core, b=amp).get_lr() == {"a.lr": [0.1], "b.lr": [0.2]}


def test_a_wrapper_of_the_core_gets_the_methods_and_stays_the_same_object() -> None:
    class Own(solver.OptimWrapper):
        pass

    optimizer = sgd(LinearLoss(), lr=0.1)
    wrapper, own = solver.OptimWrapper(optimizer), Own(optimizer)
    several = solver.OptimWrapperDict(a=wrapper)
    given: Any
    for given, kind in [
        (wrapper, OptimWrapper),
        (solver.AmpOptimWrapper(optimizer, "bfloat16"), AmpOptimWrapper),
        (several, OptimWrapperDict),
        (own, Own),
    ]:
        assert as_mmengine(given) is given
        assert type(given) is kind
    assert several.get_lr() == {"a.lr": [0.1]}  # type: ignore[operator]


def test_the_scaler_of_mmengine_resumes() -> None:
    model = LinearLoss()
    wrapper = AmpOptimWrapper(sgd(model), "float16")
    wrapper.update_params(model(batches(1)[0]) * torch.inf)
    state = wrapper.state_dict()
    state["loss_scaler"] = state.pop("grad_scaler")
    other = AmpOptimWrapper(sgd(LinearLoss()), "float16")
    other.load_state_dict(state)
    assert other.skipped_updates == 1
    assert other.grad_scaler.get_scale() == 32768.0


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_scheduled_momentum_is_left_out_with_the_schedules(kind: str) -> None:
    parameters = [*LinearLoss().parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, momentum=0.9)
    if kind == "adam":
        optimizer = torch.optim.Adam(parameters)
    CosineAnnealingMomentum(optimizer, T_max=2)
    (group,) = without_schedules(optimizer.state_dict())["param_groups"]
    assert not {"momentum", "betas"} & group.keys()
    assert "lr" in group


def test_a_loss_scale_is_fixed_or_has_a_scalers_arguments() -> None:
    options = {"init_scale": 4.0, "growth_interval": 1}
    models = [LinearLoss(), LinearLoss()]
    fixed, grown = wrappers = [
        AmpOptimWrapper(sgd(models[0]), "float16", loss_scale=8),
        AmpOptimWrapper(sgd(models[1]), "float16", loss_scale=options),
    ]
    for factor in (1.0, torch.inf, 1.0, 1.0):
        for model, wrapper in zip(models, wrappers, strict=True):
            updated = wrapper.update_params(model(batches(1)[0]) * factor)
            assert updated == (factor == 1.0)
        assert fixed.grad_scaler.get_scale() == 8.0
    assert grown.grad_scaler.get_scale() == 16.0  # 4 * 2 / 2 * 2 * 2
    for wrong in ("static", 0):
        with pytest.raises(ValueError, match="loss_scale"):
            AmpOptimWrapper(sgd(models[0]), "float16", loss_scale=wrong)
