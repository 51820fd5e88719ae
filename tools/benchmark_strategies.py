"""Run a configuration through each strategy, compiled and not, in each precision.

    python tools/benchmark_strategies.py --config-file configs/digits_cnn.py --processes 2

Each row is a run of tools/train_net.py in new processes. It shows the median time of an iteration
in the second half, and the last loss, which should hardly differ between rows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from tabulate import tabulate

from hooktrain.config import LazyConfig

SCRIPT = str(Path(__file__).with_name("train_net.py"))
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy")
PRECISIONS = ("float32", "bfloat16", "float16")


def options_of(strategy: str, wrap: str, precision: str, compiled: bool) -> list[str]:
    """The overrides of a row."""
    config: dict[str, Any] = {"_target_": f"hooktrain.strategy.{strategy}"}
    if strategy == "FSDPStrategy" and wrap:
        config["wrap"] = [wrap]
    amp = precision != "float32"
    return [
        f"train.strategy={config}",
        f"train.amp.enabled={str(amp).lower()}",
        *([f"train.amp.dtype={precision}"] if amp else []),
        f"train.compile={str(compiled).lower()}",
    ]


def run(
    args: argparse.Namespace, processes: int, options: list[str]
) -> tuple[str, str]:
    """Milliseconds per iteration and the last loss; or "failed" and the error."""
    launcher = [sys.executable]
    if processes > 0:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        length = [
            f"train.max_iter={args.iterations}",
            f"train.log_period={max(1, args.iterations // 10)}",
            f"train.checkpointer.period={args.iterations}",
            "train.eval_period=0",
            "train.best_metric=null",
            f"train.output_dir={folder}",
            *(["hooks=[]"] if "hooks" in LazyConfig.load(args.config_file) else []),
        ]
        command = [
            *launcher,
            SCRIPT,
            "--config-file",
            args.config_file,
            *length,
            *options,
        ]
        result = subprocess.run(
            [*command, *args.opts],
            capture_output=True,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        if result.returncode != 0:
            errors = [
                x
                for x in (result.stdout + result.stderr).splitlines()
                if "Error: " in x
            ]
            return "failed", (errors or ["no error was printed"])[0].strip()[:120]
        lines = [
            json.loads(x)
            for x in (Path(folder) / "metrics.json").read_text().splitlines()
        ]
    lines = [line for line in lines if "time" in line]
    times = [line["time"] for line in lines[len(lines) // 2 :]]
    losses = {name: value for name, value in lines[-1].items() if "loss" in name}
    # A model that owns its step may log no sum.
    loss = losses.get("total_loss", next(iter(losses.values())))
    return f"{1000 * statistics.median(times):.1f}", f"{loss:.5f}"


def main() -> None:
    """Parse the command line, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--config-file", required=True)
    parser.add_argument("--processes", type=int, default=1, help="of DDP and FSDP")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument(
        "--wrap", default="", help="the class of modules for FSDP to shard by"
    )
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES
    )
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS
    )
    parser.add_argument(
        "--compiled", nargs="+", choices=["no", "yes"], default=["no", "yes"]
    )
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="further overrides")
    args = parser.parse_args()
    rows = []
    for strategy, precision, compiled in product(
        args.strategies, args.precisions, args.compiled
    ):
        processes = 0 if strategy == "SingleDeviceStrategy" else args.processes
        options = options_of(strategy, args.wrap, precision, compiled == "yes")
        measured = run(args, processes, options)
        rows.append([strategy, max(1, processes), precision, compiled, *measured])
        print(" ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    headers = [
        "strategy",
        "processes",
        "precision",
        "compiled",
        "ms an iteration",
        "last loss",
    ]
    print(tabulate(rows, headers=headers, tablefmt="pipe"))


if __name__ == "__main__":
    main()
