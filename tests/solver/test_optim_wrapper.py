"""How a loss becomes an update, compared with loops written by hand."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from wrapper_toys import batches, linear, same, sgd

from gloo import run_ranks
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from hooktrain.utils.events import EventStorage


@pytest.mark.parametrize(
    ("clip", "by_hand"),
    [
        (None, lambda p: None),
        ({"max_norm": 0.01}, lambda p: nn.utils.clip_grad_norm_(p, 0.01)),
        ({"max_norm": 0.01, "norm_type": 1}, lambda p: nn.utils.clip_grad_norm_(p, 0.01, 1)),
        ({"type": "value", "clip_value": 0.01}, lambda p: nn.utils.clip_grad_value_(p, 0.01)),
    ],
)
def test_updates_equal_a_loop_written_by_hand_bit_for_bit(clip: Any, by_hand: Any) -> None:
    ours, reference = linear(), linear()
    wrapper, optimizer = OptimWrapper(sgd(ours), clip_grad=clip), sgd(reference)
    for batch in batches(5):
        assert wrapper.update_params(ours(batch).square().mean())
        reference(batch).square().mean().backward()
        by_hand(list(reference.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert same(ours, reference)


def test_clipping_takes_the_norm_of_all_gradients_together() -> None:
    model = linear()
    wrapper = OptimWrapper(sgd(model), clip_grad={"max_norm": 1.0})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    wrapper.clip_gradients()
    total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert total.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_the_norm_before_clipping_is_logged() -> None:
    model = linear()
    wrapper = OptimWrapper(sgd(model), clip_grad={"max_norm": 1.0})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    with EventStorage() as storage:
        wrapper.step()
    assert storage.latest()["grad_norm"][0] == pytest.approx(2.0 * 15**0.5)


def test_the_callers_clipping_dict_stays_as_it_was() -> None:
    clip = {"type": "value", "clip_value": 0.5}
    for _ in range(2):
        OptimWrapper(sgd(linear()), clip_grad=clip)
    assert clip == {"type": "value", "clip_value": 0.5}


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ({"type": "both", "max_norm": 1.0}, "'norm' or 'value', but got 'both'"),
        ({}, r"clip_grad\['max_norm'\] must be a positive number, but got None"),
        ({"max_norm": -1.0}, "got -1.0"),
        ({"max_norm": 1.0, "norm": 2}, r"unknown keys \['norm'\]"),
        ({"type": "value", "max_norm": 1.0}, r"unknown keys \['max_norm'\]"),
    ],
)
def test_wrong_clipping_is_refused(clip: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimWrapper(sgd(linear()), clip_grad=clip)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="optimizer must be"):
        OptimWrapper(linear())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="clip_grad must be a dict"):
        OptimWrapper(sgd(linear()), clip_grad=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        OptimWrapper(sgd(linear()), accumulative_counts=0)
    with pytest.raises(ValueError, match="float64"):
        AmpOptimWrapper(sgd(linear()), torch.float64)


def test_accumulated_batches_give_the_gradients_of_one_large_batch() -> None:
    ours, reference = linear(), linear()
    wrapper = OptimWrapper(sgd(ours), accumulative_counts=4)
    small = batches(4)
    updated = [wrapper.update_params(ours(b).square().mean()) for b in small[:3]]
    wrapper.backward(wrapper.scale_loss(ours(small[3]).square().mean()))
    reference(torch.cat(small)).square().mean().backward()
    assert updated == [False, False, False]
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)


def test_a_state_in_the_middle_of_a_window_knows_how_far_it_has_come() -> None:
    model = linear()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=3)
    wrapper.update_params(model(batches(1)[0]).mean())
    other = OptimWrapper(sgd(linear()), accumulative_counts=3)
    other.load_state_dict(wrapper.state_dict())
    assert other.inner_count == 1
    assert not other.should_sync()


def test_the_state_of_a_plain_torch_optimizer_loads_and_the_other_way_round() -> None:
    model = linear()
    optimizer = sgd(model)
    model(batches(1)[0]).mean().backward()
    optimizer.step()
    wrapper = OptimWrapper(sgd(linear()))
    wrapper.load_state_dict(optimizer.state_dict())
    buffer = wrapper.optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(buffer, optimizer.state_dict()["state"][0]["momentum_buffer"])
    sgd(linear()).load_state_dict(wrapper.state_dict())


def test_settings_that_the_checkpoint_overrules_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = OptimWrapper(torch.optim.SGD(linear().parameters(), lr=0.1, weight_decay=0.01))
    loaded = OptimWrapper(torch.optim.SGD(linear().parameters(), lr=0.5, weight_decay=0.01))
    with caplog.at_level(logging.WARNING):
        loaded.load_state_dict(saved.state_dict())
    rows = [line.split() for line in caplog.text.splitlines() if line.startswith("|  ")]
    assert [row[3:8:2] for row in rows[1:]] == [["lr", "0.5", "0.1"]]
    assert loaded.optimizer.param_groups[0]["lr"] == 0.1


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


def reductions_of_accumulation() -> tuple[list[int], bool]:
    model = nn.parallel.DistributedDataParallel(linear())
    calls = [0]

    def count(
        _: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        calls[0] += 1
        return allreduce_hook(torch.distributed.group.WORLD, bucket)

    model.register_comm_hook(None, count)
    wrapper = OptimWrapper(sgd(model), accumulative_counts=3)
    rank = torch.distributed.get_rank()
    mine = batches(6)[rank::2]
    seen = []
    for batch in mine:
        with wrapper.sync_context(model):
            wrapper.backward(wrapper.scale_loss(model(batch).square().mean()))
        seen.append(calls[0])
    reference = linear()
    reference(torch.cat(batches(6))).square().mean().backward()
    close = all(
        torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]
        for a, b in zip(model.module.parameters(), reference.parameters(), strict=True)
    )
    return seen, close


def test_ranks_communicate_in_the_last_backward_of_a_window_only() -> None:
    for seen, close in run_ranks(reductions_of_accumulation, 2):
        assert seen == [0, 0, 1]
        assert close


@pytest.mark.parametrize(("dtype", "scales"), [("float16", True), ("bfloat16", False)])
def test_the_name_of_a_type_chooses_the_scaler_as_the_type_does(dtype: str, scales: bool) -> None:
    for given in (dtype, getattr(torch, dtype)):
        assert AmpOptimWrapper(sgd(linear()), given).grad_scaler.is_enabled() is scales


def test_a_run_resumed_with_another_count_begins_with_a_whole_window() -> None:
    model = linear()
    old = OptimWrapper(sgd(model), accumulative_counts=2)
    for _ in range(2):
        old.update_params(model(torch.ones(4)).sum())
    new = OptimWrapper(sgd(model), accumulative_counts=3)
    new.load_state_dict(old.state_dict())
    updated = [new.update_params(model(torch.ones(4)).sum()) for _ in range(6)]
    assert updated == [False, False, True, False, False, True]


def test_an_optimizer_put_in_later_has_its_own_zero_grad_called() -> None:
    calls = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(set_to_none)

    model = linear()
    wrapper = OptimWrapper(sgd(model))
    wrapper.optimizer = Own(model.parameters(), lr=0.1)
    wrapper.zero_grad()
    assert calls == [True]
    with pytest.raises(TypeError, match="must be a torch optimizer"):
        wrapper.optimizer = wrapper  # type: ignore[assignment]
