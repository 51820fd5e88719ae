"""Several optimizers, with a loss for each or one for all."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.engine import SimpleTrainer
from hooktrain.events import EventStorage
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from toys import LinearLoss, Together, batches, sgd


def several(**options: Any) -> tuple[LinearLoss, LinearLoss, OptimWrapperDict]:
    a, b = LinearLoss(), LinearLoss()
    wrapper = AmpOptimWrapper(sgd(b, lr=0.2), "float16")
    return a, b, OptimWrapperDict(a=OptimWrapper(sgd(a), **options), b=wrapper)


def test_groups_and_metrics_of_several_optimizers_have_their_names() -> None:
    a, b, wrappers = several(clip_grad={"max_norm": 1.0})
    batch = batches(1)[0]
    assert [groups[0]["lr"] for groups in wrappers.param_groups.values()] == [0.1, 0.2]
    with EventStorage() as storage:
        wrappers["a"].update_params(a(batch))
        wrappers["b"].update_params(b(batch) * torch.inf)
    assert list(storage.latest()) == ["a.grad_norm", "b.skipped_updates"]
    a(batch).backward()
    b(batch).backward()
    wrappers.zero_grad()  # of all
    assert [p.grad for m in (a, b) for p in m.parameters()] == [None] * 4


def test_all_of_several_optimizers_begin_a_new_accumulation() -> None:
    a, _, wrappers = several(accumulative_counts=2)
    wrappers["a"].update_params(a(batches(1)[0]))
    wrappers.initialize_count_status(a, 7, 8)
    assert wrappers["a"].should_update()
    assert wrappers["a"].inner_count == 1


def test_the_state_of_several_optimizers_goes_by_name() -> None:
    a, b, wrappers = several()
    wrappers["a"].update_params(a(batches(1)[0]))
    wrappers["b"].update_params(b(batches(1)[0]) * torch.inf)
    _, _, others = several()
    others.load_state_dict(wrappers.state_dict())
    assert others["a"].inner_count == 1
    assert others["b"].skipped_updates == 1
    with pytest.raises(ValueError, match="'b'"):
        others.check_state_dict({"a": wrappers["a"].state_dict()})


@pytest.mark.parametrize("name", ["optimizer", "inner_count"])
def test_what_only_one_optimizer_does_says_what_to_call(name: str) -> None:
    _, _, wrappers = several()
    with pytest.raises(AttributeError, match=name):
        getattr(wrappers, name)
    assert copy.deepcopy(wrappers).keys() == wrappers.keys()


def test_one_loss_for_several_names_the_recipe() -> None:
    a, _, wrappers = several()
    trainer = SimpleTrainer(a, batches(1), {"a": sgd(a)})
    for call in (lambda: trainer.train(0, 1), lambda: wrappers.update_params(1)):
        with pytest.raises(AttributeError, match=r"docs/guide/optimizers\.md"):
            call()


# Several optimizers that are one, as the guide combines them


def muon_and_adamw(model: LinearLoss) -> Together:
    muon = torch.optim.Muon([model.fc.weight], lr=0.1)
    return Together(muon, torch.optim.AdamW([model.fc.bias], lr=0.1))


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [(None, 1), (None, 2), ("bfloat16", 3), ("float16", 1), ("float16", 2)],
)
def test_one_loss_for_several_is_a_loop_written_by_hand_bit_for_bit(
    dtype: str | None, counts: int
) -> None:
    ours, reference = LinearLoss(), LinearLoss()
    options: Any = {"accumulative_counts": counts, "clip_grad": {"max_norm": 0.05}}
    wrapper = OptimWrapper(muon_and_adamw(ours), **options)
    if dtype is not None:
        wrapper = AmpOptimWrapper(muon_and_adamw(ours), dtype, **options)
    scaled = dtype == "float16"
    factors = [torch.inf if scaled and i == 6 else 1.0 for i in range(12)]
    for batch, factor in zip(batches(12), factors, strict=True):
        with wrapper.optim_context(ours):
            loss = ours(batch) * factor
        wrapper.update_params(loss)
    # As torch's documentation has it for several optimizers: one scaler for all.
    optimizers = muon_and_adamw(reference).optimizers
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    skipped = 0
    precision = getattr(torch, dtype or "bfloat16")
    for i, (batch, factor) in enumerate(zip(batches(12), factors, strict=True), 1):
        with torch.autocast("cpu", precision, enabled=dtype is not None):
            loss = reference(batch) * factor
        scaler.scale(loss / counts).backward()
        if i % counts:
            continue
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.update()
        skipped += int(scaler.get_scale() < scale)
    assert all(map(torch.equal, ours.parameters(), reference.parameters()))
    assert wrapper.skipped_updates == skipped
    assert (skipped > 0) == scaled


def test_several_that_are_one_resume_bit_for_bit() -> None:
    def made() -> tuple[LinearLoss, OptimWrapper]:
        model = LinearLoss()
        wrapper = OptimWrapper(muon_and_adamw(model))
        wrapper.name_parameters(model)
        return model, wrapper

    (model, wrapper), (twin, resumed) = made(), made()
    for batch in batches(3):
        wrapper.update_params(model(batch))
    twin.load_state_dict(model.state_dict())
    state = copy.deepcopy(wrapper.state_dict())
    assert [*state["state"]] == ["fc.weight", "fc.bias"]
    resumed.load_state_dict(state)
    for batch in batches(3):
        wrapper.update_params(model(batch))
        resumed.update_params(twin(batch))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
