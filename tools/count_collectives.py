"""Count the collectives of what happens now and then: checkpoints, resumes, evaluations.

    python tools/count_collectives.py

Two processes do each of them, and the main one prints how many collectives torch has run, whoever
began them. tools/benchmark_scale.py counts those of a period.
"""

import logging
import tempfile
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import torch
from benchmark_scale import Model, Traffic
from tabulate import tabulate

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import SimpleTrainer, hooks, launch
from hooktrain.evaluation import inference_on_dataset
from hooktrain.model.sharding import shard_model
from hooktrain.utils import comm

COUNTS: list[tuple[str, int]] = []


def count(what: str, function: Callable[[], object]) -> None:
    """Do something, and note how many collectives that took."""
    with Traffic() as traffic:
        function()
    COUNTS.append((what, traffic.count))


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


def main(folder: str) -> None:
    """One of the two processes."""
    logging.disable()
    model = Model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = SimpleTrainer(model, repeat(torch.randn(16, 16)), optimizer)
    count("a run of no iterations", lambda: trainer.train(0, 0))
    trainer.train(0, 20)
    count_checkpoints(Path(folder), trainer)
    evaluation = hooks.EvalHook(1, lambda: {"accuracy": 1.0})
    trainer.register_hooks([evaluation])
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
        print(tabulate(COUNTS, ["what", "collectives"], "pipe"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        launch(main, 2, args=(folder,))
