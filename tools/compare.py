"""Find the first iteration where two runs differ, and in it the first layer, gradient or weight.

    python tools/compare.py RUN_A RUN_B                        # two output folders
    python tools/compare.py RUN --with train.compile=true      # a run and itself, changed
    python tools/compare.py RUN --python OTHER/bin/python      # itself in another environment
    python tools/compare.py --trace A train.py ARGUMENTS       # runs a script, and traces it
    python tools/compare.py --traces A B                       # two such traces

A run is an output folder with a loadable config.json, or the address of its store, such as
s3://bucket/run, which is fetched. Nothing has to be recorded in advance. Two runs are compared by
their rows of metrics.json and by the checkpoints that both have. Starting from the last equal
checkpoint, or from the beginning, both sides compute the iterations again up to the first row that
differs, each in separate processes. A run that is compared with itself starts at its beginning, or
after `--from-checkpoint`, and computes `--iterations`.

The hook Trace hashes, in this order, the settings of the optimizer, the batch, the output of each
module, the losses, each gradient and, after the update, each weight and buffer. The first name with
different hashes is printed, with its values. For these values the sides compute the iterations once
more, which also shows whether a side is deterministic: if not, a message suggests
torch.use_deterministic_algorithms.

With `--rtol` a tensor differs if any number differs by more than this fraction of the tensor's
largest number. The values of all iterations, starting at the first one that differs in any bit, are
then written to a temporary folder.

Modules inside a compiled model have no outputs to look at, and only names that both sides have are
compared. With different numbers of ranks (`--ranks 1 --other-ranks 2`) the batches of the ranks
differ, so batches, outputs, losses and buffers are skipped; shards are gathered. A configuration
may name any function, see SECURITY.md.

A script without a configuration is traced while it runs, by `--trace FOLDER` before its name:
unchanged, with its own output folder, and to its end or to the iteration `--until`. Then `--traces`
compares two traces; for the values trace both again with `--values-from`.

The exit code is 0 if nothing differs, 1 if something does, and 2 if no comparison is possible.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from compare_trace import Values, digest, trace_script, trace_side, values_file
from torch import Tensor

from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import checkpoint_names
from hooktrain.checkpoint.store import Store
from hooktrain.config import LazyConfig
from hooktrain.engine import launch
from hooktrain.events.history import OF_THE_MACHINE
from hooktrain.events.json_writer import load_json_metrics
from hooktrain.utils.names import check_count, dotted
from hooktrain.utils.tensors import map_leaves

COMMAND = os.environ.get("HOOKTRAIN_COMMAND")

OF_A_RANK = "input", "output", "loss", "buffer"  # values that differ between ranks

# The last iteration to compute, and the checkpoints after which the sides start.
Span = tuple[int, str | None, str | None]


def run_side(python: str, side: dict[str, Any]) -> Any:
    """Run :func:`trace_side` in a separate process, or in several ranks."""
    command = [python, __file__, "--side", json.dumps(side)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


class Side:
    """One of the two runs, whose iterations it computes again.

    Args:
        folder: the output folder of the run.
        overrides: changes of its configuration.
        python: the interpreter.
        ranks: the number of processes.
    """

    def __init__(
        self, folder: Path, overrides: list[str], python: str, ranks: int
    ) -> None:
        self.folder = folder
        self.overrides = overrides
        self.python = python
        self.ranks = ranks
        self.config = folder / "config.json"
        if not self.config.is_file():
            raise FileNotFoundError(
                f"{self.config} is missing: a run is the output folder of hooktrain train, or of "
                "a script that calls default_setup"
            )

    def trace(
        self,
        into: Path,
        checkpoint: str | None,
        end: int,
        values_from: int | None = None,
    ) -> None:
        """Compute iterations again, from a checkpoint of this run, or from the beginning.

        Args:
            into: the folder to create, for the files of :class:`Trace`.
            checkpoint: the name of the checkpoint.
            end: the last iteration.
            values_from: the first iteration whose values are written; None writes none.
        """
        into.mkdir()
        side = {
            "config": str(self.config),
            "overrides": self.overrides,
            "folder": str(into),
            "checkpoint": checkpoint and str(self.folder / checkpoint),
            "end": end,
            "values_from": values_from,
            "ranks": self.ranks,
        }
        done = run_side(self.python, side)
        if done.returncode:
            raise RuntimeError(
                f"{self.folder} cannot be computed again:\n{done.stdout[-3000:]}"
            )


def hashes(folder: Path, rank: int) -> dict[int, dict[str, str]]:
    """The hashes of one rank by iteration and name."""
    lines = (folder / f"hashes-{rank}.jsonl").read_text().splitlines()
    return {iteration: dict(pairs) for iteration, pairs in map(json.loads, lines)}


def are_compared(name: str, same_ranks: bool) -> bool:
    """Whether a name has the same meaning on both sides."""
    return same_ranks or not name.startswith(OF_A_RANK)


def first_other_hash(
    one: Path, other: Path, ranks: int, same_ranks: bool
) -> tuple[int, int, str] | None:
    """The first iteration, rank and name whose hashes differ, if any."""
    found = []
    for rank in range(ranks):
        mine, theirs = hashes(one, rank), hashes(other, rank)
        for iteration in sorted(mine.keys() & theirs.keys()):
            a, b = mine[iteration], theirs[iteration]
            names = [n for n in a if n in b and are_compared(n, same_ranks)]
            different = [i for i, n in enumerate(names) if a[n] != b[n]]
            if different:
                found.append((iteration, different[0], rank, names[different[0]]))
                break
    if not found:
        return None
    iteration, _, rank, name = min(found)
    return iteration, rank, name


def first_other_value(
    one: Path, other: Path, iteration: int, rank: int, same_ranks: bool, rtol: float
) -> tuple[str, str] | None:
    """The first name of an iteration whose values differ, if any, and the difference."""
    file = values_file(iteration, rank)
    mine, theirs = (torch.load(folder / file) for folder in (one, other))
    for name, a in mine.items():
        if name in theirs and are_compared(name, same_ranks):
            text = difference(a, theirs[name], rtol)
            if text:
                return name, text
    return None


def print_first_other_value(
    folders: tuple[Path, Path],
    places: Iterable[tuple[int, int]],
    same_ranks: bool,
    names_rank: bool,
    rtol: float,
) -> bool:
    """Print the first value that differs in these iterations and ranks; return whether one does."""
    for iteration, rank in places:
        found = first_other_value(*folders, iteration, rank, same_ranks, rtol)
        if found is not None:
            where = f", on rank {rank}," if names_rank else ""
            print(f"Iteration {iteration} is the first that differs{where} in")
            print(f"  {found[0]}: {found[1]}")
            return True
    return False


def difference(a: Any, b: Any, rtol: float) -> str:
    """How two values differ; "" if they do not."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if repr(a) == repr(b) else f"{a!r} and {b!r}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if digest(a) == digest(b):
        return ""
    x, y = (each.to_dense().to(torch.float64).flatten() for each in (a, b))
    distance = (x - y).abs().nan_to_num(nan=torch.inf)
    distance[x.isnan() & y.isnan()] = 0
    largest = float(distance.max())
    if largest <= rtol * float(x.abs().max()):
        return ""
    place = int(distance.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), a.shape)]
    count = int((distance > 0).sum())
    return (
        f"{count:,} of {a.numel():,} numbers differ, at most by {largest:.3g}, at {index}: "
        f"{x[place].item()!r} and {y[place].item()!r}"
    )


def first_other_row(one: Path, other: Path) -> tuple[int, str, Any, Any] | None:
    """The first value of metrics.json that differs and is not a measurement of the machine."""
    mine, theirs = rows_of(one), rows_of(other)
    for iteration in sorted(mine.keys() & theirs.keys()):
        a, b = mine[iteration], theirs[iteration]
        for name in a:
            if name in b and a[name] != b[name] and not OF_THE_MACHINE.search(name):
                return iteration, name, a[name], b[name]
    return None


def rows_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics of a run by iteration. NaN is represented by a string, which equals itself."""
    rows: dict[int, dict[str, Any]] = {}
    for row in load_json_metrics(folder / "metrics.json"):
        texts = {n: "nan" if v != v else v for n, v in row.items()}
        rows.setdefault(int(row["iteration"]), {}).update(texts)
    return rows


def checkpoints_of(folder: Path) -> dict[int, str]:
    """The names of a run's checkpoints by their iterations."""
    found = {}
    for name in checkpoint_names(folder):
        if not name.startswith("model_best"):
            found[read_checkpoint(str(folder / name), "meta")["iteration"]] = name
    return found


def common_checkpoints(one: Path, other: Path) -> Iterator[tuple[int, str, str, str]]:
    """The checkpoints that both have, newest first: iteration, both names, the difference."""
    mine, theirs = checkpoints_of(one), checkpoints_of(other)
    for iteration in sorted(mine.keys() & theirs.keys(), reverse=True):
        states = [
            tensors_of(read_checkpoint(str(path)))
            for path in (one / mine[iteration], other / theirs[iteration])
        ]
        names = [
            n for n in states[0] if digest(states[0][n]) != digest(states[1].get(n))
        ]
        text = names[0] if names else ""
        yield iteration, mine[iteration], theirs[iteration], text


def tensors_of(content: Any) -> Values:
    """The tensors of a checkpoint's model and optimizer by name."""
    found: Values = {}

    def keep(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found[dotted(path)] = leaf
        return leaf

    trainer = content.get("trainer", {})
    map_leaves(keep, {"model": content["model"], "optimizer": trainer.get("optimizer")})
    return found


def other_settings(one: Side, other: Side) -> list[str]:
    """The lines of the configurations that only one of them has."""
    lines = []
    for side in (one, other):
        cfg = LazyConfig.load(side.config)
        cfg = LazyConfig.apply_overrides(cfg, side.overrides)
        lines.append(LazyConfig.to_py(cfg, "").splitlines())
    unlike = "train.output_dir", "train.run_id", "train.store"
    return [
        f"  {sign} {line}"
        for sign, (mine, theirs) in (("A", lines), ("B", lines[::-1]))
        for line in mine
        if line not in theirs and not line.startswith(unlike)
    ]


def find_spans(one: Path, other: Path) -> Iterator[Span]:
    """The iterations to compute: after the last equal checkpoint, and after earlier ones.

    If nothing differs after a checkpoint, the cause is earlier and not in the checkpoint, such as
    different weights on a rank other than the main one.
    """
    row = first_other_row(one, other)
    end = None
    if row is not None:
        end, name, a, b = row
        print(
            f"The first row that differs is from iteration {end}: {name} is {a!r} and {b!r}"
        )
    for iteration, mine, theirs, text in common_checkpoints(one, other):
        if end is not None and iteration >= end:
            continue
        if text:
            end = iteration
            print(f"The checkpoints of iteration {iteration} differ, first in {text}")
        elif end is None:
            print(
                f"The runs are equal: all rows, and {mine} from iteration {iteration}"
            )
            return
        else:
            print(f"Both begin after {mine}, whose weights are equal")
            yield end, mine, theirs
    if end is None:
        raise ValueError(
            f"{one} and {other} have neither a row nor a checkpoint in common"
        )
    print("Both start from the beginning")
    yield end, None, None


def fetched(run: str, into: Path) -> Path:
    """The output folder of a run. If it is the address of a store, the run is fetched."""
    if "://" not in run:
        return Path(run)
    store = Store(run, into)
    entries = store.list_entries()
    if not entries:
        raise FileNotFoundError(f"{run} has no checkpoint of a run")
    for entry in entries:
        store.fetch(entry)
    return into


def compare(args: argparse.Namespace) -> int:
    """Compare two runs, or a run and itself; return the exit code."""
    with TemporaryDirectory() as temporary:
        args.a = fetched(args.a, Path(temporary, "a"))
        if args.b is not None:
            args.b = fetched(args.b, Path(temporary, "b"))
        return compare_folders(args)


def compare_folders(args: argparse.Namespace) -> int:
    """Compare the runs of two folders, or of one, ``args.a`` and ``args.b``."""
    own = args.b is None
    one = Side(args.a, [], sys.executable, args.ranks)
    other = Side(
        args.a if own else args.b,
        args.overrides,
        args.python or sys.executable,
        args.other_ranks or args.ranks,
    )
    settings = other_settings(one, other)
    if settings:
        print("Settings that differ:", *settings, sep="\n")
    if own:
        return compare_with_itself(one, other, args)
    code: int | None = 0
    for span in find_spans(args.a, args.b):
        code = compare_span(one, other, span, args.rtol)
        if code is not None:
            return code
    if code is None:
        print(
            "The cause of the difference is outside the steps: an evaluation, the machine, or a "
            "setting that config.json does not hold"
        )
        return 2
    return 0


def compare_with_itself(one: Side, other: Side, args: argparse.Namespace) -> int:
    """Compare a run and itself with changes, from a checkpoint or from the beginning."""
    start = args.from_checkpoint
    first = 0
    if start:
        first = read_checkpoint(str(args.a / start), "meta")["iteration"] + 1
    end = first + args.iterations - 1
    return compare_span(one, other, (end, start, start), args.rtol) or 0


def compare_span(one: Side, other: Side, span: Span, rtol: float) -> int | None:
    """Compute iterations on both sides, and print what differs first.

    Returns:
        The exit code, or None if every bit is equal.
    """
    end, mine, theirs = span
    same_ranks = one.ranks == other.ranks
    ranks = one.ranks if same_ranks else 1
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        one.trace(folder / "a", mine, end)
        other.trace(folder / "b", theirs, end)
        found = first_other_hash(folder / "a", folder / "b", ranks, same_ranks)
        begin, *_ = hashes(folder / "a", 0)
        computed = f"iterations {begin} to {end}"
        if found is None:
            print(f"Computed again, {computed} are equal in every bit")
            return None
        first, _, name = found
        last = end if rtol else first
        one.trace(folder / "a again", mine, last, first)
        again = first_other_hash(folder / "a", folder / "a again", one.ranks, True)
        if again is not None:
            print(
                f"{one.folder} does not repeat itself: computed twice, iteration {again[0]} "
                f"differs first in {again[2]}. A kernel is nondeterministic; see "
                "torch.use_deterministic_algorithms"
            )
            if not rtol:
                return 2
        other.trace(folder / "b again", theirs, last, first)
        pair = folder / "a again", folder / "b again"
        places = product(range(first, last + 1), range(ranks))
        if print_first_other_value(pair, places, same_ranks, one.ranks > 1, rtol):
            return 1
    if not rtol:
        print(
            f"{other.folder} does not repeat itself: iteration {first} differed in {name}, and not "
            "when it was computed again. A kernel is nondeterministic"
        )
        return 2
    print(
        f"Computed again, {computed} are equal within rtol={rtol}. The first other bit is in "
        f"iteration {first}, in {name}"
    )
    return 0


def compare_traces(a: Path, b: Path, rtol: float) -> int:
    """Print what differs first in two traces of scripts; return the exit code."""
    ranks = [len([*folder.glob("hashes-*.jsonl")]) for folder in (a, b)]
    for folder, count in zip((a, b), ranks, strict=True):
        if not count:
            raise FileNotFoundError(
                f"{folder} has no hashes-0.jsonl: a trace is the folder of --trace"
            )
    same_ranks = ranks[0] == ranks[1]
    compared = ranks[0] if same_ranks else 1
    both = hashes(a, 0).keys() & hashes(b, 0).keys()
    if not both:
        raise ValueError(f"{a} and {b} have no iteration in common")
    iterations = f"iterations {min(both)} to {max(both)}"
    found = first_other_hash(a, b, compared, same_ranks)
    if found is None:
        print(f"The traces are equal in every bit, {iterations}")
        return 0
    first, rank, name = found
    valued = [
        pair
        for pair in product(range(first, max(both) + 1), range(compared))
        if all((folder / values_file(*pair)).exists() for folder in (a, b))
    ]
    if not valued or valued[0][0] > first or (rtol and valued[-1][0] < max(both)):
        where = f", on rank {rank}," if ranks[0] > 1 else ""
        print(f"Iteration {first} is the first that differs{where} in\n  {name}")
        print(f"For the values trace both again with --values-from {first}")
        return 1
    if print_first_other_value((a, b), valued, same_ranks, ranks[0] > 1, rtol):
        return 1
    print(
        f"The traces are equal within rtol={rtol}, {iterations}. The first other bit is in "
        f"iteration {first}, in {name}"
    )
    return 0


def parse_trace() -> argparse.Namespace:
    """Parse a command line that traces a script."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    add = parser.add_argument
    add("--trace", type=Path, metavar="FOLDER", help="the new folder to write to")
    add("--until", type=int, default=-1, metavar="ITERATION",
        help="the last iteration; by default the script runs to its end")  # fmt: skip
    add(
        "--values-from",
        type=int,
        metavar="ITERATION",
        help="the first iteration whose values are written",
    )
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="the script and its arguments",
    )
    args = parser.parse_args()
    if not args.command or not Path(args.command[0]).is_file():
        parser.error(
            f"the options must be followed by a script, not {args.command[:1]}"
        )
    return args


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "a",
        nargs="?",
        metavar="RUN_A",
        help="an output folder, or the address of a store",
    )
    add("b", nargs="?", metavar="RUN_B", help="another run; without it, RUN_A itself")
    add("--with", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE",
        help="changes of the second side's configuration")  # fmt: skip
    add("--python", help="the interpreter of the second side")
    add("--ranks", type=int, default=1, help="processes of the first side (1)")
    add(
        "--other-ranks",
        type=int,
        help="processes of the second side; by default the same",
    )
    add(
        "--from-checkpoint",
        metavar="NAME",
        help="without RUN_B: the checkpoint of RUN_A to start after",
    )
    add("--iterations", type=int, default=20, help="to compute, without RUN_B (20)")
    add("--rtol", type=float, default=0.0, help="the difference to tolerate (0)")
    add("--trace", nargs="+", metavar=("FOLDER", "SCRIPT"),
        help="run a script, and write a trace of it; `--trace --help` has its options")  # fmt: skip
    add(
        "--traces",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="compare two such traces",
    )
    args = parser.parse_args()
    if args.trace:
        parser.error("--trace comes first: --trace FOLDER SCRIPT ARGUMENTS")
    if bool(args.a) == bool(args.traces):
        parser.error("pass RUN_A, or --traces A B")
    if args.traces:
        return args
    if args.b is None and not (args.overrides or args.python or args.other_ranks):
        parser.error("pass RUN_B, or --with, --python or --other-ranks to change RUN_A")
    for name in ("ranks", "iterations"):
        check_count(f"--{name}", getattr(args, name))
    if args.b is not None and args.from_checkpoint:
        parser.error(
            "--from-checkpoint is for a run and itself; two runs begin where they agree"
        )
    return args


def main() -> int:
    """Run the command; return the exit code."""
    if sys.argv[1:2] == ["--side"]:
        spec = json.loads(sys.argv[2])
        launch(trace_side, spec["ranks"], args=(spec,))
        return 0
    if sys.argv[1:2] == ["--trace"]:
        args = parse_trace()
        trace_script(args.command, args.trace, args.until, args.values_from)
        return 0
    args = parse()
    if args.traces:
        return compare_traces(*args.traces, args.rtol)
    return compare(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if sys.argv[1:2] in (["--side"], ["--trace"]):
            raise
        text = error.args[0] if isinstance(error, KeyError) else error
        print(f"{COMMAND or 'compare'}: {text}", file=sys.stderr)
        sys.exit(2)
