"""Count the collectives of steps, checkpoints, resumes and evaluations.

    python tools/count_collectives.py

A few processes do each of these. The main process prints the number of collectives that torch ran,
including its own, and the bytes passed to them. tools/benchmark_scale.py counts those of a period.
"""

import argparse
import logging
import tempfile
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from benchmark_scale import Model, Traffic
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import SimpleTrainer, hooks, launch
from hooktrain.evaluation import inference_on_dataset
from hooktrain.model.sharding import shard_model
from hooktrain.solver import OptimWrapper
from hooktrain.utils import comm

COUNTS: list[tuple[str, int, int]] = []


def count(what: str, function: Callable[[], object]) -> None:
    """Call a function, and note how many collectives it took."""
    with Traffic() as traffic:
        function()
    COUNTS.append((what, traffic.count, traffic.bytes))


def count_checkpoints(folder: Path, trainer: SimpleTrainer) -> None:
    """Files, and folders of shards in the foreground and in the background."""
    file = Checkpointer(trainer.model, folder / "file", trainer=trainer)
    count("state of the trainer, before a checkpoint", trainer.synchronize)
    count("a file", lambda: file.save("a"))
    count("finding and reading a file", lambda: file.resume_or_load(""))
    shards = Checkpointer(
        trainer.model, folder / "shards", trainer=trainer, sharded=True
    )
    count("a folder in the foreground", lambda: shards.save("a"))
    count("finding and reading a folder", lambda: shards.resume_or_load(""))
    beside = Checkpointer(
        trainer.model, folder / "beside", trainer=trainer, sharded=True, background=True
    )
    count("a folder in the background, on the main thread", lambda: beside.save("a"))
    beside.wait()


class CountedStep(hooks.HookBase):
    """Counts the collectives of one step inside a period, including torch's own."""

    def __init__(self, what: str) -> None:
        self.what = what

    def before_step(self) -> None:
        """Start counting."""
        self.traffic = Traffic()
        self.traffic.__enter__()

    def after_step(self) -> None:
        """Note the counts of the last step."""
        self.traffic.__exit__(None, None, None)
        if self.trainer.iter == 5:
            COUNTS.append((self.what, self.traffic.count, self.traffic.bytes))


def count_step(what: str, model: nn.Module, **options: Any) -> None:
    """Train for ten iterations, half a period."""
    optimizer = torch.optim.AdamW(model.parameters())
    wrapper = OptimWrapper(optimizer, **options)
    trainer = SimpleTrainer(model, repeat(torch.randn(16, 16)), wrapper)
    trainer.register_hooks([CountedStep(what)])
    trainer.train(0, 10)


def main(folder: str) -> None:
    """Count in one of the processes."""
    logging.disable()
    clipped = {"clip_grad": {"max_norm": 1.0}}
    count_step("a step of a model that is not distributed", Model(1), **clipped)
    count_step("a step with DistributedDataParallel", DistributedDataParallel(Model(1)))
    count_step("a step of a sharded model", shard_model(Model(1)))
    count_step(
        "the same, and its gradient is clipped", shard_model(Model(1)), **clipped
    )
    model = Model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = SimpleTrainer(model, repeat(torch.randn(16, 16)), optimizer)
    count("a run of no iterations", lambda: trainer.train(0, 0))
    trainer.train(0, 20)
    count_checkpoints(Path(folder), trainer)
    evaluation = hooks.EvalHook(1, lambda: {"accuracy": 1.0})
    trainer.register_hooks([evaluation])
    evaluation.before_train()
    with trainer.storage:
        count("EvalHook, without the evaluation", evaluation.after_train)
    batches = [torch.randn(16, 16)] * 4
    count("an evaluation", lambda: inference_on_dataset(model, batches, None))
    sharded = shard_model(Model(1))
    count(
        "an evaluation of 4 batches, sharded",
        lambda: inference_on_dataset(sharded, batches, None),
    )
    if comm.is_main_process():
        print(tabulate(COUNTS, ["what", "collectives", "bytes"], "pipe"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launch(main, args.ranks, args=(folder,))
