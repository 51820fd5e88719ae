"""Kill a run and the process that follows it, again and again, and compare the rows with its own.

    python tests/tools/follow_kills.py --kills 100 --seed 1 --mode kept

Either of both is killed at random moments, without notice, and started again by the same command.
In the end the same run is trained once more, undisturbed, and evaluates itself. Each row of the
process that follows has to be equal to the row of that run, bit for bit; no iteration may have two
rows, and no row may be gone that was there once. The modes:

- kept: all checkpoints stay, so each has to have a row;
- rotated: three stay, and those that the run deletes before they are evaluated are counted;
- file: the process sees a store in a folder only, which has two checkpoints;
- s3: the same with a server that speaks S3 (it needs s3fs and moto, see tests/s3.py);
- sharded: folders of shards, all kept.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from loading import TOOLS

from processes import end, start_program
from s3 import s3_server

CONFIG = """
from hooktrain.config import LazyConfig

model, optimizer, dataloader, train = LazyConfig.load(
    {digits!r}, ("model", "optimizer", "dataloader", "train")
)
optimizer.lr = 0.01
model.channels = 4
model.dropout = 0.5
dataloader.train.num_workers = 0
dataloader.evaluator._target_ = "noise.NoisyEvaluator"
train.update(max_iter={iterations}, log_period=5, eval_period=10)
train.checkpointer.update(period=10, max_to_keep={kept})
train.checkpointer.sharded = {sharded}
train.ema.enabled = True
hooks = []
"""
MODES = ("kept", "rotated", "file", "s3", "sharded")
ITERATIONS_PER_KILL = 120
SILENT = ("dataloader.evaluator=null", "train.best_metric=null")

Rows = dict[int, dict[str, float]]


class Campaign:
    """A run and the process that follows it, which are killed in turns.

    Args:
        folder: an empty folder.
        mode: see above.
        kills: how many.
        store: the address of the store; "" for none.
    """

    def __init__(self, folder: Path, mode: str, kills: int, store: str) -> None:
        self.folder = folder
        self.config = folder / "config.py"
        self.config.write_text(
            CONFIG.format(
                digits=str(TOOLS.parent / "configs/digits_cnn.py"),
                iterations=kills * ITERATIONS_PER_KILL,
                kept=3 if mode == "rotated" else None,
                sharded=mode == "sharded",
            )
        )
        self.kills = kills
        self.store = (f"train.store={store}",) if store else ()
        self.run = folder / "run"
        self.followed = folder / "elsewhere" if store else self.run
        self.killed: Counter[str] = Counter()
        self.seen: set[int] = set()

    def command(self, name: str) -> list[Any]:
        """The command of the run, of the process that follows it, or of the undisturbed run."""
        follow = ("--eval-only", "--follow", "--all", "--poll", "0.05")
        options: dict[str, tuple[Any, ...]] = {
            "run": ("--resume", self.run, *SILENT, *self.store),
            "follower": (*follow, self.followed, *self.store),
            "undisturbed": (self.folder / "undisturbed",),
        }
        own = [
            f"train.output_dir={each}" if isinstance(each, Path) else each
            for each in options[name]
        ]
        return [TOOLS / "train_net.py", "--config-file", self.config, *own]

    def start(self, name: str) -> Any:
        output = self.folder / f"{name}-{self.killed[name]}.txt"
        return start_program(*self.command(name), output=output)

    def disturb(self, random_numbers: random.Random) -> None:
        """Kill until both have come to their ends."""
        processes = {name: self.start(name) for name in ("run", "follower")}
        while processes:
            time.sleep(random_numbers.uniform(0.1, 2.0))
            self.look_at_rows()
            for name in [n for n in processes if not processes[n].is_alive()]:
                code = end(processes.pop(name))
                if code:
                    raise SystemExit(f"the {name} ended with {code}, see {self.folder}")
            if processes and self.killed.total() < self.kills:
                name = random_numbers.choice(sorted(processes))
                processes[name].kill()
                end(processes[name])
                self.killed[name] += 1
                processes[name] = self.start(name)

    def look_at_rows(self) -> None:
        """Fail if a row is there twice, or gone."""
        path = self.followed / "eval" / "metrics.json"
        if path.exists():
            lines = path.read_text().splitlines()
            found = Counter(json.loads(line)["iteration"] for line in lines)
            assert not [i for i, n in found.items() if n > 1], found
            assert self.seen <= found.keys(), self.seen - found.keys()
            self.seen.update(found)

    def report(self) -> str:
        """What the rows are, beside those of the undisturbed run."""
        self.look_at_rows()
        assert end(self.start("undisturbed"), limit_seconds=1200.0) == 0
        own = results(self.folder / "undisturbed" / "metrics.json")
        found = results(self.followed / "eval" / "metrics.json")
        different = [i for i in found if found[i] != own.get(i)]
        left = {path.name for path in (self.followed / "eval").iterdir()} - {
            *(".lock", "log.txt", "metrics.json", "run_id"),
            *("model_best", "model_best.pth"),
        }
        log = (self.followed / "eval" / "log.txt").read_text()
        return (
            f"killed: {dict(self.killed)}; rows: {len(found)} of {len(own)}, different: "
            f"{different}; evaluations begun: {log.count('Evaluating model_')}; tracebacks: "
            f"{log.count('Traceback')}; errors: {log.count(' ERROR')}; left behind: {sorted(left)}"
        )


def results(path: Path) -> Rows:
    """The values of the evaluations by their iterations."""
    found = {}
    for row in map(json.loads, path.read_text().splitlines()):
        values = {name: row[name] for name in row if "classification/" in name}
        if values:
            found[row["iteration"]] = values
    return found


@contextmanager
def store_of(mode: str, folder: Path) -> Iterator[str]:
    """The address of the store of a mode, "" if it has none."""
    if mode == "s3":
        with s3_server() as environment:
            os.environ.update(environment)
            import fsspec

            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket/run"
    else:
        yield f"file://{folder}/store" if mode == "file" else ""


def main() -> None:
    """Run the campaign, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="kept")
    args = parser.parse_args()
    with TemporaryDirectory() as name, store_of(args.mode, Path(name)) as store:
        campaign = Campaign(Path(name), args.mode, args.kills, store)
        campaign.disturb(random.Random(args.seed))
        print(f"{args.mode}, seed {args.seed}: {campaign.report()}")  # noqa: T201


if __name__ == "__main__":
    main()
