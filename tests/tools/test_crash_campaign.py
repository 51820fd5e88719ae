"""A short campaign of random faults, and that it would notice a run that is lost or bent."""

import importlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hooktrain
from processes import CONTEXT, wait_until

TOOLS = Path(__file__).parent.parent.parent / "tools"


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        campaign = importlib.import_module("crash_campaign")
        for module in (campaign, importlib.import_module("crash_faults")):
            patch.setattr(module, "CONTEXT", CONTEXT)
        yield campaign


@pytest.fixture(scope="module")
def faults(tool: Any) -> Any:
    return importlib.import_module("crash_faults")


@pytest.fixture(scope="module")
def variant(tool: Any) -> Any:
    return tool.Variant("core", 1, 0, False, False)


@pytest.fixture(scope="module")
def complete(tool: Any, variant: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run, with its log beside it."""
    folder = tmp_path_factory.mktemp("complete")
    assert tool.run(folder / "out", variant) == (0, False)
    return folder


def test_runs_that_random_faults_strike_end_as_undisturbed_ones(
    tool: Any, tmp_path: Path
) -> None:
    campaign = tool.Campaign(5, 4, tmp_path, rounds=(1, 1))
    one_of_each = [tool.TURNS.index(script) for script in tool.SCRIPTS]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(campaign.attempt, one_of_each))
    assert campaign.failures == []
    assert campaign.struck.total() >= 2


def test_runs_whose_machines_are_lost_go_on_from_their_store(
    tool: Any, tmp_path: Path
) -> None:
    campaign = tool.LostMachines(17, 4, tmp_path, rounds=(1, 1))
    with ThreadPoolExecutor(2) as pool:
        # Of a DefaultTrainer, and with any number of ranks.
        list(pool.map(campaign.attempt, [1, 2]))
    assert campaign.failures == []
    assert campaign.struck.total() >= 1


def test_a_third_of_the_tries_has_three_ranks_or_four_and_some_divide_them_twice(
    tool: Any, tmp_path: Path
) -> None:
    def drawn(**options: Any) -> list[Any]:
        campaign = tool.Campaign(1, 0, tmp_path, **options)
        draw = tool.random.Random(1)
        return [campaign.variant(i, tmp_path, draw) for i in range(600)]

    usual = drawn()
    assert {each.ranks for each in usual} == {1, 2, 3, 4}
    assert 160 < sum(each.ranks > 2 for each in usual) < 240
    hybrid = {each.script for each in usual if each.is_hybrid}
    assert hybrid == set(tool.SCRIPTS)
    assert {each.ranks for each in drawn(ranks=[3, 4])} == {3, 4}


def test_machines_that_are_lost_train_in_bfloat16_with_ddp_and_fsdp(
    tool: Any, tmp_path: Path
) -> None:
    campaign = tool.LostMachines(1, 0, tmp_path, ranks=[2, 3])
    draw = tool.random.Random(1)
    drawn = [campaign.variant(i, tmp_path, draw) for i in range(0, 600, 3)]
    assert {(each.fsdp, each.mixed, each.sharded) for each in drawn} == {
        *product((False, True), repeat=3)
    }
    # And a run does so.
    variant = tool.Variant("core", 2, 0, False, False, fsdp=True, mixed=True)
    assert tool.run(tmp_path / "out", variant) == (0, False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["train"]
    assert config["strategy"]["_target_"].endswith("FSDPStrategy")
    assert config["amp"]["dtype"] == "bfloat16"
    assert config["accumulative_counts"] == 2


def test_the_core_says_what_the_campaign_looks_for(tool: Any) -> None:
    package = Path(hooktrain.__file__).parent
    core = b"".join(path.read_bytes() for path in package.rglob("*.py"))
    phrases = [*tool.ROWS_ARE_LOST, tool.BEST_IS_REFUSED, tool.NOT_IN_THE_STORE]
    phrases += [tool.STORE_IS_TAKEN, tool.STORE_HAS_A_RUN]
    phrases += [b"Resumed exactly", b"which this run computes again and compares: "]
    assert [phrase for phrase in phrases if phrase not in core] == []


def count_ranks(rank: int, folder: str) -> None:
    """Write how many ranks are there when this one begins, and wait for the others."""
    parent = os.getppid()
    there = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    Path(folder, f"{len(there)}-{rank}").touch()
    wait_until(lambda: len(os.listdir(folder)) == 4)


def test_no_rank_begins_before_all_are_forked(faults: Any, tmp_path: Path) -> None:
    ranks = (count_ranks, (str(tmp_path),), 4)
    process = CONTEXT.Process(target=faults.start_copies, args=ranks)
    process.start()
    process.join()
    assert sorted(os.listdir(tmp_path)) == ["4-0", "4-1", "4-2", "4-3"]


def test_a_run_that_does_not_end_leaves_the_stacks_of_its_processes(
    faults: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks = faults.Variant("core", 2, 0, False, False)
    hangs = faults.AtCall(0, seconds=1000.0)
    run = (str(tmp_path / "out"), two_ranks, hangs)
    process = CONTEXT.Process(target=faults.train, args=run)
    process.start()
    wait_until(lambda: len(faults.parents(process.pid)) == 3)
    monkeypatch.setattr(faults, "LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(faults, "GRACE_SECONDS", 0.0)
    with pytest.raises(faults.LostRunError, match="3 processes did not end"):
        faults.end(process)
    process.join()
    assert (tmp_path / "out.log").read_text().count(" in launch\n") == 3


def test_the_end_of_the_campaigns_own_fork_server_is_no_exit_code_of_a_run(
    faults: Any,
) -> None:
    # What Process.exitcode is then, since only the server could read the true one.
    process = SimpleNamespace(pid=-2, exitcode=255, join=lambda seconds: None)
    with pytest.raises(RuntimeError, match="fork server of the campaign"):
        faults.end(process)


def test_a_run_that_is_bent_is_reported(
    tool: Any, complete: Path, tmp_path: Path
) -> None:
    shutil.copytree(complete, tmp_path, dirs_exist_ok=True)
    expected = tool.outcome(tmp_path / "out")
    assert tool.differences(tool.outcome(tmp_path / "out"), expected) == []
    lines = (tmp_path / "out" / "metrics.json").read_text().splitlines()
    row = json.loads(lines[2]) | {"total_loss": 0.5}
    lines[2] = json.dumps(row)
    (tmp_path / "out" / "metrics.json").write_text("\n".join(lines))
    found = tool.differences(tool.outcome(tmp_path / "out"), expected)
    assert found == [".rows[2].total_loss"]


def test_a_bent_run_of_the_configuration_is_compared_by_the_tool(
    tool: Any, complete: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(complete / "out", tmp_path / "out")
    said = tool.where_they_part(complete / "out", copy, ranks=1)
    assert said.startswith("The runs are equal: all rows, and model_final.pth")


def test_a_resume_proves_itself_to_the_campaign_unless_a_weight_was_bent(
    tool: Any, variant: Any, complete: Path, tmp_path: Path
) -> None:
    shutil.copytree(complete, tmp_path, dirs_exist_ok=True)
    log = tmp_path / "out.log"
    assert tool.proof_problem(log.read_text()) == ""
    assert tool.proof_problem("10:45:06 Starting training") == ""
    for bend in (0.0, 1e-7):
        (tmp_path / "out" / "model_final.pth").unlink()
        path = tmp_path / "out" / "model_0000062.pth"
        (tmp_path / "out" / "last_checkpoint").write_text(path.name)
        state = torch.load(path, weights_only=True)
        for weight in state["model"].values():
            if weight.is_floating_point():
                weight *= 1 + bend
        torch.save(state, path)
        assert tool.run(tmp_path / "out", variant) == (0, False)
        said = log.read_text()
        was_exact = "Resumed exactly: 1 rows computed again are equal" in said
        assert was_exact == (bend == 0.0)
        assert bool(tool.proof_problem(said)) == (bend > 0)
        log.unlink()
    assert "not proved 2 rows" in tool.proof_problem(
        "rows after the checkpoint, which this run computes again and compares: 2\n"
    )
