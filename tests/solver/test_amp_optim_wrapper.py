"""Mixed precision, compared with autocast and a scaler by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_toys import batches, linear, loss_of, same, sgd

from hooktrain.solver import AmpOptimWrapper, OptimWrapper


def test_bfloat16_on_the_cpu_equals_autocast_by_hand_and_needs_no_scaler() -> None:
    ours, reference = linear(), linear()
    wrapper, optimizer = AmpOptimWrapper(sgd(ours), "bfloat16"), sgd(reference)
    assert not wrapper.grad_scaler.is_enabled()
    for batch in batches(3):
        with wrapper.optim_context(ours):
            loss = ours(batch).square().mean()
        wrapper.update_params(loss)
        with torch.autocast("cpu", torch.bfloat16):
            expected = reference(batch).square().mean()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected)
    assert same(ours, reference)


def test_float16_with_a_scaler_and_clipping_equals_the_same_by_hand() -> None:
    ours, reference = linear(), linear()
    wrapper = AmpOptimWrapper(sgd(ours), torch.float16, clip_grad={"max_norm": 0.01})
    optimizer, scaler = sgd(reference), torch.amp.GradScaler("cpu")
    for batch in batches(3):
        with wrapper.optim_context(ours):
            loss = ours(batch).float().square().mean()
        assert wrapper.update_params(loss)
        with torch.autocast("cpu", torch.float16):
            expected = reference(batch).float().square().mean()
        scaler.scale(expected).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert same(ours, reference)
    assert wrapper.grad_scaler.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_skipped_by_the_scaler_is_returned_and_counted(fused: bool) -> None:
    model = linear()
    before = copy.deepcopy(model)
    wrapper = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), "float16")
    good = batches(1)[0]
    assert not wrapper.update_params(model(good).mean() * torch.inf)
    assert same(model, before)
    assert wrapper.skipped_updates == 1
    assert wrapper.update_params(model(good).mean())
    assert wrapper.skipped_updates == 1
    assert not same(model, before)


def test_the_scaler_and_the_count_of_skipped_updates_resume() -> None:
    model = linear()
    wrapper = AmpOptimWrapper(sgd(model), "float16")
    wrapper.update_params(model(batches(1)[0]).mean() * torch.inf)
    other = AmpOptimWrapper(sgd(linear()), "float16")
    other.load_state_dict(wrapper.state_dict())
    assert other.skipped_updates == 1
    assert other.grad_scaler.get_scale() == wrapper.grad_scaler.get_scale() == 32768.0


def test_gradients_are_unscaled_for_those_who_look_before_the_step() -> None:
    model, reference = linear(), linear()
    wrapper = AmpOptimWrapper(sgd(model), "float16")
    batch = batches(1)[0]
    wrapper.backward(model(batch).mean())
    wrapper.unscale_gradients()
    wrapper.unscale_gradients()
    reference(batch).mean().backward()
    assert model.weight.grad is not None
    assert reference.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert wrapper.step()


@pytest.mark.parametrize(("dtype", "scales"), [("float16", True), ("bfloat16", False)])
def test_the_name_of_a_type_chooses_the_scaler_as_the_type_does(dtype: str, scales: bool) -> None:
    for given in (dtype, getattr(torch, dtype)):
        assert AmpOptimWrapper(sgd(linear()), given).grad_scaler.is_enabled() is scales


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


def test_other_types_are_refused() -> None:
    for dtype in (torch.float64, "float32", "half-ish"):
        with pytest.raises(ValueError, match=f"float16 or bfloat16, but got .*{dtype}"):
            AmpOptimWrapper(sgd(linear()), dtype)


def test_the_type_to_compute_in_is_torchs_default_for_the_device() -> None:
    assert AmpOptimWrapper(sgd(linear())).dtype == torch.bfloat16


def test_the_device_is_that_of_the_first_parameter_wherever_it_is() -> None:
    groups = [{"params": []}, {"params": [torch.nn.Parameter(torch.ones(1, device="meta"))]}]
    wrapper = AmpOptimWrapper(torch.optim.SGD(groups, lr=0.1), "bfloat16")
    assert wrapper.device_type == "meta"


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


@pytest.mark.parametrize("scale", ["static", None, 0, -1])
def test_another_kind_of_scale_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match=f"loss_scale must be .*{scale!r}"):
        AmpOptimWrapper(sgd(linear()), "float16", loss_scale=scale)


def test_a_scaler_saved_by_mmengine_loads() -> None:
    wrapper = AmpOptimWrapper(sgd(linear()), "float16")
    state = wrapper.state_dict()
    state["loss_scaler"] = {**state.pop("grad_scaler"), "scale": 16.0}
    wrapper.load_state_dict(state)
    assert wrapper.grad_scaler.get_scale() == 16.0
