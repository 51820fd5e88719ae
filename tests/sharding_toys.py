"""A small transformer and its training, sharded or not, for the tests of sharded models."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from hooktrain.checkpoint import Checkpointer
from hooktrain.config import LazyCall
from hooktrain.demos.text import Block, TextGPT
from hooktrain.model.sharding import shard_model
from hooktrain.model.wrappers import unwrap_model
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


def make_strategy(kind: type[BaseStrategy], **options: Any) -> BaseStrategy:
    if kind is FSDPStrategy:
        options = {"wrap": {Block}, **options}
    return kind(seed=3, device="cpu", **options)


class Run:
    """A model that a strategy has prepared, and what trains and saves it."""

    def __init__(
        self,
        kind: type[BaseStrategy],
        folder: str,
        config: Any = CONFIG,
        sharded: bool = False,
        **options: Any,
    ) -> None:
        self.strategy = make_strategy(kind, **options)
        self.model = self.strategy.prepare(config)
        self.optim_wrapper = make_wrapper(self.model, clip_grad={"max_norm": 0.5})
        self.optim_wrapper.name_parameters(self.model)
        self.scheduler = LinearLR(self.optim_wrapper.optimizer, 0.5, total_iters=5)
        self.checkpointer = Checkpointer(
            self.model,
            folder,
            sharded=sharded,
            optimizer=self.optim_wrapper,
            scheduler=self.scheduler,
        )

    def train(self, steps: slice) -> list[float]:
        losses = []
        for batch in DATA[steps]:
            losses += train(self.model, self.optim_wrapper, [batch])
            self.scheduler.step()
        return losses

    def states(self) -> Any:
        """The whole states on the main process."""
        model = full_tensors(dict(unwrap_model(self.model).state_dict()))
        optimizer = full_tensors(self.optim_wrapper.state_dict())["state"]
        return copy.deepcopy({"model": model, "optimizer": optimizer})


def saved_run(kind: type[BaseStrategy], folder: str, **options: Any) -> dict[str, Any]:
    """Three steps, a checkpoint, and two more."""
    run = Run(kind, folder, **options)
    losses = run.train(slice(3))
    run.checkpointer.save("model_0000002", iteration=2)
    kept = run.states()
    return {"states": kept, "losses": losses + run.train(slice(3, 5))}


def resumed_run(
    kind: type[BaseStrategy], folder: str, **options: Any
) -> dict[str, Any]:
    run = Run(kind, folder, **options)
    rest = run.checkpointer.resume_or_load("")
    kept = run.states()
    return {
        "iteration": rest["iteration"],
        "states": kept,
        "losses": run.train(slice(3, 5)),
    }
