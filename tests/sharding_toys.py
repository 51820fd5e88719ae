"""A small transformer and its training, sharded or not, for the tests of sharded models."""

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hooktrain.config import LazyCall
from hooktrain.demos.text import Block, TextGPT
from hooktrain.model.sharding import shard_model
from hooktrain.solver import OptimWrapper
from hooktrain.strategy import BaseStrategy, FSDPStrategy
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensors

VOCABULARY = 17  # divisible by no number of ranks


def make_model(dropout: float = 0.0) -> TextGPT:
    torch.manual_seed(3)
    return TextGPT(VOCABULARY, 8, (2, 16, 2), dropout)


def make_sharded(dropout: float = 0.0, **options: Any) -> nn.Module:
    return shard_model(make_model(dropout), **{"wrap": {Block}, **options})


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole state on the main process, nothing on the others. A collective."""
    state: dict[str, Any] = full_tensors(dict(model.state_dict()))
    return state if comm.is_main_process() else {}


def make_wrapper(model: nn.Module, **options: Any) -> OptimWrapper:
    return OptimWrapper(torch.optim.AdamW(model.named_parameters(), lr=0.01), **options)


def batches(count: int, size: int = 8) -> list[dict[str, Tensor]]:
    """Global batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(VOCABULARY, (count, size, 9), generator=generator)
    return [{"tokens": text[:, :-1], "targets": text[:, 1:]} for text in texts]


def own_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rank, size = comm.data_parallel_rank(), comm.data_parallel_size()
    return {name: value[rank::size] for name, value in batch.items()}


def train(
    model: nn.Module, wrapper: OptimWrapper, data: Sequence[dict[str, Tensor]]
) -> list[float]:
    """One pass for each batch; the losses as means over the ranks."""
    model.train()
    losses = []
    for batch in data:
        with wrapper.optim_context(model):
            loss = model(own_part(batch))["loss_lm"]
            wrapper.update_params(loss)
        mean = loss.detach().clone()
        if comm.get_world_size() > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / comm.get_world_size())
    return losses


DATA = batches(2) * 3
CONFIG = LazyCall(TextGPT)(vocab_size=VOCABULARY, block_size=8, size=(2, 16, 2))
ADAMW = {"optimizer": {"type": "AdamW", "lr": 0.01}, "clip_grad": {"max_norm": 0.5}}
SCHEDULER = {"type": "LinearLR", "start_factor": 0.5, "end": 6, "by_epoch": False}


def make_strategy(
    kind: type[BaseStrategy], work_dir: str, **options: Any
) -> BaseStrategy:
    if kind is FSDPStrategy:
        options = {"wrap": {Block}, **options}
    return kind(work_dir=work_dir, env_kwargs={"seed": 3}, device="cpu", **options)


def prepared(
    kind: type[BaseStrategy], work_dir: str, config: Any = CONFIG, **options: Any
) -> BaseStrategy:
    strategy = make_strategy(kind, work_dir, **options)
    known = {"max_iters": 6}
    strategy.prepare(
        config, optim_wrapper=ADAMW, param_scheduler=SCHEDULER, dispatch_kwargs=known
    )
    return strategy


def run(strategy: BaseStrategy, steps: slice) -> list[float]:
    losses = []
    for batch in DATA[steps]:
        losses += train(strategy.model, strategy.optim_wrapper, [batch])  # type: ignore[arg-type]
        for scheduler in strategy.param_schedulers:
            scheduler.step()
    return losses


def states(strategy: BaseStrategy) -> Any:
    model = full_tensors(dict(strategy.model_state_dict()))
    optimizer = full_tensors(strategy.optim_state_dict())["state"]
    return copy.deepcopy({"model": model, "optimizer": optimizer})


def saved_run(kind: type[BaseStrategy], path: str, **options: Any) -> dict[str, Any]:
    """Three steps, a checkpoint, and three more."""
    strategy = prepared(kind, os.path.dirname(path), **options)
    losses = run(strategy, slice(3))
    strategy.save_checkpoint(path, extra_ckpt={"meta": {"iter": 3}})
    kept = states(strategy)
    return {"states": kept, "losses": losses + run(strategy, slice(3, 6))}


def resumed_run(
    kind: type[BaseStrategy], work_dir: str, resume: str | bool, **options: Any
) -> dict[str, Any]:
    strategy = prepared(kind, work_dir, **options)
    rest = strategy.load_or_resume(resume=resume)
    assert rest is not None
    kept = states(strategy)
    return {
        "iter": rest["meta"]["iter"],
        "states": kept,
        "losses": run(strategy, slice(3, 6)),
    }
