"""Real runs under torchrun in which a rank dies, fails, hangs, or is asked to end."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from equality import assert_equal
from gloo import torchrun
from hooktrain.checkpoint.loading import read_checkpoint
from processes import LIMIT_SECONDS, end, run_program, start_program

ROOT = Path(__file__).parent.parent.parent
CONFIG = str(ROOT / "configs" / "digits_cnn.py")
SCRIPT = str(Path(__file__).parent / "disturbances.py")
TORCHRUN = ["-m", "torch.distributed.run"]
TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]

# Nothing is saved before the disturbance in iteration 2, or right before it.
SMALL = [
    "train.max_iter=5",
    "train.checkpointer.period=2",
    "train.eval_period=0",
    "train.log_period=1",
    "model.channels=4",
    "model.dropout=0.5",
]


def command(
    launcher: list[str], disturbance: str, rank: int, folder: Path, *options: str
) -> list[str]:
    arguments = ["--resume", "--config-file", CONFIG, *SMALL]
    arguments += [f"train.output_dir={folder}"]
    return [*launcher, SCRIPT, disturbance, str(rank), *arguments, *options]


def run(
    launcher: list[str], disturbance: str, rank: int, folder: Path, *options: str
) -> tuple[int, str]:
    """The exit code, and what was printed."""
    done = run_program(*command(launcher, disturbance, rank, folder, *options))
    return done.returncode, done.stdout


def weights(folder: Path) -> dict[str, Any]:
    final = folder / "model_final"
    path = final if final.is_dir() else final.with_suffix(".pth")
    state: dict[str, Any] = read_checkpoint(str(path))["model"]
    return state


def assert_same_weights(ours: Path, theirs: Path) -> None:
    assert_equal(weights(ours), weights(theirs))


def processes_of(folder: Path) -> list[int]:
    """The processes that have this folder among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    left = processes_of(tmp_path)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "processes were left behind"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, printed = run(TWO_RANKS, "nothing", 0, folder)
    assert code == 0, printed
    return folder


def test_a_rank_that_is_killed_is_restarted(folder: Path, undisturbed: Path) -> None:
    code, printed = run([*TWO_RANKS, "--max-restarts=1"], "kill", 1, folder)
    assert code == 0, printed
    assert "Starting training from iteration 2" in printed
    assert_same_weights(folder, undisturbed)


def test_a_sharded_run_goes_on_from_its_shards(folder: Path, undisturbed: Path) -> None:
    shards = ["train.strategy=FSDPStrategy", "train.checkpointer.sharded=true"]
    code, printed = run([*TWO_RANKS, "--max-restarts=1"], "kill", 1, folder, *shards)
    assert code == 0, printed
    assert "Starting training from iteration 2" in printed
    assert (folder / "model_0000001").is_dir()
    # Two ranks have the same sums of two gradients, sharded or not.
    assert_same_weights(folder, undisturbed)


def test_the_error_of_a_rank_is_the_last_thing_printed(folder: Path) -> None:
    # Interpreters of their own: copies of torchrun would hand it their errors by themselves.
    code, printed = run([*TWO_RANKS, "--no-python", sys.executable], "fail", 1, folder)
    assert code != 0
    assert "SIGKILL" not in printed  # no rank waits for the failed one
    end = printed[printed.rindex("Root Cause") :]
    assert "KeyError: 'the cause'" in end
    assert [line for line in printed.splitlines() if line.strip(" =")][-1].strip() == (
        "KeyError: 'the cause'"
    )


def test_a_rank_that_hangs_and_one_that_waits_for_it_say_where(folder: Path) -> None:
    code, printed = run(TWO_RANKS, "hang", 1, folder)
    assert code != 0
    for rank in range(2):
        assert f"rank {rank} has made no progress for 1.5 s. Its threads" in printed
    assert re.search(r'disturbances.py", line \d+ in hang', printed)
    assert "exitcode  : 124" in printed


@pytest.mark.parametrize("disturbance", ["suspend", "suspend_all"])
def test_ranks_that_are_suspended_go_on(
    disturbance: str, folder: Path, undisturbed: Path
) -> None:
    code, printed = run(TWO_RANKS, disturbance, 1, folder)
    assert code == 0, printed
    assert_same_weights(folder, undisturbed)


def test_a_run_without_stdin_and_outputs_trains_as_well(
    folder: Path, undisturbed: Path
) -> None:
    arguments = command(TWO_RANKS, "nothing", 0, folder)
    assert end(start_program(*arguments, output=None)) == 0
    assert_same_weights(folder, undisturbed)
    assert "Total training time" in (folder / "log.txt").read_text()


def test_a_signal_to_one_rank_saves(folder: Path, undisturbed: Path) -> None:
    code, printed = run(TWO_RANKS, "terminate", 1, folder)
    assert code != 0
    assert "exitcode  : 143" in printed
    assert not (folder / "model_final.pth").exists()
    code, printed = run(TWO_RANKS, "nothing", 0, folder)
    assert code == 0, printed
    assert "Starting training from iteration 3" in printed
    assert_same_weights(folder, undisturbed)


def test_a_second_sigterm_ends_a_process_that_does_not_come_to_save(
    folder: Path,
) -> None:
    arguments = command([], "show", 0, folder)
    process = start_program(*arguments, output=folder / "printed")
    deadline = time.monotonic() + LIMIT_SECONDS
    while process.is_alive() and time.monotonic() < deadline:
        if (folder / "pid").exists():
            process.terminate()
        time.sleep(0.1)
    assert end(process) == -signal.SIGTERM
    assert (folder / "last_checkpoint").read_text() == "model_0000001.pth"


def two_agents(
    options: list[str], disturbance: str, folder: Path, **environment: str
) -> str:
    """What both print; each runs one rank."""
    outputs = [folder / f"agent{node}" for node in range(2)]
    agents = []
    for node, output in enumerate(outputs):
        launcher = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *options]
        launcher = [option.format(node=node) for option in launcher]
        arguments = command(launcher, disturbance, 1, folder / "out")
        agents.append(start_program(*arguments, output=output, **environment))
    codes = [end(agent) for agent in agents]
    printed = "".join(output.read_text() for output in outputs)
    assert codes == [0, 0], printed
    return printed


def test_two_agents_restart_when_a_rank_is_killed(
    folder: Path, undisturbed: Path
) -> None:
    meet = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{torchrun()['MASTER_PORT']}",
        "--rdzv-id=1",
    ]
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    printed = two_agents([*meet, "--max-restarts=1"], "kill", folder, **fresh)
    assert "Starting training from iteration 2" in printed
    assert_same_weights(folder / "out", undisturbed)
