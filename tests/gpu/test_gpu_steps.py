"""Steps on a CUDA device: nothing waits for it, and nothing is added to what it computes."""

import copy
import os
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from card import (
    CUDA,
    DEVICE,
    Clock,
    Perceptron,
    Watched,
    needs_card,
    now,
    pinned,
    register_all,
)
from equality import assert_equal
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA, ReplayCheck
from hooktrain.evaluation import inference_on_dataset
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from toys import sgd

DTYPES = ["float32", "bfloat16", "float16"]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def wrap(model: nn.Module, dtype: str, **options: Any) -> OptimWrapper:
    optimizer = options.pop("optimizer", adamw)(model)
    if dtype == "float32":
        return OptimWrapper(optimizer, **options)
    return AmpOptimWrapper(optimizer, dtype, **options)


class Boxed:
    """A batch that moves by its own method."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Boxed":
        return Boxed(self.tensor.to(device, non_blocking=non_blocking))


class Unboxing(Perceptron):
    def forward(self, x: Any) -> Tensor:
        return super().forward(getattr(x, "tensor", x))


@pytest.mark.parametrize(
    ("dtype", "options", "waits"),
    [
        ("float32", {}, 0),
        ("bfloat16", {"clip_grad": {"max_norm": 1.0}}, 0),
        ("bfloat16", {"accumulative_counts": 2}, 0),
        ("float16", {"clip_grad": {"max_norm": 1.0}}, 0),
        (
            "float16",
            {"optimizer": sgd},
            1,
        ),  # of torch's scaler: its kernel reads no flag
    ],
)
def test_nothing_waits_for_the_device_between_two_log_points(
    dtype: str, options: Any, waits: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = Unboxing(64, 2, dropout=0.1).to(DEVICE)
    data = [*pinned(2, 32, 64), *map(Boxed, pinned(2, 32, 64))]
    trainer = Watched(model, cycle(data), wrap(model, dtype, **options))
    trainer.transfers = [] if CUDA else request.getfixturevalue("transfers")
    register_all(trainer, tmp_path, EMA(model))
    trainer.train(max_iter=40)
    for period in (trainer.waits[5:19], trainer.waits[20:39]):
        assert set(period) == {waits}
    assert trainer.waits[19] > waits  # the counter works


def bare_seconds(
    model: nn.Module, data: list[Tensor], dtype: str, warmup: int, steps: int
) -> float:
    """The seconds of a step of a loop without anything around it."""
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == "float16")
    precision = getattr(torch, dtype)
    start = 0.0
    for i, batch in enumerate(islice(cycle(data), warmup + steps)):
        if i == warmup:
            start = now()
        x = batch.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, precision, enabled=dtype != "float32"):
            loss = model(x)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return (now() - start) / steps


def our_seconds(
    model: nn.Module, data: Iterable[Any], dtype: str, warmup: int, steps: int
) -> float:
    trainer = SimpleTrainer(model, cycle(data), wrap(model, dtype))
    clock = Clock(warmup)
    trainer.register_hooks([clock])
    trainer.train(max_iter=warmup + steps)
    return clock.seconds


@needs_card
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "depth", "rows"), [(1024, 4, 1024), (4096, 12, 2048)]
)
def test_a_step_takes_hardly_longer_than_that_of_a_bare_loop(
    width: int, depth: int, rows: int, dtype: str
) -> None:
    model = Perceptron(width, depth).to(DEVICE)
    data = pinned(4, rows, width)
    bare, ours = [], []
    for _ in range(3):
        bare.append(bare_seconds(model, data, dtype, 10, 60))
        ours.append(our_seconds(model, data, dtype, 10, 60))
    assert min(ours) - min(bare) < max(1e-4, 0.05 * min(bare))


@needs_card
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_batch_is_copied_while_the_device_computes_on_another(dtype: str) -> None:
    model = Perceptron(4096, 4).to(DEVICE)
    data = pinned(3, 16384, 4096)  # of 256 MiB
    both = our_seconds(model, data, dtype, 10, 30)
    compute = our_seconds(model, [data[0].to(DEVICE)], dtype, 10, 30)
    start = now()
    for batch in data:
        batch.to(DEVICE, non_blocking=True)
    copies = (now() - start) / 3
    hidden = compute + copies - both
    assert hidden > 0.7 * min(copies, compute)


@needs_card
def test_evaluations_do_not_take_more_memory_each_time() -> None:
    model, data = nn.Linear(1024, 8).to(DEVICE), pinned(3, 16384, 1024)
    held = []
    for _ in range(24):
        inference_on_dataset(model, data, None)
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_is_computed_twice_has_the_same_bits(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ends = []
    torch.use_deterministic_algorithms(True)
    try:
        for hooks in ([], [ReplayCheck(2)]):
            model = Perceptron(64, 2, dropout=0.1).to(DEVICE)
            wrapper = wrap(model, dtype, accumulative_counts=2)
            trainer = SimpleTrainer(model, cycle(pinned(4, 32, 64)), wrapper)
            trainer.seed = 0
            trainer.register_hooks(hooks)
            trainer.train(max_iter=10)
            losses = trainer.storage.history("total_loss").values()
            ends.append((dict(model.state_dict()), losses))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(*ends)


@needs_card
@patch.dict(os.environ)  # the compiler leaves variables of its own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's imports
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains_as_in_eager_mode(mode: str) -> None:
    def losses(model: nn.Module, lr: float = 1e-3) -> list[float]:
        wrapper = AmpOptimWrapper(sgd(model, lr=lr), "bfloat16")
        trainer = SimpleTrainer(model, cycle(pinned(4, 64, 64)), wrapper)
        trainer.seed = 0
        trainer.train(max_iter=20)
        return [value for value, _ in trainer.storage.history("total_loss").values()]

    def compiled(model: nn.Module) -> nn.Module:
        model.compile(mode=mode)
        return model

    model = Perceptron(64, 3).to(DEVICE)
    expected = losses(copy.deepcopy(model))
    torch.testing.assert_close(losses(compiled(model)), expected, atol=0.01, rtol=0)
    # With CUDA graphs too each step has dropout of its own, from the seed.
    first, second = (
        losses(compiled(Perceptron(64, 3, dropout=0.5).to(DEVICE)), lr=0.0)
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(first)
