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
        code = compare.compare(compare.parse())
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
    assert "The first row that differs is of iteration 7" in printed
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
    assert "begin at the beginning" in printed
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
        "The runs are equal: all rows, and model_final.pth of iteration 11\n"
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
    assert "by what is not computed in a step" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}"], "give RUN_B, or --with"),
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


def test_as_a_command_it_says_which_folder_is_no_run(run: Path, tmp_path: Path) -> None:
    done = run_program(TOOLS / "compare.py", run, tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}/config.json is missing" in done.stdout


def test_the_sides_run_in_interpreters_of_their_own(run: Path) -> None:
    done = run_program(
        *(TOOLS / "compare.py", run, "--python", sys.executable, "--iterations", "1")
    )
    assert done.returncode == 0, done.stdout
    assert "iterations 0 to 0 are equal in every bit" in done.stdout
