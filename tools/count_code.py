"""Count what there is to read: lines of code, and the calls behind a save and a period.

    python tools/count_code.py lines          # of each folder
    python tools/count_code.py path           # of the files on the reader's path
    python tools/count_code.py calls          # of a save, and of a period's end with two ranks

A line of code holds code: docstrings, comments and blank lines do not count.
"""

import argparse
import ast
import io
import logging
import os
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import nn

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import SimpleTrainer, hooks, launch
from hooktrain.solver import CosineParamScheduler
from hooktrain.utils.events import CommonMetricPrinter, JSONWriter

PACKAGE = Path(__file__).parent.parent / "hooktrain"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

# From the loop to what is on the disk, in the order to read them.
READERS_PATH = [
    "engine/train_loop.py",
    "engine/trainers.py",
    "engine/losses.py",
    "solver/optim_wrapper.py",
    "utils/events/storage.py",
    "utils/events/history.py",
    "utils/events/writer.py",
    "utils/events/printer.py",
    "utils/events/json_writer.py",
    "engine/hooks/periodic_writer.py",
    "engine/hooks/periodic_checkpointer.py",
    "checkpoint/periodic.py",
    "checkpoint/checkpointer.py",
    "checkpoint/files.py",
    "checkpoint/resume.py",
    "utils/file_io.py",
    "utils/env.py",
    "utils/comm.py",
]


def lines_of_code(path: Path) -> int:
    """The number of lines with code on them."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            lines -= {*range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return len(lines)


def count_lines() -> None:
    """Print the lines of each folder, and of the package without its demos."""
    counts: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.parent.relative_to(PACKAGE.parent).as_posix()
        counts[folder] = counts.get(folder, 0) + lines_of_code(path)
    total = sum(count for folder, count in counts.items() if folder != "hooktrain/demos")
    rows = [*counts.items(), ("without the demos", total)]
    print(tabulate(rows, ["folder", "lines of code"], "pipe"))


def count_path() -> None:
    """Print the lines of the files to read first."""
    rows = [(name, lines_of_code(PACKAGE / name)) for name in READERS_PATH]
    rows.append((f"{len(rows)} files", sum(count for _, count in rows)))
    print(tabulate(rows, ["file", "lines of code"], "pipe"))


@contextmanager
def called_functions() -> Iterator[set[Any]]:
    """Collects the functions of the package that are called inside of the block."""
    functions: set[Any] = set()
    package = str(PACKAGE)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and "<" not in code.co_name:
            functions.add(code)

    sys.setprofile(note)
    try:
        yield functions
    finally:
        sys.setprofile(None)


class Model(nn.Module):
    """A linear layer and its mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the loss."""
        loss: torch.Tensor = self.fc(x).square().mean()
        return loss


def small_trainer(kind: type[SimpleTrainer] = SimpleTrainer) -> SimpleTrainer:
    """A trainer of the smallest model."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return kind(model, repeat(torch.randn(2, 4)), optimizer)


def count_save() -> tuple[int, int]:
    """The frames from the hook to the rename, and the functions called, in the second save."""
    depths: list[int] = []
    functions: list[int] = []

    class Counted(hooks.PeriodicCheckpointer):
        def after_step(self) -> None:
            with called_functions() as called:
                super().after_step()
            functions.append(len(called))

    def replace(*args: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        depth = 0
        while frame is not None and frame.f_code is not Counted.after_step.__code__:
            depth += 1
            frame = frame.f_back
        depths.append(depth)
        original(*args)

    original = os.replace
    with tempfile.TemporaryDirectory() as folder:
        trainer = small_trainer()
        checkpointer = Checkpointer(trainer.model, folder, trainer=trainer)
        trainer.register_hooks([Counted(checkpointer, 10)])
        with mock.patch("os.replace", replace):
            trainer.train(max_iter=30)
    return depths[2], functions[19]  # each save renames the file and then the pointer


def count_period(folder: str) -> int:
    """The functions called after the step that ends a period: exchange, hooks and writers."""
    counts: list[int] = []

    class Counted(SimpleTrainer):
        def after_step(self) -> None:
            with called_functions() as called:
                super().after_step()
            counts.append(len(called))

    torch.set_num_threads(1)
    logging.disable()  # in this process too
    trainer = small_trainer(Counted)
    writers = [CommonMetricPrinter(60), JSONWriter(f"{folder}/metrics.json")]
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)),
            hooks.PeriodicWriter(writers, period=20),
        ]
    )
    trainer.train(max_iter=60)
    return counts[39]


def count_calls() -> None:
    """Print the calls behind a save and a period."""
    logging.disable()
    frames, functions = count_save()
    with tempfile.TemporaryDirectory() as folder:
        of_period = launch(count_period, 2, args=(folder,))[0]
    rows = [
        ["frames from the hook to the rename of a file", frames],
        ["functions of the package in a save of a file", functions],
        ["functions of the package at the end of a period, two ranks", of_period],
    ]
    print(tabulate(rows, tablefmt="pipe"))


def main() -> None:
    """Parse the command line."""
    what = {"lines": count_lines, "path": count_path, "calls": count_calls}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=what)
    what[parser.parse_args().what]()


if __name__ == "__main__":
    main()
