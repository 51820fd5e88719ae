"""Several optimizers, with a loss for each or one for all."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.events import EventStorage
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from toys import LinearLoss, batches, sgd


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
        assert not wrappers["b"].update_params(b(batch) * torch.inf)
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


def test_a_member_must_be_a_wrapper() -> None:
    with pytest.raises(TypeError, match="'a'"):
        OptimWrapperDict(a=sgd(LinearLoss()))  # type: ignore[arg-type]


# One loss for all

CLIP = {"max_norm": 0.05}


def parts_of(model: LinearLoss) -> dict[str, Any]:
    return {
        "muon": torch.optim.Muon([model.fc.weight], lr=0.1),
        "adamw": torch.optim.AdamW([model.fc.bias], lr=0.1),
    }


def together(model: LinearLoss, dtype: str | None, **options: Any) -> OptimWrapperDict:
    wrappers: dict[str, OptimWrapper] = {}
    for name, optimizer in parts_of(model).items():
        if dtype is None:
            wrappers[name] = OptimWrapper(optimizer, **options)
        else:
            wrappers[name] = AmpOptimWrapper(optimizer, dtype, **options)
    return OptimWrapperDict(**wrappers)


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [(None, 1), (None, 2), ("bfloat16", 3), ("float16", 1), ("float16", 2)],
)
def test_one_loss_for_several_is_a_loop_written_by_hand_bit_for_bit(
    dtype: str | None, counts: int
) -> None:
    ours, reference = LinearLoss(), LinearLoss()
    wrappers = together(ours, dtype, accumulative_counts=counts, clip_grad=CLIP)
    scaled = dtype == "float16"
    factors = [torch.inf if scaled and i == 6 else 1.0 for i in range(12)]
    for batch, factor in zip(batches(12), factors, strict=True):
        with wrappers.optim_context(ours):
            loss = ours(batch) * factor
        wrappers.update_params(loss)
    # As torch's documentation has it for several optimizers: one scaler for all.
    optimizers = parts_of(reference).values()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    scale = scaler.get_scale()
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
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        skipped += int(scaler.get_scale() < scale)
        scale = scaler.get_scale()
    assert all(map(torch.equal, ours.parameters(), reference.parameters()))
    for wrapper in wrappers.values():
        assert wrapper.skipped_updates == skipped
        if isinstance(wrapper, AmpOptimWrapper):
            assert wrapper.grad_scaler.get_scale() == scale
    assert (skipped > 0) == scaled


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_each_of_several_optimizers_with_one_scaler_counts_its_own_skips(
    place: str, request: pytest.FixtureRequest
) -> None:
    if place == "device":
        request.getfixturevalue("transfers")
    model = LinearLoss()
    wrappers = together(model, "float16")
    loss = model.fc.weight.square().mean() + torch.inf * model.fc.bias.sum()
    wrappers.update_params(loss)
    assert wrappers["muon"].skipped_updates == 0
    assert wrappers["adamw"].skipped_updates == 1


@pytest.mark.parametrize("other", [{"accumulative_counts": 2}, {"dtype": "bfloat16"}])
def test_what_cannot_share_a_loss_is_refused(other: Any) -> None:
    model = LinearLoss()
    wrappers = together(model, None)
    wrappers["adamw"] = together(model, **{"dtype": None, **other})["adamw"]
    with pytest.raises(ValueError, match="OptimWrapper"):
        wrappers.update_params(model(batches(1)[0]))
