"""Compare two revisions: do short runs of the configurations still give the same bits?

    python tools/compare_revisions.py main HEAD

Each revision is checked out into a temporary worktree and trains each configuration there, in
one process and with two ranks. Losses, weights and rows of metrics.json must be equal, except for
times. A hook seeds all generators before each step, so that revisions that seed differently can be
compared too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

RUNS = {
    "digits_cnn": ["train.max_iter=60", "train.eval_period=25"],
    "digits_gan": ["train.max_iter=60", "hooks=[]"],
    "text_gpt": [
        "train.max_iter=4",
        "train.eval_period=0",
        "dataloader.train.total_batch_size=8",
    ],
}
TIMES = ("time", "data_time", "rank_data_time", "eta_seconds")


def train(name: str, folder: str) -> None:
    """Train on this rank, with the package that it finds, and save what is compared."""
    from hooktrain.config import LazyConfig
    from hooktrain.engine import DefaultTrainer, HookBase, hooks
    from hooktrain.events import load_json_metrics
    from hooktrain.utils import comm
    from hooktrain.utils.env import seed_all_rng

    class Seed(HookBase):
        def before_step(self) -> None:
            seed_all_rng(1 + self.trainer.iter)

    torch.set_num_threads(1)
    cfg = LazyConfig.load(f"configs/{name}.py")
    options = [
        *RUNS[name],
        f"train.output_dir={folder}",
        "train.device=cpu",
        "train.seed=1",
    ]
    cfg = LazyConfig.apply_overrides(cfg, options)
    seed_all_rng(1)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Seed()], before=hooks.IterationTimer)
    trainer.train()
    if not comm.is_main_process():
        return
    histories = trainer.storage.histories().items()
    found = {
        "weights": trainer.model.state_dict(),
        "metrics": {k: h.values() for k, h in histories if k not in TIMES},
        "rows": [
            {k: v for k, v in row.items() if k not in TIMES}
            for row in load_json_metrics(f"{folder}/metrics.json")
        ],
    }
    torch.save(found, f"{folder}/found.pth")


def results(revision: str, folder: Path) -> dict[str, Any]:
    """What each configuration gives in a revision."""
    tree = folder / f"tree of {revision}"
    subprocess.run(["git", "worktree", "add", "--detach", tree, revision], check=True)
    try:
        found = {}
        for name, ranks in product(RUNS, (1, 2)):
            output = folder / f"{name}, {ranks} ranks, of {revision}"
            command = [sys.executable, __file__, "--ranks", str(ranks)]
            command += ["--train", name, str(output)]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            subprocess.run(command, cwd=tree, env=environment, check=True)
            saved = torch.load(output / "found.pth", weights_only=True)
            found[f"{name}, {ranks} ranks"] = saved
        return found
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two nested states differ: the path and both values."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from differences(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if not torch.equal(a, b):
            yield path, a, b
    elif repr(a) != repr(b):
        yield path, a, b


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", action="store_true", help="for the script's own use")
    parser.add_argument("--ranks", type=int, default=1, help="for the script's own use")
    parser.add_argument("names", nargs=2, help="two revisions")
    args = parser.parse_args()
    if args.train:
        from hooktrain.engine import launch

        launch(train, args.ranks, args=tuple(args.names))
        return
    with tempfile.TemporaryDirectory() as folder:
        first, second = (results(revision, Path(folder)) for revision in args.names)
    found = [
        f"{path}: {a!r:.200} is not {b!r:.200}"
        for path, a, b in differences(first, second)
    ]
    print("\n".join(found) or f"equal, bit for bit: {'; '.join(first)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
