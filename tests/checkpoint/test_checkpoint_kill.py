"""Killed while it saves, a run goes on from the newest checkpoint that was committed."""

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from hooktrain.checkpoint import Checkpointer, PeriodicCheckpointer
from processes import CONTEXT


def make_model(iteration: int) -> nn.Linear:
    model = nn.Linear(200, 50)
    for parameter in model.parameters():
        nn.init.constant_(parameter, iteration)
    return model


def save_without_end(
    folder: Path, start: int, committed: Connection, background: bool, sharded: bool
) -> None:
    torch.set_num_threads(1)
    model = make_model(start)
    checkpointer = Checkpointer(model, folder, background=background, sharded=sharded)
    periodic = PeriodicCheckpointer(checkpointer, period=1, max_to_keep=2)
    for iteration in range(start, 1_000_000):
        for parameter in model.parameters():
            nn.init.constant_(parameter, iteration)
        periodic.step(iteration)
        # In the background it is known to be there when the next one has begun.
        committed.send(iteration - background)


def kill_while_saving(
    folder: Path, start: int, saves: int, seconds: float, *mode: bool
) -> int:
    """Kill a saving process ``seconds`` after its n-th save; return the last one it committed."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(
        target=save_without_end, args=(folder, start, sender, *mode)
    )
    process.start()
    sender.close()
    committed = [receiver.recv() for _ in range(saves)]
    moment = time.perf_counter() + seconds
    while time.perf_counter() < moment:
        pass
    process.kill()
    process.join()
    try:
        while True:
            committed.append(receiver.recv())
    except EOFError:
        receiver.close()
    return int(committed[-1])


@pytest.mark.parametrize(
    ("background", "sharded"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["file", "file in the background", "folder", "folder in the background"],
)
def test_the_newest_committed_checkpoint_loads_after_each_kill(
    background: bool, sharded: bool, tmp_path: Path
) -> None:
    draw = random.Random(0)
    start = kills = leftovers = 0
    while (
        kills < 5 or leftovers == 0
    ):  # before some kill has hit a save the test proves nothing
        assert kills < 100, "no kill hits a save"
        kills += 1
        saves, seconds = draw.randint(2, 4), draw.uniform(0, 0.01)
        committed = kill_while_saving(
            tmp_path, start, saves, seconds, background, sharded
        )
        leftovers += any(".tmp-" in p.name for p in tmp_path.iterdir())
        model = make_model(-1)
        iteration = Checkpointer(model, tmp_path).resume_or_load("")["iteration"]
        # Killed between the commit and its message, the run is one further than it could tell; and
        # one more, where another was begun meanwhile.
        assert committed <= iteration <= committed + 1 + background
        for parameter in model.parameters():
            assert torch.equal(parameter, torch.full_like(parameter, iteration))
        start = iteration + 1
    Checkpointer(make_model(0), tmp_path).begin_run()
    assert not any(".tmp-" in p.name for p in tmp_path.iterdir())
