"""tools/compare.py names where two runs part: runs of two folders, and of one that is changed."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import TOOLS, load_tool

from processes import run_program

compare = load_tool("compare")

CONFIG = """
from hooktrain.config import LazyConfig

model, optimizer, dataloader, train = LazyConfig.load(
    {digits!r}, ("model", "optimizer", "dataloader", "train")
)
optimizer.lr = 0.01
model.channels = 4
dataloader.train.num_workers = 0
train.update(max_iter=12, log_period=2, eval_period=0)
train.checkpointer.update(period=4, max_to_keep=None)
hooks = []
"""

Train = Callable[..., Path]
Compare = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.py"
    path.write_text(CONFIG.format(digits=str(TOOLS.parent / "configs/digits_cnn.py")))
    return path


def run_ranks(ranks: int, script: str, *arguments: str | Path) -> Any:
    """Run a script in one process or, under torchrun, in several: all import nothing anew."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return run_program(*torchrun[: 4 * (ranks > 1)], TOOLS / script, *arguments)


def train(config: Path, folder: Path, *changes: str, ranks: int = 1) -> Path:
    arguments = ["--config-file", config, f"train.output_dir={folder}", *changes]
    done = run_ranks(ranks, "train_net.py", *arguments)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config, tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def changed(config: Path, tmp_path: Path) -> Train:
    return lambda *changes: train(config, tmp_path / "b", *changes)


@pytest.fixture
def tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Compare:
    """The tool, whose sides run in processes that have imported torch already."""

    def run_side(_python: str, side: dict[str, Any]) -> Any:
        return run_ranks(side["ranks"], "compare.py", "--side", json.dumps(side))

    def call(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
        code = compare.main()
        return code, capsys.readouterr().out

    monkeypatch.setattr(compare, "run_side", run_side)
    return call


def hook(name: str, **arguments: int) -> str:
    return f"hooks=[{{'_target_': 'bending.{name}', **{arguments}}}]".replace(
        f"**{arguments}", ", ".join(f"'{k}': {v}" for k, v in arguments.items())
    )


def test_an_output_that_is_scaled_is_named_with_its_values(
    run: Path, changed: Train, tool: Compare
) -> None:
    code, printed = tool(run, changed(hook("Scale", start=6)))
    assert code == 1, printed
    assert "The first row that differs is from iteration 7" in printed
    assert "begin after model_0000003.pth" in printed
    assert (
        "Iteration 6 is the first that differs in\n  output of head (Linear): 6"
        in printed
    )
    assert "numbers differ, at most by" in printed


def test_a_run_in_a_store_is_fetched(
    run: Path, changed: Train, tmp_path: Path, tool: Compare
) -> None:
    store = f"file://{tmp_path}/store"
    folder = changed(hook("Scale", start=6), f"train.store={store}")
    shutil.rmtree(folder)
    code, printed = tool(run, store)
    assert code == 1, printed
    assert "Iteration 6 is the first that differs in\n  output of head" in printed


def test_a_flipped_bit_of_a_gradient_is_named_with_its_rank(
    config: Path, tmp_path: Path, tool: Compare
) -> None:
    a = train(config, tmp_path / "a", ranks=2)
    b = train(config, tmp_path / "b", hook("Flip", iteration=5, rank=1), ranks=2)
    code, printed = tool(a, b, "--ranks", "2")
    assert code == 1, printed
    assert (
        "Iteration 5 is the first that differs, on rank 1, in\n  gradient of" in printed
    )
    assert "1 of 36 numbers differ" in printed
    # The checkpoint of iteration 7 holds the main rank's weights, and these are equal.
    assert "Computed again, iterations 8 to 9 are equal in every bit" in printed


def test_another_order_of_samples_is_named_by_the_batch(
    run: Path, changed: Train, tool: Compare
) -> None:
    code, printed = tool(run, changed("dataloader.train.seed=7"))
    assert code == 1, printed
    assert "B dataloader.train.seed = 7" in printed
    assert "start from the beginning" in printed
    assert "Iteration 0 is the first that differs in\n  input of the model: " in printed


def test_other_dropped_units_are_named_by_the_module(
    run: Path, changed: Train, tool: Compare
) -> None:
    code, printed = tool(run, changed(hook("OtherDropout", iteration=9)))
    assert code == 1, printed
    assert "begin after model_0000007.pth" in printed
    assert "Iteration 9 is the first that differs in\n  output of " in printed
    assert "(Dropout)" in printed


def test_another_setting_of_the_optimizer_is_named(run: Path, tool: Compare) -> None:
    code, printed = tool(run, "--with", "optimizer.momentum=0.8", "--iterations", "2")
    assert code == 1, printed
    assert "B optimizer.momentum = 0.8" in printed
    assert (
        "in\n  setting momentum of group 0 of the optimizer: 0.9 and 0.8\n" in printed
    )


def test_equal_runs_are_said_to_be_equal(
    run: Path, changed: Train, tool: Compare
) -> None:
    code, printed = tool(run, changed())
    assert code == 0
    assert printed == (
        "The runs are equal: all rows, and model_final.pth from iteration 11\n"
    )


def test_a_difference_within_rtol_is_tolerated(run: Path, tool: Compare) -> None:
    own = [run, "--with", hook("Scale", start=1), "--iterations", "3", "--rtol"]
    code, printed = tool(*own, "1e-3")
    assert code == 0
    assert (
        "equal within rtol=0.001. The first other bit is in iteration 1, in" in printed
    )
    code, printed = tool(*own, "1e-8")
    assert code == 1, printed
    assert "output of head (Linear)" in printed


def test_ranks_of_another_number_are_compared_by_gradients_and_weights(
    run: Path, tool: Compare
) -> None:
    code, printed = tool(run, "--other-ranks", "2", "--iterations", "2")
    assert code == 1  # each rank normalises by its own half of the batch
    assert "Iteration 0 is the first that differs in\n  gradient of " in printed


def test_a_run_that_does_not_repeat_itself_is_named(
    run: Path, config: Path, tmp_path: Path, tool: Compare
) -> None:
    a = train(config, tmp_path / "a", hook("Noise", iteration=2))
    code, printed = tool(a, run)
    assert code == 2
    assert f"{a} does not repeat itself" in printed
    assert "iteration 2 differs first in gradient of" in printed


def test_a_row_that_no_step_explains_is_said(
    run: Path, tool: Compare, tmp_path: Path
) -> None:
    other = tmp_path / "b"
    shutil.copytree(run, other)
    path = other / "metrics.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["total_loss"] += 1e-9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, printed = tool(run, other)
    assert code == 2
    assert "Computed again, iterations 0 to 3 are equal in every bit" in printed
    assert "The cause of the difference is outside the steps" in printed


SCRIPT = """
import sys

import bending
import torch

from hooktrain import Checkpointer, SimpleTrainer, build_strategy, build_train_loader
from hooktrain import default_hooks, launch
from hooktrain.demos import DigitsCNN, DigitsDataset


def main() -> None:
    model = build_strategy(seed=0, device="cpu").prepare(lambda: DigitsCNN(channels=4))
    loader = build_train_loader(DigitsDataset(train=True), total_batch_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = SimpleTrainer(model, loader, optimizer)
    saver = Checkpointer(model, sys.argv[1], trainer=trainer)
    trainer.register_hooks(default_hooks(checkpointer=saver, checkpoint_period=4))
    if len(sys.argv) > 2:
        trainer.register_hooks([bending.Scale(start=int(sys.argv[2]))])
    saver.resume_or_load()
    trainer.train(max_iter=8)


if __name__ == "__main__":
    launch(main)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def trace(folder: Path, script: Path, *arguments: Any, ranks: int = 1) -> Path:
    """Trace the script, whose output folder is beside the trace; return the trace."""
    options = [each for each in arguments if str(each).startswith("--")]
    rest = arguments[len(options) :]
    command = ["--trace", folder, *options, script, folder.with_suffix(".run"), *rest]
    done = run_ranks(ranks, "compare.py", *command)
    assert done.returncode == 0, done.stdout
    return folder


def test_scripts_without_a_configuration_are_compared_by_their_traces(
    script: Path, tmp_path: Path, tool: Compare
) -> None:
    a = trace(tmp_path / "a", script)
    b = trace(tmp_path / "b", script, 6)
    code, printed = tool("--traces", a, b)
    assert code == 1
    assert printed == (
        "Iteration 6 is the first that differs in\n  output of head (Linear)\n"
        "For the values trace both again with --values-from 6\n"
    )
    assert (tmp_path / "a.run" / "model_final.pth").exists()
    valued = [
        trace(tmp_path / f"{name} again", script, "--values-from=6", *start)
        for name, start in (("a", ()), ("b", (6,)))
    ]
    code, printed = tool("--traces", *valued)
    assert code == 1
    assert "differs in\n  output of head (Linear): 6" in printed
    code, printed = tool("--traces", *valued, "--rtol", "1e-3")
    assert code == 0
    assert "equal within rtol=0.001, iterations 0 to 7. The first other bit" in printed


def test_equal_traces_of_two_ranks_end_where_it_is_asked_for(
    script: Path, tmp_path: Path, tool: Compare
) -> None:
    a = trace(tmp_path / "a", script, "--until=2", ranks=2)
    b = trace(tmp_path / "b", script, "--until=5", ranks=2)
    code, printed = tool("--traces", a, b)
    assert code == 0
    assert printed == "The traces are equal in every bit, iterations 0 to 2\n"
    assert not (tmp_path / "b.run" / "model_final.pth").exists()
    (b / "hashes-1.jsonl").unlink()
    code, printed = tool("--traces", a, b)  # of another number of ranks
    assert code == 0


def test_a_trace_is_no_run_and_is_not_written_twice(
    script: Path, run: Path, tmp_path: Path, tool: Compare
) -> None:
    a = trace(tmp_path / "a", script, "--until=1")
    with pytest.raises(FileNotFoundError, match=f"{run} has no hashes-0.jsonl"):
        tool("--traces", a, run)
    again = run_ranks(1, "compare.py", "--trace", a, script, tmp_path / "other")
    assert again.returncode != 0
    assert "already exists: use a new folder" in again.stdout
    nothing = tmp_path / "nothing.py"
    nothing.touch()
    done = run_ranks(1, "compare.py", "--trace", tmp_path / "none", nothing)
    assert done.returncode != 0
    assert f"{nothing} has not trained in this process" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "pass RUN_A, or --traces A B"),
        (["{run}", "--traces", "a", "b"], "pass RUN_A, or --traces A B"),
        (["{run}", "--trace", "a"], "--trace comes first"),
        (["{run}"], "pass RUN_B, or --with"),
        (
            ["{run}", "{run}", "--from-checkpoint", "model_final.pth"],
            "for a run and itself",
        ),
    ],
)
def test_arguments_that_belong_to_the_other_form_are_refused(
    arguments: list[str], said: str, run: Path, tool: Compare,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        tool(*(argument.format(run=run) for argument in arguments))
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{empty}"], "{empty}/config.json is missing"),
        (["file://{empty}/store"], "file://{empty}/store has no checkpoint of a run"),
        (["nowhere://bucket/run"], "nowhere"),
        (["--with", "optimizer.lrr=1"], "did you mean 'lr'"),
        (["--with", "optimizer.lr=1", "--ranks", "0"], "--ranks must be"),
        (["--with", "optimizer.lr=1", "--iterations", "0"], "--iterations must be"),
    ],
)
def test_as_a_command_it_says_in_a_line_what_is_wrong(
    arguments: list[str], said: str, run: Path, tmp_path: Path
) -> None:
    given = [argument.format(empty=tmp_path) for argument in arguments]
    done = run_program(TOOLS / "compare.py", run, *given)
    assert done.returncode == 2
    assert said.format(empty=tmp_path) in done.stdout
    assert "Traceback" not in done.stdout


def test_the_sides_run_in_interpreters_of_their_own(run: Path) -> None:
    done = run_program(
        *(TOOLS / "compare.py", run, "--python", sys.executable, "--iterations", "1")
    )
    assert done.returncode == 0, done.stdout
    assert "iterations 0 to 0 are equal in every bit" in done.stdout
