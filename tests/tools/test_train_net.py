"""The scripts as a user runs them."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import load_tool
from torch import nn

from equality import assert_same_end
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    checkpointer as checkpointer_module,
)
from hooktrain.checkpoint.resume import names_to_resume
from hooktrain.config import ConfigDict, LazyConfig, instantiate
from hooktrain.engine import SimpleTrainer, hooks, train_settings
from hooktrain.engine.build import build_optimizer
from hooktrain.utils.file_io import delete
from hooktrain.utils.logger import close_logger
from processes import run_program
from toys import model_of

ROOT = Path(__file__).parent.parent.parent
CONFIG = str(ROOT / "configs" / "digits_cnn.py")
SMALL = [
    "train.max_iter=12",
    "train.checkpointer.period=5",
    "train.log_period=4",
    "model.channels=4",
]


def command(folder: Path, *args: str, script: str = "train_net.py") -> list[str]:
    settings = [f"train.output_dir={folder}", *SMALL]
    # The flags may stand behind them.
    return [str(ROOT / "tools" / script), "--config-file", CONFIG, *settings, *args]


def run(folder: Path, *args: str, script: str = "train_net.py") -> str:
    """Run a script of tools/ in a folder of its own; return what it printed."""
    done = run_program(*command(folder, *args, script=script))
    assert done.returncode == 0, done.stdout
    return done.stdout


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A complete run by an interpreter of its own: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    printed = subprocess.check_output(
        [sys.executable, *command(folder)],
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return folder, printed


def test_a_run_leaves_what_the_readme_promises(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    assert "Warning" not in printed
    assert "eta: " in printed
    assert "total_loss: " in printed
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    models = {f"model_{end}.pth" for end in ("0000004", "0000009", "best", "final")}
    files = {"config.json", "last_checkpoint", "log.txt", "metrics.json"}
    assert names == models | files | {".lock", ".last_iteration"}
    assert [line["iteration"] for line in rows(folder)] == [3, 7, 11]
    assert {"total_loss", "lr", "time", "data_time"} <= set(rows(folder)[1])
    assert "classification/accuracy" in rows(folder)[-1]


def test_the_newest_and_the_best_model_are_evaluated(
    finished: tuple[Path, str],
) -> None:
    folder, _ = finished
    evaluated = run(folder, "--eval-only", "--resume")
    assert "copypaste: accuracy,val_loss,mean_class_accuracy" in evaluated
    accuracy = rows(folder)[-1]["classification/accuracy"]
    assert f"copypaste: {accuracy:.4f}," in evaluated
    evaluated = run(folder, "--eval-only", "--best", "train.eval_period=5")
    assert re.search(r"Loading model from \S+/model_best.pth\n", evaluated)
    best = "The best classification/accuracy of the run was .*, at iteration 11\n"
    assert re.search(best, evaluated)


def test_a_complete_run_is_made_longer(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "longer")
    printed = run(folder, "--resume", "train.max_iter=16")
    assert "Starting training from iteration 12" in printed
    assert [line["iteration"] for line in rows(folder)] == [3, 7, 11, 15]


def test_where_there_is_no_best_model_an_evaluation_of_it_says_so(
    tmp_path: Path,
) -> None:
    done = run_program(*command(tmp_path, "--eval-only", "--best"))
    assert done.returncode == 1
    assert f"there is no model_best.pth in '{tmp_path}'" in done.stdout


HERE = "train.output_dir={}"


@pytest.mark.parametrize(
    "how", [["--resume"], ["--best"], ["train.init_checkpoint={}/model_best.pth"]]
)
def test_another_model_than_that_of_the_run_is_not_evaluated(
    how: list[str], tmp_path: Path
) -> None:
    tool = load_tool("train_net")

    def arguments(*more: str) -> Any:
        texts = ["--config-file", CONFIG, "--eval-only", HERE, *more]
        return tool.argument_parser().parse_intermixed_args(
            [text.format(tmp_path) for text in texts]
        )

    cfg = LazyConfig.load(CONFIG)
    checkpointer = Checkpointer(instantiate(cfg.model), tmp_path)
    checkpointer.save(
        "model_best", best={"metric": "a", "best_metric": 1, "best_iter": 4}
    )
    try:
        assert tool.main(arguments(*how))["classification"]
        with pytest.raises(ValueError, match="another model"):
            tool.main(arguments(*how, "model.channels=3"))
    finally:
        close_logger()


@pytest.mark.parametrize("newer", ["model_best.pth", "model_best"])
def test_of_a_best_file_and_a_best_folder_the_newer_one_is_evaluated(
    newer: str, tmp_path: Path
) -> None:
    tool = load_tool("train_net")
    for sharded, value in [(False, 0.75), (True, 0.25)]:
        saver = Checkpointer(model_of(value), tmp_path, sharded=sharded)
        best = {"metric": "a", "best_metric": value, "best_iter": 4}
        saver.save("model_best", best=best)
    os.utime(tmp_path / newer, (2e9, 2e9))
    model = model_of(0.0)
    tool.load_best(Checkpointer(model, tmp_path))
    assert model.bias.item() == (0.25 if newer == "model_best" else 0.75)


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_a_best_model_that_a_run_replaces_while_it_is_read_is_read_again(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_tool("train_net")

    def save(value: float) -> None:
        best = {"metric": "a", "best_metric": value, "best_iter": 4}
        saver = Checkpointer(model_of(value), tmp_path, sharded=sharded)
        saver.save("model_best", best=best)

    save(0.5)
    read = Checkpointer.read
    read_paths = []

    def read_while_it_is_replaced(self: Checkpointer, path: str) -> dict[str, Any]:
        read_paths.append(path)
        if len(read_paths) < 3:
            save(0.5 + len(read_paths))
            raise CorruptCheckpointError(f"{path} was altered")
        return read(self, path)

    monkeypatch.setattr(Checkpointer, "read", read_while_it_is_replaced)
    model = model_of(0.0)
    tool.load_best(Checkpointer(model, tmp_path))
    assert model.bias.item() == 2.5
    assert len(read_paths) == 3


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_a_checkpoint_that_a_run_rotates_away_while_it_is_read_gives_the_next_one(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_tool("train_net")
    saver = Checkpointer(model_of(0.5), tmp_path, sharded=sharded)
    saver.save("model_0000001", iteration=1)

    def names_before_a_save(folder: Any) -> list[str]:
        names = names_to_resume(folder)
        if names[0].startswith("model_0000001"):
            saver.save("model_0000002", iteration=2)
            delete(tmp_path / names[0])
        return names

    monkeypatch.setattr(checkpointer_module, "names_to_resume", names_before_a_save)
    model = model_of(0.0)
    found = tool.load_newest(Checkpointer(model, tmp_path))
    assert (found["iteration"], model.bias.item()) == (2, 0.5)


def test_a_best_model_that_is_damaged_is_refused(tmp_path: Path) -> None:
    tool = load_tool("train_net")
    saver = Checkpointer(model_of(0.5), tmp_path)
    saver.save("model_best", best={})
    path = tmp_path / "model_best.pth"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"model_best\.pth"):
        tool.load_best(saver)


@pytest.mark.parametrize("flags", ["--best", "--dry-run --resume"])
def test_flags_that_exclude_each_other_are_refused_at_once(
    flags: str, tmp_path: Path
) -> None:
    tool = load_tool("train_net")
    args = ["--config-file", CONFIG, HERE.format(tmp_path / "new"), *flags.split()]
    with pytest.raises(ValueError, match=flags.split()[-1]):
        tool.main(tool.argument_parser().parse_args(args))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--lr", "0.05"], "--lr .*optimizer.lr=0.1"),
        (["--resume", "epochs=3"], ""),
        (["resume=True"], "resume=True is not a setting: use the option --resume"),
        (["+num_gpus=2"], "--num-gpus"),
    ],
)
def test_settings_with_dashes_and_options_without_them_are_told(
    given: list[str], told: str, monkeypatch: Any, capsys: Any
) -> None:
    tool = load_tool("train_net")
    monkeypatch.setattr("sys.argv", ["train_net.py", "--config-file", CONFIG, *given])
    if not told:
        assert tool.parse_arguments(tool.argument_parser()).opts == ["epochs=3"]
        return
    with pytest.raises(SystemExit):
        tool.parse_arguments(tool.argument_parser())
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("override", "is_refused"),
    [
        ("lr=0,1", True),
        ("block.size=3,5", True),
        ("block.size=(3,5)", False),
        ("steps=30,60", False),
        ("+new=0,1", False),
        ("lr=0.1", False),
    ],
)
def test_a_comma_in_the_place_of_a_point_is_refused(
    override: str, is_refused: bool
) -> None:
    tool = load_tool("train_net")
    cfg = ConfigDict(lr=0.1, block={"size": 3}, steps=[30])
    if is_refused:
        with pytest.raises(ValueError, match=f"{override}.*use a decimal point"):
            tool.refuse_commas(cfg, [override])
    else:
        tool.refuse_commas(cfg, [override])


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (["train.ema.decay=0.9"], True),
        (["train.amp.dtype=bfloat16"], True),
        (["train.ema.decay=0.9", "train.ema.enabled=true"], False),
        (["train.ema.enabled=false"], False),
        (["train.max_iter=1", "+train.ddp.x=1", "model.a=1"], False),
    ],
)
def test_a_setting_of_a_disabled_part_is_told(
    overrides: list[str], is_told: bool, caplog: Any
) -> None:
    tool = load_tool("train_net")
    cfg = ConfigDict(train=train_settings(), model={"a": 0})
    tool.warn_about_disabled_settings(
        LazyConfig.apply_overrides(cfg, overrides), overrides
    )
    assert ("has no effect without train." in caplog.text) is is_told


def test_an_argument_that_another_class_lacks_is_told_with_how_to_omit_it() -> None:
    tool = load_tool("train_net")
    with pytest.raises(TypeError) as error:
        torch.optim.AdamW([torch.zeros(1)], momentum=0.9)  # type: ignore[call-arg]
    hint = tool.in_short(error.value)
    assert "omit momentum" in hint
    change = re.search("optimizer={.*}", hint)
    assert change
    cfg = LazyConfig.load(CONFIG)
    LazyConfig.apply_overrides(cfg, [change[0]])
    built = build_optimizer(cfg, nn.Linear(1, 1))
    assert type(built.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("has_average", [True, False])
def test_an_evaluation_of_raw_weights_says_where_their_average_is(
    has_average: bool, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    tool = load_tool("train_net")
    model = nn.Linear(1, 1)
    trainer = SimpleTrainer(model, [], torch.optim.SGD(model.parameters(), lr=0.1))
    if has_average:
        trainer.register_hooks([hooks.EMA(model)])
    Checkpointer(model, tmp_path, trainer=trainer).save("model_0000001", iteration=1)
    monkeypatch.setattr(tool, "prepare_model", lambda cfg: (None, nn.Linear(1, 1)))
    monkeypatch.setattr(tool, "evaluate", lambda cfg, model: {})
    cfg = ConfigDict(train={"output_dir": str(tmp_path)})
    with caplog.at_level("INFO"):
        tool.evaluate_checkpoint(cfg, resume=True, best=False)
    assert ("checkpoint average" in caplog.text) is has_average


def test_a_misspelt_key_leaves_the_folder_of_an_earlier_run_where_it_is(
    tmp_path: Path,
) -> None:
    tool = load_tool("train_net")
    folder = tmp_path / "earlier"
    Checkpointer(model_of(1.0), folder).save("model_0000001", iteration=1)
    args = ["--config-file", CONFIG, HERE.format(folder), "+train.sede=1"]
    with pytest.raises(ValueError, match="seed"):
        tool.main(tool.argument_parser().parse_args(args))
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "model = torch.nn.Linear(2, 3)",
            r"^model must be a LazyCall, not Linear\(in_f.*: write model = LazyCall\(Linear\)",
        ),
        (
            "optimizer = torch.optim.AdamW",
            r"write optimizer = LazyCall\(AdamW\)\(\.\.\.\)$",
        ),
        (
            "optimizer = L(torch.optim.AdamW)",
            r"^optimizer = LazyCall\(AdamW\) lacks its arguments: write LazyCall\(AdamW\)\(",
        ),
        (
            "dataloader.evaluator = L('a.B')",
            r"^dataloader.evaluator = LazyCall\(a\.B\) lacks",
        ),
        ("hooks = [L(print)(), L(print)]", r"^hooks\.1 = LazyCall\(print\) lacks"),
        (
            "hooks = (L(print)(),)",
            r"^hooks must be a list, not \(\{'_target_': <built-in",
        ),
        ("dataloader = 'digits'", "^dataloader must be a dict, not 'digits'$"),
        ("lr_multiplier = max", "^lr_multiplier must be a LazyCall, not <[^>]*max>$"),
    ],
)
def test_an_object_in_the_place_of_a_call_is_refused_with_the_line_to_write(
    line: str, message: str, tmp_path: Path
) -> None:
    tool = load_tool("train_net")
    file = tmp_path / "config.py"
    file.write_text(
        "import torch\nfrom hooktrain.config import LazyCall as L, LazyConfig\n"
        f"globals().update(LazyConfig.load({CONFIG!r}))\n{line}\n"
    )
    args = ["--config-file", str(file), HERE.format(tmp_path / "new")]
    with pytest.raises(TypeError, match=message):
        tool.main(tool.argument_parser().parse_args(args))
    assert not (tmp_path / "new").exists()


def test_none_and_a_deleted_name_are_no_parts(tmp_path: Path) -> None:
    tool = load_tool("train_net")
    file = tmp_path / "config.py"
    file.write_text("model = 1\ndel model\nhooks = writers = None\ntrain = {}\n")
    tool.refuse_objects(str(file), LazyConfig.load(file))


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = load_tool("train_net")
    packages = ["torch>=2.10", 'pillow>=9.4; extra == "detection"']
    packages.append("pycocotools>=2.0.8; extra == 'detection'")
    monkeypatch.setattr(tool.metadata, "requires", lambda _: packages)

    def hint(module: str) -> str:
        error = ModuleNotFoundError(f"No module named {module!r}", name=module)
        return str(tool.in_short(error).partition("\n")[2])

    installs = "To install it: pip install 'hooktrain[detection]'"
    assert hint("pycocotools.mask") == hint("PIL.Image") == installs
    assert hint("torch") == hint("pycoco") == hint("mine") == ""
    monkeypatch.undo()
    assert hint("pycocotools") == installs


def test_an_empty_folder_has_nothing_to_evaluate(tmp_path: Path) -> None:
    tool = load_tool("train_net")
    initial = f"train.init_checkpoint={tmp_path / 'initial.pth'}"
    Checkpointer(model_of(1.0), tmp_path).save("initial")
    for more in ([], [initial]):
        args = ["--config-file", CONFIG, "--eval-only", "--resume", *more]
        args.append(HERE.format(tmp_path / "empty"))
        try:
            with pytest.raises(FileNotFoundError, match=f"'{tmp_path / 'empty'}'"):
                tool.main(tool.argument_parser().parse_args(args))
        finally:
            close_logger()


def test_the_configuration_is_printed_as_it_loads(tmp_path: Path) -> None:
    printed = tmp_path / "printed.json"
    printed.write_text(run(tmp_path / "out", "--print-config"))
    assert LazyConfig.load(printed).train.max_iter == 12
    assert not (tmp_path / "out").exists()


def test_the_saved_configuration_trains_the_same_network(tmp_path: Path) -> None:
    run(tmp_path / "first")
    saved = ["--config-file", str(tmp_path / "first" / "config.json")]
    override = f"train.output_dir={tmp_path / 'second'}"
    done = run_program(ROOT / "tools" / "train_net.py", *saved, override)
    assert done.returncode == 0, done.stdout
    assert_same_end(tmp_path / "first", tmp_path / "second")


def test_the_plain_script_resumes(tmp_path: Path) -> None:
    printed = run(tmp_path, script="plain_train_net.py")
    assert "copypaste: accuracy" in printed
    assert [line["iteration"] for line in rows(tmp_path)] == [3, 7, 11]
    run(tmp_path, "--resume", "train.max_iter=16", script="plain_train_net.py")
    assert [line["iteration"] for line in rows(tmp_path)] == [3, 7, 11, 15]


@pytest.fixture
def benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a script of tools/ in this process; what it starts are copies of the fork server."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(ROOT / "tools" / script), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: run_program(*command[1:])
    )
    return run


@pytest.mark.parametrize("what", ["step", "data"])
def test_the_benchmark_measures_a_pair(
    benchmark: Callable[..., str], what: str
) -> None:
    printed = benchmark("benchmark.py", what, "--pairs", "1", "--iterations", "21")
    assert "iter: 40" not in printed
    numbers = [float(line.split("|")[2]) for line in printed.splitlines()[-4:]]
    bare, ours, added, percent = numbers
    assert added == pytest.approx(ours - bare, abs=0.2)
    assert percent == pytest.approx(100 * added / bare, rel=0.01, abs=0.2)


def test_the_benchmark_of_strategies_runs_a_configuration_through_each(
    benchmark: Callable[..., str],
) -> None:
    small = ["--iterations", "4", "--config-file", CONFIG, "model.channels=2"]
    cases = [
        "--strategies",
        "SingleDeviceStrategy",
        "FSDPStrategy",
        "--precisions",
        "bfloat16",
    ]
    printed = benchmark("benchmark_strategies.py", *cases, "--compiled", "no", *small)
    rows = [
        [cell.strip() for cell in line.split("|")] for line in printed.splitlines()[-2:]
    ]
    assert [row[1] for row in rows] == ["SingleDeviceStrategy", "FSDPStrategy"]
    assert all(float(row[5]) > 0 for row in rows)
    assert rows[0][6] == rows[1][6] != "nan"
