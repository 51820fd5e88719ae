"""hooktrain eval --follow evaluates each checkpoint beside the run, whichever of both is killed."""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from loading import TOOLS, load_tool

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError
from hooktrain.checkpoint.folders import save_folder
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import checkpoint_names
from hooktrain.checkpoint.store import Store
from hooktrain.config import LazyConfig
from hooktrain.utils.file_io import delete, lock_folder, unlock_folder
from hooktrain.utils.logger import close_logger
from processes import end, run_program, start, start_program, wait_until

CONFIG = """
from hooktrain.checkpoint.store import Store
from hooktrain.config import LazyConfig

model, optimizer, dataloader, train = LazyConfig.load(
    {digits!r}, ("model", "optimizer", "dataloader", "train")
)
optimizer.lr = 0.01
model.channels = 2
model.dropout = 0.5
dataloader.train.num_workers = 0
dataloader.evaluator._target_ = "noise.NoisyEvaluator"
train.update(max_iter=12, log_period=2, eval_period=4)
train.checkpointer.update(period=4, max_to_keep=None)
train.ema.enabled = True
hooks = []
"""
ITERATIONS = [3, 7, 11]
Row = dict[str, Any]
Background = Callable[..., Any]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.py"
    path.write_text(CONFIG.format(digits=str(TOOLS.parent / "configs/digits_cnn.py")))
    return path


def train_command(config: Path, folder: Path, *settings: str) -> list[Any]:
    own = ["--resume", "--config-file", config, f"train.output_dir={folder}"]
    return [TOOLS / "train_net.py", *own, *settings]


def follow_command(config: Path, folder: Path, *options: str) -> list[Any]:
    own = ["--eval-only", "--follow", "--poll", "0.01", "--config-file", config]
    return [TOOLS / "train_net.py", *own, f"train.output_dir={folder}", *options]


def succeed(command: list[Any]) -> str:
    done = run_program(*command)
    assert done.returncode == 0, done.stdout
    return done.stdout


def rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def results(folder: Path) -> list[Row]:
    """What evaluations have found, in the rows of a run or of a process that follows it."""
    found = []
    for row in rows(folder / "metrics.json"):
        of_evaluation = {name: row[name] for name in row if "classification/" in name}
        if of_evaluation:
            found.append({**of_evaluation, "iteration": row["iteration"]})
    return found


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Background]:
    """Starts a program, which is killed after the test if it still runs."""
    started = []

    def start_in_background(*command: Any) -> Any:
        output = tmp_path / f"output-{len(started)}.txt"
        started.append(start_program(*command, output=output))
        return started[-1]

    yield start_in_background
    for process in started:
        process.kill()
        end(process)


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has evaluated itself."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    succeed(train_command(config, folder))
    assert [row["iteration"] for row in results(folder)] == ITERATIONS
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_as_by_itself(run: Path) -> None:
    """Fail unless the rows are, bit for bit, those of the run, and nothing is left behind."""
    assert rows(run / "eval" / "metrics.json") == results(run)
    files = {".lock", "log.txt", "metrics.json", "run_id"}
    assert names(run / "eval") - {"model_best.pth"} == files


def test_results_are_bit_for_bit_those_of_a_run_that_evaluates_itself(
    config: Path, run: Path
) -> None:
    printed = succeed(follow_command(config, run, "--all"))
    best = max(results(run), key=lambda row: row["classification/accuracy"])
    assert f"from iteration {best['iteration']}, in {run}/eval" in printed
    assert "ema/classification/accuracy" in results(run)[0]
    assert_as_by_itself(run)


def test_beside_a_run_it_evaluates_each_checkpoint_as_it_comes(
    config: Path, tmp_path: Path, background: Background
) -> None:
    """It is started before the run, which is killed in between and does not evaluate."""
    folder = tmp_path / "run"
    kill = "hooks=[{'_target_': 'killing.Kill', 'iteration': 6}]"
    following = background(*follow_command(config, folder, "--all"))
    log = folder / "eval" / "log.txt"
    wait_until(lambda: log.exists() and "There is no checkpoint yet" in log.read_text())
    silent = ["dataloader.evaluator=null", "train.best_metric=null"]
    killed = run_program(*train_command(config, folder, *silent, kill))
    assert killed.returncode == -signal.SIGKILL
    wait_until((folder / "eval" / "metrics.json").exists)
    succeed(train_command(config, folder, *silent))
    assert end(following) == 0
    assert log.read_text().count("There is no checkpoint yet") == 1
    assert results(folder) == []
    found = rows(folder / "eval" / "metrics.json")
    assert [row["iteration"] for row in found] == ITERATIONS
    succeed(train_command(config, tmp_path / "by itself"))
    assert found == results(tmp_path / "by itself")


@pytest.mark.parametrize(
    "metric", ["classification/val_loss", "ema/classification/val_loss"]
)
def test_the_best_model_is_kept_with_its_value_and_the_state_of_the_trainer(
    config: Path, run: Path, metric: str
) -> None:
    best = [f"train.best_metric={metric}", "train.best_mode=min"]
    succeed(follow_command(config, run, "--all", *best))
    kept = read_checkpoint(str(run / "eval" / "model_best.pth"))
    values = {r[metric]: r["iteration"] for r in results(run)}
    assert kept["best"] == {
        "metric": metric,
        "best_metric": min(values),
        "best_iter": values[min(values)],
    }
    assert kept["iteration"] == kept["trainer"]["iteration"] == values[min(values)]
    average = kept["trainer"]["hooks"]["EMA"]
    is_average = [
        torch.equal(weight, average[f"module.{name}"])
        for name, weight in kept["model"].items()
        if name.endswith("weight")
    ]
    assert is_average == [metric.startswith("ema/")] * len(is_average)
    own = [*follow_command(config, run / "eval", *best)]
    printed = succeed([each for each in own if each != "--follow"] + ["--best"])
    assert f"val_loss of the run was {min(values):.4g}" in printed


def test_without_all_it_takes_the_newest_checkpoint(config: Path, run: Path) -> None:
    succeed(follow_command(config, run))
    assert [row["iteration"] for row in rows(run / "eval" / "metrics.json")] == [11]
    succeed(follow_command(config, run, "--all"))
    found = rows(run / "eval" / "metrics.json")
    assert [row["iteration"] for row in found] == [11, 3, 7]


def test_a_run_goes_on_after_its_final_checkpoint_and_is_followed_again(
    config: Path, run: Path
) -> None:
    succeed(follow_command(config, run, "--all"))
    assert "has been evaluated" in succeed(follow_command(config, run, "--all"))
    assert_as_by_itself(run)
    succeed(train_command(config, run, "train.max_iter=20"))
    succeed(follow_command(config, run, "--all"))
    assert_as_by_itself(run)
    assert [row["iteration"] for row in results(run)] == [*ITERATIONS, 15, 19]


def test_when_patience_is_over_the_run_stops_in_order(
    config: Path, tmp_path: Path, background: Background
) -> None:
    """The rate is 0, so that nothing improves; without a stop the run would take hours."""
    folder = tmp_path / "run"
    endless = ["train.max_iter=1000000", "optimizer.lr=0", "dataloader.evaluator=null"]
    settings = [*endless, "train.best_metric=null", "train.checkpointer.period=20"]
    training = background(*train_command(config, folder, *settings))
    printed = succeed(
        follow_command(config, folder, "optimizer.lr=0", "--patience", "2")
    )
    assert end(training) == 0
    reason = "classification/accuracy has not improved in 2 evaluations"
    assert f"{reason}: asking the run to stop, by {folder}/stop" in printed
    assert f"{folder}/stop exists. {reason}" in (folder / "log.txt").read_text()
    stopped = read_checkpoint(str(folder / "model_final.pth"))["iteration"]
    found = rows(folder / "eval" / "metrics.json")
    assert [row["iteration"] for row in found][-1] == stopped
    # Started again, the run does not go on.
    succeed(train_command(config, folder, *settings))
    again = read_checkpoint(str(folder / "model_final.pth"))["iteration"]
    assert again == stopped


def test_on_another_machine_it_follows_the_store(
    config: Path, run: Path, tmp_path: Path
) -> None:
    store = f"train.store=file://{tmp_path}/store"
    trained = tmp_path / "trained"
    succeed(train_command(config, trained, store))
    shutil.rmtree(trained)
    elsewhere = tmp_path / "elsewhere"
    printed = succeed(follow_command(config, elsewhere, store, "--all"))
    assert f"Following {tmp_path}/elsewhere and file://{tmp_path}/store" in printed
    assert rows(elsewhere / "eval" / "metrics.json") == results(run)[1:]
    assert checkpoint_names(elsewhere) == []
    assert not (elsewhere / "eval" / "reading").exists()


def test_over_a_store_no_stop_can_be_asked_for_and_the_log_says_so(
    config: Path, run: Path, tmp_path: Path, background: Background
) -> None:
    store = f"file://{tmp_path}/store"
    # As if the run were still training: its last checkpoint has a number.
    (run / "last_checkpoint").write_text("model_0000007.pth")
    Checkpointer(torch.nn.Linear(1, 1), run, store=store).finish()
    log = tmp_path / "elsewhere" / "eval" / "log.txt"
    log.parent.mkdir(parents=True)
    earlier = {"iteration": 3, "classification/accuracy": 99.0}
    (log.parent / "metrics.json").write_text(json.dumps(earlier))
    options = [f"train.store={store}", "--patience", "1"]
    following = background(*follow_command(config, tmp_path / "elsewhere", *options))
    wait_until(lambda: log.exists() and "'stop'" in log.read_text())
    os.kill(following.pid, signal.SIGTERM)
    assert end(following) == 128 + signal.SIGTERM
    assert not (tmp_path / "elsewhere" / "stop").exists()


def test_two_ranks_follow_a_sharded_run_of_two_ranks(
    config: Path, tmp_path: Path
) -> None:
    settings = ["train.strategy=FSDPStrategy", "train.checkpointer.sharded=true"]
    folder = tmp_path / "run"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    succeed([*ranks, *train_command(config, folder, *settings)])
    succeed([*ranks, *follow_command(config, folder, *settings, "--all")])
    found = results(folder)
    assert rows(folder / "eval" / "metrics.json") == found
    kept = read_checkpoint(str(folder / "eval" / "model_best"))
    accuracies = [row["classification/accuracy"] for row in found]
    assert kept["best"]["best_metric"] == max(accuracies)


def follow_here(follow: ModuleType, config: Path, run: Path, *options: str) -> None:
    """Follow in this process, by the module of the script."""
    train_net = load_tool("train_net")
    command = [str(part) for part in follow_command(config, run, *options)[1:]]
    args = train_net.argument_parser().parse_intermixed_args(command)
    cfg = LazyConfig.apply_overrides(LazyConfig.load(str(config)), args.opts)
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        follow.follow(cfg, args)
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        unlock_folder(run / "eval")
        close_logger()


def shard(run: Path) -> None:
    """Make folders of shards of the files of a run."""
    for file in run.glob("model_*.pth"):
        save_folder(torch.load(file, weights_only=True), file.with_suffix(""))
        file.unlink()
    (run / "last_checkpoint").write_text("model_final")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_evaluated(
    sharded: bool, config: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sharded:
        shard(run)
    follow = load_tool("follow")
    hold = follow.Follower._hold

    def delete_it(self: Any, found: Any) -> Path:
        path: Path = hold(self, found)
        delete(run / found.name)
        return path

    monkeypatch.setattr(follow.Follower, "_hold", delete_it)
    follow_here(follow, config, run, "--all")
    assert rows(run / "eval" / "metrics.json") == results(run)
    assert not {"model_0000003", "model_0000003.pth"} & set(checkpoint_names(run))


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_was_deleted_before_is_passed_over(
    sharded: bool,
    links: bool,
    config: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if sharded:
        shard(run)
    follow = load_tool("follow")
    hold = follow.Follower._hold

    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    def delete_first(self: Any, found: Any) -> Path:
        if found.iteration == 7 and links:
            delete(run / found.name)
        path: Path = hold(self, found)
        if found.iteration == 7 and not links:
            delete(run / found.name)
        return path

    if not links:
        monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(follow.Follower, "_hold", delete_first)
    follow_here(follow, config, run, "--all")
    first, _, last = results(run)
    assert rows(run / "eval" / "metrics.json") == [first, last]
    suffix = "" if sharded else ".pth"
    text = f"model_0000007{suffix} was deleted before it was read"
    assert text in capsys.readouterr().out


def test_a_broken_checkpoint_is_named_and_a_final_one_is_an_error(
    config: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model_0000003.pth").write_bytes(b"PK")
    follow_here(load_tool("follow"), config, run, "--all")
    assert rows(run / "eval" / "metrics.json") == results(run)[1:]
    printed = capsys.readouterr().out
    assert printed.count("NOT EVALUATED, since it is broken: ") == 1
    assert "model_0000003.pth is not an intact checkpoint" in printed
    shutil.rmtree(run / "eval")
    (run / "model_final.pth").write_bytes(b"PK")
    with pytest.raises(CorruptCheckpointError, match=r"model_final\.pth"):
        follow_here(load_tool("follow"), config, run)


def test_a_run_whose_final_checkpoint_is_deleted_is_over(
    config: Path, run: Path
) -> None:
    follow_here(load_tool("follow"), config, run, "--all")
    (run / "model_final.pth").unlink()
    follow_here(load_tool("follow"), config, run, "--all")
    assert rows(run / "eval" / "metrics.json") == results(run)
    shutil.rmtree(run / "eval")
    with pytest.raises(FileNotFoundError, match=r"model_final\.pth"):
        follow_here(load_tool("follow"), config, run)


@pytest.mark.parametrize("method", ["list_entries", "fetch"])
def test_a_store_that_does_not_answer_is_asked_again(
    method: str,
    config: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = f"file://{tmp_path}/store"
    Checkpointer(torch.nn.Linear(1, 1), run, store=store).finish()
    original, calls = getattr(Store, method), []

    def fail_at_first(self: Store, *args: Any) -> Any:
        calls.append(method)
        # The first request of all has to succeed.
        if len(calls) == 1 + (method == "list_entries"):
            raise RuntimeError("no route to host")
        return original(self, *args)

    monkeypatch.setattr(Store, method, fail_at_first)
    here = tmp_path / "elsewhere"
    follow_here(load_tool("follow"), config, here, f"train.store={store}")
    printed = capsys.readouterr().out
    assert printed.count("trying again: RuntimeError('no route to host')") == 1
    assert rows(here / "eval" / "metrics.json") == results(run)[-1:]


def test_a_checkpoint_that_the_run_deletes_from_the_store_is_passed_over(
    config: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = f"file://{tmp_path}/store"
    saver = Checkpointer(torch.nn.Linear(1, 1), run, store=store)
    for name in ("model_0000003.pth", "model_0000007.pth"):
        (run / "last_checkpoint").write_text(name)
        saver.finish()
    original, fetched = Store.fetch, []

    def delete_first(self: Store, entry: Any) -> None:
        fetched.append(entry["iteration"])
        if fetched == [3]:
            (run / "last_checkpoint").write_text("model_final.pth")
            saver.finish()
        original(self, entry)

    monkeypatch.setattr(Store, "fetch", delete_first)
    here = tmp_path / "elsewhere"
    follow_here(load_tool("follow"), config, here, f"train.store={store}", "--all")
    assert "model_0000003.pth was deleted before it was read" in capsys.readouterr().out
    assert rows(here / "eval" / "metrics.json") == results(run)[1:]


def test_the_first_look_into_a_store_has_to_succeed(
    config: Path, tmp_path: Path
) -> None:
    unknown = "train.store=nowhere://bucket/run"
    with pytest.raises(ValueError, match="nowhere"):
        follow_here(load_tool("follow"), config, tmp_path / "run", unknown)


def test_what_is_behind_the_pointer_is_of_another_run(config: Path, run: Path) -> None:
    (run / "model_final.pth").rename(run / "model_0000011.pth")
    shutil.copy(run / "model_0000003.pth", run / "model_final.pth")
    (run / ".last_iteration").write_text("3")
    follow_here(load_tool("follow"), config, run, "--all")
    assert rows(run / "eval" / "metrics.json") == results(run)[:1]


def test_rows_of_two_runs_are_not_mixed(config: Path, run: Path) -> None:
    own = ["--all", "--eval-dir", str(run.parent / "rows")]
    follow_here(load_tool("follow"), config, run, *own)
    shutil.rmtree(run)
    succeed(train_command(config, run))
    (run.parent / "rows" / "metrics.json").unlink()
    with pytest.raises(ValueError, match="rows has the rows of another run"):
        follow_here(load_tool("follow"), config, run, *own)


def test_mistakes_are_told(config: Path, run: Path) -> None:
    def fail(*options: str) -> str:
        done = run_program(*follow_command(config, run, *options))
        assert done.returncode == 1
        return done.stdout

    assert "without --resume and --best" in fail("--resume")
    assert "--patience must be a whole number, at least 1" in fail("--patience", "0")
    assert "--poll must be positive, in seconds, not -1.0" in fail("--poll", "-1")
    assert "needs train.best_metric" in fail(
        "--patience", "3", "train.best_metric=null"
    )
    assert "needs dataloader.test and" in fail("dataloader.evaluator=null")
    of_best = fail("train.best_metric=classification/acuracy")
    assert "no 'classification/acuracy', which is train.best_metric" in of_best
    assert "classification/accuracy" in of_best
    assert rows_or_none(run) is None
    lock_folder(run / "eval")
    assert "in use by another run" in fail()
    unlock_folder(run / "eval")
    alone = [
        each for each in follow_command(config, run, "--all") if each != "--follow"
    ]
    assert (
        "--all, --eval-dir and --patience need --follow" in run_program(*alone).stdout
    )


def rows_or_none(run: Path) -> list[Row] | None:
    file = run / "eval" / "metrics.json"
    return rows(file) if file.exists() else None


def kill_in(point: str, config: Path, run: Path) -> None:
    """Follow in this process, which kills itself at the second checkpoint."""
    sys.path.insert(0, str(TOOLS))
    import follow

    train_net = load_tool("train_net")

    def kill_at(owner: Any, name: str, *, after: bool = False) -> None:
        original = getattr(owner, name)

        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_second = len(self.rows) == 1
            result = original(self, *args, **kwargs) if after or not is_second else None
            if is_second or (after and len(self.rows) == 2):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, changed)

    if point == "held":
        kill_at(follow.Follower, "_hold", after=True)
    elif point == "loaded":
        kill_at(follow.Follower, "_load", after=True)
    elif point == "before the row":
        kill_at(follow.Follower, "_write")
    elif point == "after the row":
        kill_at(follow.Follower, "_write", after=True)
    else:
        original = follow.atomic_write

        def torn(path: Path) -> Any:
            context = original(path)

            class Torn:
                def __enter__(self) -> Any:
                    file = context.__enter__()
                    write = file.write

                    class Half:
                        def write(self, text: bytes) -> None:
                            write(text[:-9])
                            file.flush()
                            if len(text.splitlines()) == 2:
                                os.kill(os.getpid(), signal.SIGKILL)
                            write(text[-9:])

                    return Half()

                def __exit__(self, *error: object) -> Any:
                    return context.__exit__(*error)

            return Torn()

        follow.atomic_write = torn
    arguments = [str(part) for part in follow_command(config, run, "--all")[1:]]
    train_net.main(train_net.argument_parser().parse_intermixed_args(arguments))


@pytest.mark.parametrize(
    "point", ["held", "loaded", "before the row", "in the row", "after the row"]
)
def test_a_kill_loses_no_row_and_makes_none_twice(
    point: str, config: Path, run: Path
) -> None:
    if point == "held":
        shard(run)  # a folder that is left behind would be in the way
    assert end(start(kill_in, point, config, run)) == -signal.SIGKILL
    count = 2 if point == "after the row" else 1
    assert len(rows(run / "eval" / "metrics.json")) == count
    succeed(follow_command(config, run, "--all"))
    assert_as_by_itself(run)
