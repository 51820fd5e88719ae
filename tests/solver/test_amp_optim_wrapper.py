"""Mixed precision, compared with autocast and a scaler by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_toys import batches, linear, loss_of, same, sgd

from hooktrain.solver import AmpOptimWrapper, OptimWrapper


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (None, torch.bfloat16),  # torch's default on the CPU
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
        (torch.float16, torch.float16),
    ],
)
def test_updates_equal_autocast_a_scaler_and_clipping_by_hand(
    dtype: torch.dtype | str | None, precision: torch.dtype
) -> None:
    ours, reference = linear(), linear()
    wrapper = AmpOptimWrapper(sgd(ours), dtype, clip_grad={"max_norm": 0.01})
    optimizer = sgd(reference)
    scaler = torch.amp.GradScaler("cpu", enabled=precision is torch.float16)
    assert wrapper.dtype is precision
    for batch in batches(3):
        with wrapper.optim_context(ours):
            loss = ours(batch).float().square().mean()
        assert wrapper.update_params(loss)
        with torch.autocast("cpu", precision):
            expected = reference(batch).float().square().mean()
        scaler.scale(expected).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(loss, expected)
    assert same(ours, reference)
    assert wrapper.grad_scaler.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_skipped_by_the_scaler_is_returned_and_counted(fused: bool) -> None:
    model = linear()
    before = copy.deepcopy(model)
    wrapper = AmpOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), "float16"
    )
    good = batches(1)[0]
    assert not wrapper.update_params(model(good).mean() * torch.inf)
    assert same(model, before)
    assert wrapper.skipped_updates == 1
    assert wrapper.update_params(model(good).mean())
    assert wrapper.skipped_updates == 1
    assert not same(model, before)


def test_the_scaler_and_the_count_of_skipped_updates_resume_those_of_mmengine_too() -> (
    None
):
    model = linear()
    wrapper = AmpOptimWrapper(sgd(model), "float16")
    wrapper.update_params(model(batches(1)[0]).mean() * torch.inf)
    state = wrapper.state_dict()
    mmengines = {**state, "loss_scaler": state["grad_scaler"]}
    del mmengines["grad_scaler"]
    for saved in (state, mmengines):
        other = AmpOptimWrapper(sgd(linear()), "float16")
        other.load_state_dict(saved)
        assert other.skipped_updates == 1
        assert (
            other.grad_scaler.get_scale() == wrapper.grad_scaler.get_scale() == 32768.0
        )


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_who_looks_between_backward_and_update_sees_true_gradients(
    dtype: str | None,
) -> None:
    model, reference = linear(), linear()
    clip = {"max_norm": 1e-3}
    wrapper = (
        AmpOptimWrapper(sgd(model), dtype, clip_grad=clip)
        if dtype
        else OptimWrapper(sgd(model), clip_grad=clip)
    )
    seen = []

    def look() -> None:
        wrapper.unscale_gradients()  # again: it changes nothing
        assert model.weight.grad is not None
        seen.append(model.weight.grad.clone())

    wrapper.after_backward = look
    batch = batches(1)[0]
    wrapper.update_params(loss_of(model, batch))
    loss_of(reference, batch).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], reference.weight.grad)


def test_other_types_and_scales_are_refused() -> None:
    for dtype in (torch.float64, "float32", "half-ish"):
        with pytest.raises(ValueError, match=f"float16 or bfloat16, but got .*{dtype}"):
            AmpOptimWrapper(sgd(linear()), dtype)
    for scale in ("static", None, 0, -1):
        with pytest.raises(ValueError, match=f"loss_scale must be .*{scale!r}"):
            AmpOptimWrapper(sgd(linear()), "float16", loss_scale=scale)  # type: ignore[arg-type]


def test_the_device_is_that_of_the_first_parameter_wherever_it_is() -> None:
    groups = [
        {"params": []},
        {"params": [torch.nn.Parameter(torch.ones(1, device="meta"))]},
    ]
    wrapper = AmpOptimWrapper(torch.optim.SGD(groups, lr=0.1), "bfloat16")
    assert wrapper.device_type == "meta"


def test_a_scale_is_fixed_or_a_scaler_with_the_arguments_of_a_dict_or_the_given_one() -> (
    None
):
    options = {"init_scale": 4.0, "growth_interval": 1}
    scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    scales: list[Any] = [8, options, scaler]
    models = [linear() for _ in scales]
    fixed, grown, given = wrappers = [
        AmpOptimWrapper(sgd(m), "float16", loss_scale=s)
        for m, s in zip(models, scales, strict=True)
    ]
    for factor in (1.0, torch.inf, 1.0, 1.0):
        for model, wrapper in zip(models, wrappers, strict=True):
            updated = wrapper.update_params(loss_of(model, batches(1)[0]) * factor)
            assert updated == (factor == 1.0)
        assert fixed.grad_scaler.get_scale() == 8.0
    assert given.grad_scaler is scaler
    assert (
        grown.grad_scaler.get_scale() == scaler.get_scale() == 16.0
    )  # 4 * 2 / 2 * 2 * 2
    assert same(models[1], models[2])
    assert [wrapper.skipped_updates for wrapper in wrappers] == [1, 1, 1]
    assert options == {"init_scale": 4.0, "growth_interval": 1}
