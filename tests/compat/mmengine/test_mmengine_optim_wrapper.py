"""Optimizer wrappers that tell their rates and momenta, and take states of MMEngine."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import mmengine_itself  # noqa: F401  # before mmengine
from hooktrain import solver
from hooktrain.compat.mmengine import (
    AmpOptimWrapper,
    BaseModel,
    CosineAnnealingMomentum,
    OptimWrapper,
    OptimWrapperDict,
    StepTrainer,
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
        (own, Own),
    ]:
        assert as_mmengine(given) is given
        assert type(given) is kind
    by_name = as_mmengine(several)
    assert by_name["a"] is wrapper
    assert by_name.get_lr() == {"a.lr": [0.1]}
    # The trainer's own may take one loss for all.
    assert type(several) is solver.OptimWrapperDict


@pytest.mark.parametrize("name", ["update_params", "backward", "step"])
def test_several_wrappers_say_that_each_takes_its_own_loss(name: str) -> None:
    model = LinearLoss()
    several = OptimWrapperDict(one=OptimWrapper(sgd(model)))
    arguments = [] if name == "step" else [model(batches(1)[0])]
    with pytest.raises(NotImplementedError, match=r"several.*\['one'\]"):
        getattr(several, name)(*arguments)
    before = [parameter.clone() for parameter in model.parameters()]
    several["one"].update_params(model(batches(1)[0]))
    assert not torch.equal(before[0], next(model.parameters()))


class OwnStep(BaseModel):
    """A model with a step of its own, which may forget the context."""

    def __init__(self, enters: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.enters = enters

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "") -> Any:
        return self.fc(inputs)

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        context = optim_wrapper.optim_context(self) if self.enters else nullcontext()
        with context:
            outputs = self(data)
        self.dtype = outputs.dtype
        loss = outputs.float().square().mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss}


@pytest.mark.parametrize("enters", [True, False])
def test_a_model_that_never_enters_mixed_precision_is_told_once(
    enters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = OwnStep(enters)
    wrapper = AmpOptimWrapper(sgd(model), "bfloat16")
    StepTrainer(model, [torch.ones(2, 4)], wrapper).train(0, 3)
    assert model.dtype is (torch.bfloat16 if enters else torch.float32)
    assert caplog.text.count("optim_context(self)") == (not enters)


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
    assert "weight_decay" in group


def test_a_loss_scale_is_fixed_or_has_a_scalers_arguments() -> None:
    options = {"init_scale": 4.0, "growth_interval": 1}
    models = [LinearLoss(), LinearLoss()]
    fixed, grown = wrappers = [
        AmpOptimWrapper(sgd(models[0]), "float16", loss_scale=8),
        AmpOptimWrapper(sgd(models[1]), "float16", loss_scale=options),
    ]
    for factor in (1.0, torch.inf, 1.0, 1.0):
        for model, wrapper in zip(models, wrappers, strict=True):
            before = copy.deepcopy(model)
            wrapper.update_params(model(batches(1)[0]) * factor)
            assert torch.equal(model.fc.weight, before.fc.weight) == (
                factor == torch.inf
            )
        assert fixed.grad_scaler.get_scale() == 8.0
    assert grown.grad_scaler.get_scale() == 16.0  # 4 * 2 / 2 * 2 * 2
    for wrong in ("static", 0):
        with pytest.raises(ValueError, match="loss_scale"):
            AmpOptimWrapper(sgd(models[0]), "float16", loss_scale=wrong)
