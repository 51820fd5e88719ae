"""Accumulation: windows, their shorter last one, and resuming inside of one."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_toys import batches, linear, loss_of, same, sgd

from gloo import run_ranks
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from hooktrain.utils import comm


def reference_run(sizes: list[int], data: list[torch.Tensor]) -> nn.Module:
    """Windows of these sizes, by hand."""
    model = linear()
    optimizer = sgd(model)
    place = 0
    for size in sizes:
        optimizer.zero_grad()
        for batch in data[place : place + size]:
            (loss_of(model, batch) / size).backward()
        optimizer.step()
        place += size
    return model


def test_the_last_window_is_shorter_and_still_a_mean() -> None:
    data = batches(10)
    model = linear()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=4)
    wrapper.initialize_count_status(model, 0, 10)
    updated = [wrapper.update_params(loss_of(model, batch)) for batch in data]
    assert [i for i, u in enumerate(updated) if u] == [3, 7, 9]
    assert same(model, reference_run([4, 4, 2], data))


def test_a_longer_run_begins_a_whole_window_after_a_shorter_one() -> None:
    data = batches(9)
    model = linear()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 4)
    for batch in data[:4]:
        wrapper.update_params(loss_of(model, batch))
    wrapper.initialize_count_status(model, 4, 9)
    for batch in data[4:]:
        wrapper.update_params(loss_of(model, batch))
    assert same(model, reference_run([3, 1, 3, 2], data))


def test_ranks_are_to_communicate_where_a_window_ends_the_last_one_too() -> None:
    model = linear()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 4)
    seen = []
    for batch in batches(4):
        seen.append(wrapper.should_sync())
        wrapper.update_params(loss_of(model, batch))
    assert seen == [False, False, True, True]


def test_scaled_losses_are_those_of_the_window_they_belong_to() -> None:
    model = linear()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=4)
    wrapper.initialize_count_status(model, 0, 6)
    scaled = []
    for batch in batches(6):
        scaled.append(wrapper.scale_loss(torch.tensor(12.0)).item())
        wrapper.update_params(loss_of(model, batch))
    assert scaled == [3.0, 3.0, 3.0, 3.0, 6.0, 6.0]


@pytest.mark.parametrize("counts", [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(counts: tuple[int, int]) -> None:
    wrapper = OptimWrapper(sgd(linear()), accumulative_counts=2)
    with pytest.raises(ValueError, match=f"got {counts[0]} and {counts[1]}"):
        wrapper.initialize_count_status(linear(), *counts)


def test_batch_norm_under_accumulation_is_worth_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(3))
    OptimWrapper(sgd(model)).initialize_count_status(model, 0, 3)
    assert caplog.text == ""
    OptimWrapper(sgd(model), accumulative_counts=2).initialize_count_status(model, 0, 3)
    assert "Batch norm takes its statistics from one batch" in caplog.text


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_state_saved_inside_of_a_window_resumes_bit_for_bit(kind: str, stop: int) -> None:
    def make() -> tuple[nn.Module, OptimWrapper]:
        model = linear()
        options: Any = {"accumulative_counts": 3, "clip_grad": {"max_norm": 0.1}}
        if kind == "float32":
            return model, OptimWrapper(sgd(model), **options)
        return model, AmpOptimWrapper(sgd(model), kind, **options)

    def step(model: nn.Module, wrapper: OptimWrapper, batch: torch.Tensor) -> None:
        with wrapper.optim_context(model):
            loss = model(batch).float().square().mean()
        wrapper.update_params(loss)

    data = batches(7)
    whole, whole_wrapper = make()
    for batch in data:
        step(whole, whole_wrapper, batch)
    first, first_wrapper = make()
    for batch in data[:stop]:
        step(first, first_wrapper, batch)
    state = copy.deepcopy(first_wrapper.state_dict())
    assert ("gradients" in state) == (stop % 3 != 0)
    second, second_wrapper = make()
    second.load_state_dict(first.state_dict())
    second_wrapper.load_state_dict(state)
    for batch in data[stop:]:
        step(second, second_wrapper, batch)
    assert same(second, whole)
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(second.parameters(), whole.parameters(), strict=True)
    )


def test_a_window_ends_where_parameters_are_new_and_stays_open_where_some_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def named(model: nn.Module) -> OptimWrapper:
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        return OptimWrapper(optimizer, accumulative_counts=2)

    model = nn.Sequential(linear(), nn.Linear(3, 2))
    wrapper = named(model)
    wrapper.update_params(loss_of(model, batches(1)[0]))
    state = wrapper.state_dict()

    smaller = nn.Sequential(linear())
    loaded = named(smaller)
    loaded.load_state_dict(state)
    assert not loaded.should_update()
    assert torch.equal(smaller[0].weight.grad, model[0].weight.grad)  # type: ignore[arg-type]
    assert "a new window begins" not in caplog.text

    larger = named(nn.Sequential(linear(), nn.Linear(3, 2), nn.Linear(2, 2)))
    larger.load_state_dict(state)
    assert larger.should_update()
    assert larger.inner_count == 1
    assert "a new window begins" in caplog.text


def window_of_ranks() -> tuple[torch.Tensor, list[bool], torch.Tensor]:
    """Two ranks stop inside of a window; the state goes on in one process."""
    unused = nn.Parameter(torch.ones(1))
    model = linear()
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.1)
    wrapper = OptimWrapper(optimizer, accumulative_counts=2)
    mine = batches(4)[comm.get_rank() :: 2]
    wrapper.update_params(loss_of(model, mine[0]))
    own = model.weight.grad.clone()  # type: ignore[union-attr]
    wrapper.prepare_state()
    state = wrapper.state_dict()
    untouched = torch.equal(model.weight.grad, own)  # type: ignore[arg-type]
    none = [g is None for g in state["gradients"]]
    return state["gradients"][0], [untouched, *none], own


def test_ranks_save_the_mean_of_their_gradients_and_keep_their_own() -> None:
    (a, kept, own_a), (b, _, own_b) = run_ranks(window_of_ranks, 2)
    assert torch.equal(a, b)
    torch.testing.assert_close(a, (own_a + own_b) / 2)
    assert not torch.equal(own_a, own_b)
    assert kept == [True, False, False, True]


def test_the_length_of_a_window_must_be_a_positive_integer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        for bad in (0, -1, 1.5):
            with pytest.raises(ValueError, match=str(bad)):
                OptimWrapper(sgd(linear()), accumulative_counts=bad)  # type: ignore[arg-type]
