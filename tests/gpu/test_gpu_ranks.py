"""Ranks with a CUDA device each, over NCCL: all devices that there are."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from card import CUDA, Watched, needs_card
from equality import assert_equal
from hooktrain.checkpoint import Checkpointer
from hooktrain.data import build_train_loader
from hooktrain.demos.text import Block
from hooktrain.engine import launch
from hooktrain.engine.hooks import CallbackHook, PeriodicCheckpointer
from hooktrain.strategy import DDPStrategy, FSDPStrategy
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensors
from sharding_toys import batches, make_model, make_wrapper

CARDS = torch.cuda.device_count()
STRATEGIES: dict[str, Any] = {
    "ddp": (DDPStrategy, {}),
    "fsdp": (
        FSDPStrategy,
        {
            "wrap": {Block},
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "activation_checkpointing": {Block},
        },
    ),
    "fsdp, full": (FSDPStrategy, {"wrap": {Block}}),
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many to start; a single one is the test's process, joined as by torchrun."""
    if CARDS < 2:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in (ALONE | address).items():
            monkeypatch.setenv(name, value)
    return max(1, CARDS)


def texts() -> list[dict[str, torch.Tensor]]:
    samples = []
    for batch in batches(8):
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
            samples.append({"tokens": tokens, "targets": targets})
    return samples


def train(kind: str, folder: str, max_iter: int) -> None:
    """Save where it ran, what waited for the device in steps 5 to 7, the whole weights."""
    make, options = STRATEGIES[kind]
    strategy = make(seed=0, **options)
    model = strategy.prepare(make_model(0.1))
    optim_wrapper = make_wrapper(model, clip_grad={"max_norm": 0.5})
    loader = build_train_loader(texts(), total_batch_size=8 * comm.get_world_size())
    trainer = Watched(model, loader, optim_wrapper, gather_metric_period=4)
    trainer.transfers = []
    saver = Checkpointer(
        model, folder, trainer=trainer, background=True, sharded=kind == "fsdp"
    )
    trainer.register_hooks([PeriodicCheckpointer(saver, 4)])
    saver.resume_or_load("")
    trainer.train(max_iter=max_iter)
    weights = full_tensors(dict(model.state_dict()))
    if comm.is_main_process():
        found = dist.get_backend(), strategy.device.type, trainer.waits[5:7], weights
        torch.save(found, Path(folder, "found.pth"))


def outcome(ranks: int, kind: str, folder: str, max_iter: int) -> Any:
    """That of the main rank."""
    launch(train, ranks, args=(kind, folder, max_iter))
    return torch.load(Path(folder, "found.pth"))


@needs_card
@pytest.mark.parametrize("kind", STRATEGIES)
def test_ranks_train_without_waiting_and_resume_bit_for_bit(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    backend, device, waits, straight = outcome(ranks, kind, str(tmp_path / "one"), 8)
    assert ("nccl" in backend, device) == (CUDA, "cuda" if CUDA else "cpu")
    assert waits == [0, 0]
    outcome(ranks, kind, str(tmp_path / "two"), 4)
    *_, resumed = outcome(ranks, kind, str(tmp_path / "two"), 8)
    assert_equal(resumed, straight)


def fail_on_the_last_rank() -> None:
    def fail(trainer: Any) -> None:
        if trainer.iter == 5 and comm.get_rank() == comm.get_world_size() - 1:
            raise KeyError("the cause")

    model = DDPStrategy(seed=0).prepare(make_model())
    loader = build_train_loader(texts(), total_batch_size=8 * comm.get_world_size())
    trainer = Watched(model, loader, make_wrapper(model))
    trainer.transfers = []
    trainer.register_hooks([CallbackHook(after_backward=fail)])
    trainer.train(max_iter=100)


@needs_card
@pytest.mark.skipif(CARDS < 2, reason="needs two CUDA devices")
def test_all_ranks_end_soon_when_one_fails() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the cause"):
        launch(fail_on_the_last_rank, CARDS)
    assert time.monotonic() - start < 60
