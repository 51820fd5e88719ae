from typing import Any

import pytest
import torch
from torch import nn

import hooktrain.solver.optimizers as optimizers
from hooktrain.solver.optim_wrapper_constructor import DefaultOptimWrapperConstructor
from hooktrain.utils.registry import OPTIMIZERS


def test_every_optimizer_of_torch_is_registered_by_its_name() -> None:
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "LBFGS", "SparseAdam"):
        assert OPTIMIZERS.get(name) is getattr(torch.optim, name)
    found = {name: cls for name, cls in OPTIMIZERS if cls.__module__.startswith("torch.optim")}
    public = {n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n), type)}
    assert set(found) == public - {"Optimizer"} | {"TorchAdafactor"}
    assert found["TorchAdafactor"] is torch.optim.Adafactor


def build(cls: Any, model: nn.Module, paramwise_cfg: Any = None, **options: Any) -> Any:
    cfg = {"optimizer": {"type": cls, "lr": 0.1, **options}}
    return DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model).optimizer


@pytest.fixture
def cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a device whose fused kernels can be trusted."""
    monkeypatch.setattr(optimizers, "_FUSED_DEVICES", ("cpu",))


@pytest.mark.parametrize("cls", ["Adam", "AdamW"])
def test_on_the_cpu_nothing_is_fused_unless_asked_for(cls: str) -> None:
    assert build(cls, nn.Linear(1, 1)).defaults["fused"] is None
    assert build(cls, nn.Linear(1, 1), fused=True).defaults["fused"] is True


@pytest.mark.parametrize("cls", ["Adam", torch.optim.AdamW])
@pytest.mark.usefixtures("cpu_counts")
def test_adam_is_fused_where_the_kernels_can_be_trusted(cls: Any) -> None:
    optimizer = build(cls, nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last), eps=1e-6)
    assert optimizer.defaults["fused"] is True
    assert optimizer.defaults["eps"] == 1e-6


@pytest.mark.parametrize("option", ["fused", "foreach", "differentiable"])
@pytest.mark.usefixtures("cpu_counts")
def test_a_configured_implementation_is_left_alone(option: str) -> None:
    assert build("Adam", nn.Linear(1, 1), **{option: False}).defaults["fused"] in (None, False)
    rules = {"custom_keys": {"bias": {option: False}}}
    assert build("Adam", nn.Linear(1, 1), rules).defaults["fused"] is None


class OwnAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize("cls", ["SGD", "Adagrad", "RMSprop", OwnAdam])
@pytest.mark.usefixtures("cpu_counts")
def test_optimizers_that_are_not_known_to_gain_are_left_alone(cls: Any) -> None:
    assert not build(cls, nn.Linear(1, 1)).defaults.get("fused")


class SpecialParameter(nn.Parameter):
    pass


@pytest.mark.parametrize(
    "parameter",
    [
        nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False),
        nn.Parameter(torch.zeros(4)[::2]),  # kernels that read flat memory would read the gaps
        nn.Parameter(torch.zeros(2, device="meta")),
        SpecialParameter(torch.zeros(2)),
    ],
)
@pytest.mark.usefixtures("cpu_counts")
def test_one_parameter_that_kernels_do_not_take_is_enough(parameter: nn.Parameter) -> None:
    model = nn.Linear(1, 1)
    model.register_parameter("unusual", parameter)
    assert build("Adam", model).defaults["fused"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_adam_is_fused_and_agrees_with_the_loop() -> None:
    results = []
    for options in ({}, {"foreach": False}):
        torch.manual_seed(0)
        model = nn.Linear(3, 3).cuda()
        optimizer = build("AdamW", model, **options)
        assert optimizer.defaults["fused"] is (None if options else True)
        for _ in range(3):
            model(torch.ones(2, 3, device="cuda")).square().sum().backward()
            optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)
