"""What a wrapper tells of its optimizer, and which arguments it takes."""

from typing import Any

import pytest
import torch
from torch import nn
from wrapper_toys import batches, linear, loss_of, same, sgd

from hooktrain.solver import AmpOptimWrapper, OptimWrapper


def grouped(**options: Any) -> OptimWrapper:
    model = linear()
    groups = [{"params": [model.weight], "lr": 0.3}, {"params": [model.bias]}]
    return OptimWrapper(torch.optim.SGD(groups, lr=0.1, momentum=0.9), **options)


def test_a_single_group_has_no_base_settings() -> None:
    wrapper = OptimWrapper(sgd(linear()))
    assert wrapper.base_param_settings is None
    assert wrapper.param_groups is wrapper.optimizer.param_groups
    assert wrapper.get_lr() == {"lr": [0.1]}


def test_several_groups_have_base_settings_that_schedulers_drive_too() -> None:
    wrapper = grouped()
    assert wrapper.get_lr() == {"base_lr": [0.1], "lr": [0.3, 0.1]}
    assert list(wrapper.get_lr()) == ["base_lr", "lr"]
    for group in wrapper.param_groups:
        group["lr"] *= 0.5
    assert wrapper.get_lr() == {"base_lr": [0.05], "lr": [0.15, 0.05]}
    assert len(wrapper.optimizer.param_groups) == 2
    other = grouped()
    other.load_state_dict(wrapper.state_dict())
    assert other.get_lr() == wrapper.get_lr()


def test_the_momentum_is_that_of_sgd_or_the_first_beta_or_none() -> None:
    parameters = list(linear().parameters())
    assert grouped().get_momentum() == {"momentum": [0.9, 0.9]}
    adam = OptimWrapper(torch.optim.Adam(parameters, betas=(0.8, 0.99)))
    assert adam.get_momentum() == {"momentum": [0.8]}
    assert OptimWrapper(torch.optim.Adagrad(parameters)).get_momentum() == {"momentum": [0.0]}


@pytest.mark.parametrize("losses", [{"loss": torch.ones(())}, [torch.ones(())], 1.0])
def test_losses_that_are_no_tensor_are_refused_with_advice(losses: Any) -> None:
    with pytest.raises(TypeError, match=r"takes one loss.*model\.parse_losses\(losses\)\[0\]"):
        OptimWrapper(sgd(linear())).update_params(losses)


def test_an_optimizer_that_needs_a_closure_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"LBFGS.*run_step of your own"):
        OptimWrapper(torch.optim.LBFGS(linear().parameters()))


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_who_looks_between_backward_and_update_sees_true_gradients(dtype: str | None) -> None:
    model, reference = linear(), linear()
    clip = {"max_norm": 1e-3}
    wrapper = (
        AmpOptimWrapper(sgd(model), dtype, clip_grad=clip)
        if dtype
        else OptimWrapper(sgd(model), clip_grad=clip)
    )
    seen = []
    wrapper.after_backward = lambda: seen.append(model.weight.grad.clone())  # type: ignore[union-attr]
    batch = batches(1)[0]
    wrapper.update_params(loss_of(model, batch))
    loss_of(reference, batch).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], reference.weight.grad)


def test_the_type_to_compute_in_is_torchs_default_for_the_device() -> None:
    assert AmpOptimWrapper(sgd(linear())).dtype == torch.bfloat16


def test_a_fixed_scale_stays_where_it_is() -> None:
    model = linear()
    wrapper = AmpOptimWrapper(sgd(model), "float16", loss_scale=8)
    for factor in (1.0, torch.inf, 1.0):
        assert wrapper.update_params(loss_of(model, batches(1)[0]) * factor) == (factor == 1.0)
        assert wrapper.grad_scaler.get_scale() == 8.0
    assert wrapper.skipped_updates == 1


def test_a_scaler_has_the_arguments_of_the_dict_or_is_the_given_one() -> None:
    options = {"init_scale": 4.0, "growth_interval": 1}
    model, reference = linear(), linear()
    wrapper = AmpOptimWrapper(sgd(model), "float16", loss_scale=options)
    scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    other = AmpOptimWrapper(sgd(reference), "float16", loss_scale=scaler)
    assert other.grad_scaler is scaler
    for batch in batches(3):
        wrapper.update_params(loss_of(model, batch))
        other.update_params(loss_of(reference, batch))
    assert wrapper.grad_scaler.get_scale() == scaler.get_scale() == 32.0
    assert same(model, reference)
    assert options == {"init_scale": 4.0, "growth_interval": 1}


@pytest.mark.parametrize(
    ("scale", "error"),
    [("static", TypeError), (None, TypeError), (0, ValueError), (-1, ValueError)],
)
def test_another_kind_of_scale_is_refused(scale: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"loss_scale must be .*{scale!r}"):
        AmpOptimWrapper(sgd(linear()), "float16", loss_scale=scale)


def test_a_scaler_saved_by_mmengine_loads() -> None:
    wrapper = AmpOptimWrapper(sgd(linear()), "float16")
    state = wrapper.state_dict()
    state["loss_scaler"] = {**state.pop("grad_scaler"), "scale": 16.0}
    wrapper.load_state_dict(state)
    assert wrapper.grad_scaler.get_scale() == 16.0


def test_the_update_of_a_fused_optimizer_that_was_skipped_is_known_under_a_fixed_scale() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    wrapper = AmpOptimWrapper(optimizer, "float16", loss_scale=2.0)
    assert not wrapper.update_params(loss_of(model, batches(1)[0]) * torch.inf)
    assert same(model, linear())


def test_a_clipping_configuration_serves_several_wrappers() -> None:
    config = {"type": "value", "clip_value": 0.5}
    for _ in range(2):
        model = nn.Linear(2, 2)
        OptimWrapper(sgd(model), clip_grad=config).update_params(model(torch.ones(2)).sum())
        assert config == {"type": "value", "clip_value": 0.5}


def test_how_to_compute_stays_as_built_and_is_not_taken_from_the_state() -> None:
    saved = OptimWrapper(sgd(linear(), foreach=True, weight_decay=0.5)).state_dict()
    before = [dict(group) for group in saved["param_groups"]]
    wrapper = OptimWrapper(sgd(linear(), fused=True))
    wrapper.load_state_dict(saved)
    group = wrapper.optimizer.param_groups[0]
    assert (group["foreach"], group["fused"], group["weight_decay"]) == (None, True, 0.5)
    assert saved["param_groups"] == before
