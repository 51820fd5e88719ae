"""Compare two revisions: do short runs of the configurations give the same bits?

    python tools/compare_revisions.py main HEAD

Each revision is checked out into a temporary worktree. There its own tools/train_net.py trains each
configuration, on one rank and on two. If both revisions have the same script in README.md, that
script is run too. Weights, optimizer, the losses in the last checkpoint, and the values of each
metric in metrics.json must be equal, except for times. The rows may move: only the order of a
metric's values counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
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
README = "README.md"
TIMES = ("time", "data_time", "rank_data_time", "eta_seconds")


def train(tree: Path, name: str, ranks: int, output: Path) -> dict[str, Any]:
    """Train with a checked-out revision; return the results from the output folder."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the script would use a GPU
    if name == README:
        output.mkdir()
        Path(output, "train.py").write_text(script_of((tree / README).read_text()))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "train.py"]
        subprocess.run(command, cwd=output, env=environment, check=True)
        output = output / "output" / "readme"
    else:
        options = [*RUNS[name], f"train.output_dir={output}", "train.device=cpu"]
        command = [sys.executable, "tools/train_net.py", "--num-gpus", str(ranks)]
        command += ["--config-file", f"configs/{name}.py", *options]
        subprocess.run(command, cwd=tree, env=environment, check=True)
    saved = torch.load(output / "model_final.pth", weights_only=True)
    state = saved["trainer"]
    lines = (output / "metrics.json").read_text().splitlines()
    return {
        "weights": saved["model"],
        "optimizer": without_settings(state["optimizer"]),
        "losses": losses_saved(state["storage"]),
        "rows": values_in_rows(map(json.loads, lines)),
    }


def script_of(readme: str) -> str:
    """The first program of a README."""
    return readme.partition("```python\n")[2].partition("```")[0]


def names_to_compare(revisions: list[str]) -> list[str]:
    """The configurations, and the README's script if it is the same in both revisions."""
    show = [["git", "show", f"{revision}:{README}"] for revision in revisions]
    texts = [subprocess.check_output(command, text=True) for command in show]
    scripts = {script_of(text) for text in texts}
    if len(scripts) == 1:
        return [*RUNS, README]
    print(f"The scripts of {README} differ, so they are not compared")
    return [*RUNS]


def without_settings(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of one or several optimizers without configured settings and data types.

    They only help a resumed run to detect changes, and older revisions do not save them.
    """
    if "param_groups" not in optimizer:
        return {name: without_settings(each) for name, each in optimizer.items()}
    left_out = ("configured", "dtypes")
    return {key: each for key, each in optimizer.items() if key not in left_out}


def losses_saved(storage: dict[str, Any]) -> dict[str, Any]:
    """The values of the training metrics in a checkpoint, by name."""
    metrics = without_times(storage["metrics"])
    return {n: s["values"] for n, s in metrics.items() if s["smoothing_hint"]}


def values_in_rows(rows: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """The values of each metric, by name, in the order of the rows."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in without_times(row).items():
            values.setdefault(name, []).append(value)
    values.pop("iteration", None)
    return dict(sorted(values.items()))


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    """The metrics that do not depend on the machine."""
    return {name: value for name, value in values.items() if name not in TIMES}


def results(revision: str, names: list[str], folder: Path) -> dict[str, Any]:
    """The results of each configuration or script in a revision."""
    tree = folder / f"tree of {revision}"
    subprocess.run(["git", "worktree", "add", "--detach", tree, revision], check=True)
    try:
        return {
            f"{name}, {ranks} ranks": train(
                tree, name, ranks, folder / f"{name}, {ranks} ranks, of {revision}"
            )
            for name, ranks in product(names, (1, 2))
        }
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
    parser.add_argument("names", nargs=2, help="two revisions")
    args = parser.parse_args()
    names = names_to_compare(args.names)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (results(each, names, Path(folder)) for each in args.names)
    found = [
        f"{path}: {a!r:.200} is not {b!r:.200}"
        for path, a, b in differences(first, second)
    ]
    print("\n".join(found) or f"equal, bit for bit: {'; '.join(first)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
