"""What most scripts share, and the trainer that builds itself, also for models with a step."""

import fcntl
import json
import logging
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from equality import assert_equal, assert_same_end, final_checkpoint
from hooktrain.checkpoint import Checkpointer
from hooktrain.compat.detectron2 import PeriodicCheckpointer
from hooktrain.config import LazyCall, LazyConfig
from hooktrain.engine import (
    default_argument_parser,
    default_hooks,
    default_setup,
    default_writers,
    hooks,
    train_settings,
)
from hooktrain.events import CommonMetricPrinter, JSONWriter
from hooktrain.solver import (
    AmpOptimWrapper,
    ConstantParamScheduler,
    OptimWrapper,
    OptimWrapperDict,
)
from hooktrain.utils.logger import close_logger, setup_logger
from runs import build, last_results, train
from toys import linear_trainer

CONFIG = Path(__file__).parent.parent.parent / "configs" / "digits_cnn.py"


def config(folder: Path, *overrides: str) -> Any:
    small = [
        "train.max_iter=4",
        "train.log_period=2",
        "model.channels=2",
        "train.eval_period=2",
    ]
    cfg = LazyConfig.load(str(CONFIG))
    return LazyConfig.apply_overrides(
        cfg, [f"train.output_dir={folder}", *small, *overrides]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out"
    close_logger()


def test_the_arguments_are_those_that_scripts_expect() -> None:
    # In any order: what comes behind the changes of the configuration is not lost.
    args = default_argument_parser().parse_args(
        ["--config-file", "c.py", "a=1", "b=2", "--resume"]
    )
    assert vars(args) == {
        "config_file": "c.py",
        "resume": True,
        "eval_only": False,
        "num_gpus": 1,
        "num_machines": 1,
        "machine_rank": 0,
        "dist_url": "auto",
        "log_level": "normal",
        "opts": ["a=1", "b=2"],
    }


@pytest.mark.parametrize("level", ["normal", "debug"])
def test_setup_logs_into_the_folder_of_the_run(
    level: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(folder)
    default_setup(cfg, Namespace(log_level=level))
    log, printed = (folder / "log.txt").read_text(), capsys.readouterr().out
    saved = LazyConfig.load(str(folder / "config.json"))
    assert LazyConfig.to_json(saved) == LazyConfig.to_json(cfg)
    # What is long is in the file only.
    assert "PyTorch built with" in log
    assert ("PyTorch built with" in printed) == (level == "debug")


def test_a_configuration_with_a_lambda_trains(folder: Path) -> None:
    steps: list[int] = []
    cfg = config(folder)
    cfg.hooks = [
        LazyCall(hooks.CallbackHook)(after_step=lambda t: steps.append(t.iter))
    ]
    default_setup(cfg, Namespace())
    log = (folder / "log.txt").read_text()
    assert "WARNING: The saved config lacks hooks = " in log
    train(cfg, max_iter=2)
    assert steps == [0, 1]


def test_a_seed_below_zero_is_drawn_for_all_that_refers_to_it(folder: Path) -> None:
    cfg = config(folder, "train.seed=-1")
    default_setup(cfg, Namespace())
    saved = LazyConfig.load(folder / "config.json")
    assert saved.train.seed == cfg.train.seed >= 0
    assert saved.dataloader.train.seed == cfg.dataloader.train.seed == cfg.train.seed


def stop_at(count: int, trainer: Any) -> None:
    if trainer.iter + 1 == count:
        trainer.request_stop("to go on later")


def train_up_to(count: int, trainer: Any, cfg: Any) -> None:
    trainer.register_hooks([hooks.CallbackHook(after_step=partial(stop_at, count))])
    trainer.train(max_iter=cfg.train.max_iter)


def resume_up_to(count: int, cfg: Any) -> Any:
    """Go on with the run in the output folder until so many iterations are done."""
    trainer = build(cfg, resume=True)
    train_up_to(count, trainer, cfg)
    return trainer


@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_goes_on_with_the_seed_that_it_has_drawn(
    folder: Path, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(output: Path, seed: int | None, stop: int, **args: bool) -> Any:
        torch.manual_seed(stop)  # each process draws another seed
        cfg = config(output, f"train.seed={seed}")
        default_setup(cfg, Namespace(**args))
        return resume_up_to(stop, cfg)

    drawn = run(folder, None, 2).seed
    if restarted:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    resumed = run(folder, None, 4, resume=not restarted)
    whole = run(folder.with_name("whole"), drawn, 4)
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())
    assert LazyConfig.load(folder / "config.json").train.seed == drawn
    monkeypatch.undo()
    default_setup(new := config(folder, "train.seed=null"), Namespace(resume=False))
    assert new.train.seed != drawn


def test_the_id_of_a_run_is_drawn_and_kept_as_the_seed_is(folder: Path) -> None:
    def begin(output: Path, *overrides: str, stop: int = 2, resume: bool = True) -> str:
        cfg = config(output, *overrides)
        default_setup(cfg, Namespace(resume=resume))
        resume_up_to(stop, cfg)
        run_id: str = cfg.train.run_id
        assert LazyConfig.load(output / "config.json").train.run_id == run_id
        return run_id

    drawn = begin(folder)
    assert begin(folder, stop=3) == drawn
    assert begin(folder, "train.run_id=mine", stop=5) == "mine"
    assert begin(folder, resume=False) not in (drawn, "mine")


def start(folder: Path, *overrides: str, stop: int = 0, resume: bool = False) -> Any:
    """Start as train_net.py does, and train up to an iteration."""
    cfg = config(folder, "train.max_iter=6", "train.checkpointer.period=2", *overrides)
    default_setup(cfg, Namespace(resume=resume))
    trainer = build(cfg, resume)
    if stop:
        train_up_to(stop, trainer, cfg)
    return trainer


def test_a_folder_that_a_mistake_has_renamed_resumes_exactly(folder: Path) -> None:
    drawn = start(folder, "train.seed=null", stop=4).seed
    start(folder, "train.seed=null", stop=2)  # without --resume
    shutil.rmtree(folder)
    folder.with_name("out.1").rename(folder)
    start(folder, "train.seed=null", stop=6, resume=True)
    whole = folder.with_name("whole")
    start(whole, f"train.seed={drawn}", stop=6)
    assert_same_end(folder, whole)


def test_an_output_folder_of_the_home_folder_is_found_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    start(Path("~/out"), stop=6)
    assert {"log.txt", "config.json", "metrics.json", "model_final.pth"} <= {
        path.name for path in folder.iterdir()
    }
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("how", ["whole", "~", "linked"])
def test_a_second_stage_in_the_folder_of_its_initial_checkpoint_is_refused(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(folder, stop=6).model.state_dict()
    monkeypatch.setenv("HOME", str(folder.parent))
    (folder.parent / "link").symlink_to(folder)
    path = {"whole": folder, "~": "~/out", "linked": folder.parent / "link"}[how]
    stage = f"train.init_checkpoint={path}/model_final.pth"
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=r"model_final\.pth'.*another output folder"):
        start(folder, stage)
    assert sorted(folder.iterdir()) == before
    assert sorted(each.name for each in folder.parent.iterdir()) == ["link", "out"]
    # Elsewhere, and to go on here, the same path may be given.
    other = folder.parent / "second"
    assert_equal(start(other, stage).model.state_dict(), first)
    assert_equal(start(folder, stage, resume=True).model.state_dict(), first)


@pytest.mark.parametrize("content", [None, b"", b'{"train": {"se', b"\x00\xff", b"[]"])
def test_without_a_good_config_json_the_seed_of_the_run_has_to_be_given(
    content: bytes | None, folder: Path
) -> None:
    trainer = start(folder, "train.seed=null", "train.run_id=mine", stop=4)
    drawn = trainer.seed
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"seed={drawn}, but now seed="):
        start(folder, "train.seed=null", resume=True)
    again = start(folder, f"train.seed={drawn}", stop=6, resume=True)
    assert again.iter == 6
    assert LazyConfig.load(folder / "config.json").train.seed == drawn


def test_an_evaluation_needs_no_config_json(folder: Path) -> None:
    start(folder, "train.seed=null", stop=2)
    (folder / "config.json").unlink()
    default_setup(config(folder, "train.seed=null"), Namespace(eval_only=True))


def test_an_evaluation_of_a_folder_that_can_only_be_read_writes_no_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(folder, stop=2)
    close_logger()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    # As for another user; root may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: path != str(folder))
    default_setup(config(folder), Namespace(eval_only=True))
    logging.getLogger("hooktrain").warning("on the terminal")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("key", ["seed", "max_iter"])
def test_a_resume_executes_nothing_of_the_output_folder(key: str, folder: Path) -> None:
    start(folder, stop=2)
    call = {"_target_": "os.system", "_args_": [f"touch {folder / 'executed'}"]}
    crafted = json.loads((folder / "config.json").read_text())
    crafted["model"] = crafted["train"][key] = call
    (folder / "config.json").write_text(json.dumps(crafted))
    (folder / "config.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")
    with nullcontext() if key == "max_iter" else pytest.raises(TypeError):
        start(folder, "train.seed=null", stop=4, resume=True)
    assert not (folder / "executed").exists()


def test_a_resume_that_is_refused_leaves_the_configuration_as_it_was(
    folder: Path,
) -> None:
    drawn = start(folder, "train.seed=null", stop=2).seed
    with pytest.raises(ValueError, match="resume_parts"):
        start(folder, "train.seed=5", resume=True)
    trainer = start(folder, "train.seed=null", "train.log_period=1", resume=True)
    assert trainer.seed == drawn
    saved = LazyConfig.load(folder / "config.json").train
    assert (saved.seed, saved.log_period) == (drawn, 2)
    train_up_to(4, trainer, config(folder, "train.max_iter=6"))
    saved = LazyConfig.load(folder / "config.json").train
    assert (saved.seed, saved.log_period) == (drawn, 1)
    assert not [*folder.glob(".config.json*")]


def test_a_loop_of_ones_own_publishes_the_configuration_as_it_begins(
    folder: Path,
) -> None:
    default_setup(config(folder, "train.log_period=1"), Namespace())
    default_setup(config(folder, "train.log_period=2"), Namespace(resume=True))
    periodic = PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), folder), 10)
    assert LazyConfig.load(folder / "config.json").train.log_period == 1
    periodic.step(0)
    assert LazyConfig.load(folder / "config.json").train.log_period == 2


def test_a_restart_in_a_folder_with_a_checkpoint_reads_the_store_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(folder, "train.store=memory://bucket/run")
    train(cfg)
    reads = []
    read = MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", lambda *args: reads.append(args) or read(*args)
    )
    default_setup(cfg, Namespace(resume=True))
    build(cfg, resume=True)
    assert len(reads) == 1
    MemoryFileSystem.store.clear()


def test_setup_works_without_a_folder() -> None:
    try:
        default_setup({"train": {"seed": 3}}, {})
        assert torch.initial_seed() == 3
    finally:
        close_logger()


def test_setup_takes_a_plain_dict(folder: Path) -> None:
    try:
        default_setup({"train": {"seed": 3, "output_dir": str(folder)}}, {})
    finally:
        close_logger()
    assert json.loads((folder / "config.json").read_text())["train"]["seed"] == 3


def test_a_folder_in_use_by_another_run_is_refused(folder: Path) -> None:
    folder.mkdir()
    hold = "import sys; from hooktrain.utils.file_io import lock_folder as lock; "
    hold += "lock(sys.argv[1]); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RuntimeError, match="in use"):
            default_setup(config(folder), Namespace())
        # Looking at its checkpoints is no harm.
        default_setup(config(folder), Namespace(eval_only=True))
        other.kill()


def test_a_script_that_is_started_twice_leaves_the_first_ones_metrics(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.json"
    metrics.write_text('{"iteration": 19, "total_loss": 1.0}\n')
    trainer = linear_trainer()
    trainer.register_hooks(
        default_hooks(
            checkpointer=Checkpointer(trainer.model, tmp_path, trainer=trainer),
            checkpoint_period=100,
            writers=default_writers(str(tmp_path)),
        )
    )
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process does
        with pytest.raises(RuntimeError, match="in use"):
            trainer.train(max_iter=1)
    assert metrics.read_text() == '{"iteration": 19, "total_loss": 1.0}\n'


def test_an_output_folder_that_is_an_address_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = "s3://bucket/run"
    for begin in (
        lambda: default_setup({"train": {"output_dir": address}}, Namespace()),
        lambda: default_writers(address),
        lambda: setup_logger(address, name="test", configure_stdout=False),
        lambda: Checkpointer(nn.Linear(1, 1), address),
    ):
        with pytest.raises(ValueError, match=f"{address}.*train.store"):
            begin()
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_its_writer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooktrain.engine.defaults.find_spec", lambda name: None)
    kinds = [type(writer) for writer in default_writers(str(tmp_path))]
    assert kinds == [CommonMetricPrinter, JSONWriter]


def test_the_default_hooks_write_into_the_folder_of_the_checkpointer(
    tmp_path: Path,
) -> None:
    for folder, count in ((tmp_path, 3), ("", 0)):
        saver = Checkpointer(nn.Linear(1, 1), folder)
        made = default_hooks(checkpointer=saver, checkpoint_period=5)
        (writer,) = [each for each in made if isinstance(each, hooks.PeriodicWriter)]
        assert len(writer.writers) == count
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks(default_hooks(checkpointer=saver, checkpoint_period=5))
    trainer.train(max_iter=2)
    assert '"iteration": 1' in (tmp_path / "metrics.json").read_text()


def test_the_log_is_set_up_with_the_writers_unless_it_has_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("hooktrain.test")
    default_writers(str(tmp_path))  # pytest has set up the root logger
    assert not (tmp_path / "log.txt").exists()
    monkeypatch.setattr(logging.root, "handlers", [])
    try:
        default_writers(str(tmp_path))
        log.info("first")
        default_writers(str(tmp_path / "another"))
        log.info("second")
    finally:
        close_logger()
    assert capsys.readouterr().out.splitlines()[-1].endswith("second")
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 2
    assert not (tmp_path / "another").exists()


def test_the_default_hooks_evaluate_then_write_then_save(tmp_path: Path) -> None:
    made = default_hooks(
        scheduler=ConstantParamScheduler(1.0),
        checkpointer=Checkpointer(nn.Linear(1, 1), tmp_path),
        checkpoint_period=5,
        eval_function=dict,
        best_metric="accuracy",
        best_mode="max",
    )
    assert [type(hook) for hook in made] == [
        hooks.IterationTimer,
        hooks.LRScheduler,
        hooks.EvalHook,
        hooks.BestCheckpointer,
        hooks.PeriodicWriter,
        hooks.PeriodicCheckpointer,
        hooks.Preemption,
    ]


def test_a_script_keeps_as_many_checkpoints_as_a_configuration() -> None:
    saver = Checkpointer(nn.Linear(1, 1))
    made = default_hooks(checkpointer=saver, checkpoint_period=5)
    kept = [hook.max_to_keep for hook in made if hasattr(hook, "max_to_keep")]
    assert kept == [train_settings()["checkpointer"]["max_to_keep"]] == [3]


@pytest.mark.parametrize("lacking", ["test", "evaluator"])
def test_without_test_data_or_an_evaluator_nothing_is_evaluated(
    lacking: str, folder: Path
) -> None:
    cfg = config(folder)
    del cfg.lr_multiplier, cfg.dataloader[lacking]
    trainer = train(cfg)
    assert last_results(trainer) == {}
    rates = [rate for rate, _ in trainer.storage.history("lr").values()]
    assert rates == [cfg.optimizer.lr] * 4


def test_the_writers_of_the_configuration_write_too(folder: Path) -> None:
    cfg = config(folder)
    cfg.writers = [LazyCall(JSONWriter)(folder / "mine.json", window_size=1)]
    train(cfg)
    assert '"iteration": 3' in (folder / "mine.json").read_text()


def test_the_state_is_in_the_checkpoint_once(folder: Path) -> None:
    cfg = config(folder)
    train(cfg, max_iter=1)
    file = final_checkpoint(folder)
    assert set(file) == {"model", "trainer", "iteration"}
    parts = {"iteration", "optimizer", "hooks", "storage", "data", "seed", "meta"}
    assert set(file["trainer"]) == parts
    assert "DigitsCNN" in file["trainer"]["meta"]["config"]
    assert "model" not in cfg.optimizer.params


def test_a_configuration_may_count_in_epochs(folder: Path) -> None:
    # 1437 digits are 12 batches of 128.
    epochs = [
        "train.max_iter=none",
        "train.max_epochs=1.5",
        "train.eval_period=1 epoch",
    ]
    others = [
        "dataloader.train.total_batch_size=128",
        "train.checkpointer.period=${train.max_iter}",
    ]
    cfg = config(folder, *epochs, *others)
    trainer = train(cfg)
    assert trainer.iter == cfg.train.checkpointer.period == 18
    history = trainer.storage.history("classification/accuracy").values()
    assert [iteration for _, iteration in history] == [11, 17]


def test_the_optimizer_wrapper_is_built_of_the_configuration(folder: Path) -> None:
    more = ["train.amp.enabled=true", "train.amp.dtype=bfloat16"]
    more += ["train.accumulative_counts=2"]
    trainer = build(config(folder, *more, "train.clip_grad={'max_norm': 1.0}"))
    assert isinstance(trainer.optim_wrapper, AmpOptimWrapper)
    assert trainer.optim_wrapper.dtype == torch.bfloat16
    trainer.train(max_iter=2)
    assert trainer.data_loader.batches == 4  # type: ignore[attr-defined]
    assert "grad_norm" in trainer.storage.latest()


def test_parts_of_a_checkpoint_can_be_resumed(folder: Path) -> None:
    train(config(folder))
    parts = "train.resume_parts=['model', 'trainer.optimizer']"
    trainer = build(config(folder, parts, "optimizer.lr=0.5"), resume=True)
    assert trainer.state_dict()["iteration"] == -1
    assert len(trainer.optimizer.state_dict()["state"]) > 0


def test_another_seed_on_a_resume_is_refused_with_both(folder: Path) -> None:
    train(config(folder))
    trainer = build(config(folder, "train.seed=2"))
    with pytest.raises(ValueError, match=r"seed=1.*seed=2"):
        trainer.checkpointer.resume_or_load("", resume=True)
    assert trainer.state_dict()["iteration"] == -1
    assert trainer.optimizer.state_dict()["state"] == {}


def gan(folder: Path, *overrides: str) -> Any:
    small = ["model.hidden_size=8", "dataloader.test.dataset.count=20"]
    quick = [
        "+dataloader.evaluator.classifier.epochs=1",
        "dataloader.evaluator.real=null",
    ]
    cfg = LazyConfig.load(str(CONFIG.with_name("digits_gan.py")))
    run = [f"train.output_dir={folder}", "train.max_iter=3", "train.log_period=2"]
    return LazyConfig.apply_overrides(cfg, [*run, *small, *quick, *overrides])


def test_several_optimizers_come_from_the_configuration(folder: Path) -> None:
    faster = ["optimizer.generator.lr=9.0", "optimizer.discriminator.lr=4.5"]
    amp = ["train.amp.enabled=true", "train.amp.dtype=bfloat16"]
    constant = ["lr_multiplier.discriminator.end_value=1.0"]
    cfg = gan(folder, *amp, *faster, *constant)
    trainer = build(cfg)
    wrappers = trainer.optim_wrapper
    assert isinstance(wrappers, OptimWrapperDict)
    for name, wrapper in wrappers.items():
        assert isinstance(wrapper, AmpOptimWrapper)
        (group,) = wrapper.param_groups
        part = trainer.model.get_submodule(name)
        assert set(group["params"]) == set(part.parameters())
    assert "model" not in cfg.optimizer  # it stays plain data
    trainer.train(max_iter=3)
    assert [w.inner_count for w in wrappers.values()] == [3, 6]
    rates = {
        n: [v for v, _ in trainer.storage.history(f"{n}.lr").values()] for n in wrappers
    }
    assert rates["generator"] == pytest.approx([9.0, 6.0, 3.0])
    assert rates["discriminator"] == [4.5, 4.5, 4.5]
    assert {"loss_generator", "loss_discriminator"} <= set(trainer.storage.latest())


def test_hooks_of_the_configuration_run_right_before_the_evaluation(
    folder: Path,
) -> None:
    cfg = gan(folder)
    trainer = build(cfg)
    names = [type(hook).__name__ for hook in trainer.hooks]
    assert names.index("LRScheduler") < names.index("EMA") < names.index("SampleWriter")
    assert names.index("SampleWriter") < names.index("EvalHook")
    trainer.train(max_iter=cfg.train.max_iter)
    assert list((folder / "samples").glob("*.png"))


def mixed(model: nn.Module) -> dict[str, OptimWrapper]:
    """The generator in float16, and the discriminator with gradient accumulation."""
    generator, discriminator = (
        torch.optim.Adam(model.get_submodule(name).parameters(), lr=7e-4)
        for name in ("generator", "discriminator")
    )
    return {
        "generator": AmpOptimWrapper(generator, "float16"),
        "discriminator": OptimWrapper(discriminator, accumulative_counts=4),
    }


def test_the_gan_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    more = [f"train.{key}" for key in ("max_iter=6", "eval_period=2")]
    more.append("train.checkpointer.period=2")
    for output, stops in ((tmp_path / "whole", [6]), (folder, [2, 4, 6])):
        for stop in stops:
            cfg = gan(output, *more)
            cfg.optimizer = LazyCall(mixed)()
            resume_up_to(stop, cfg)
    assert_same_end(folder, tmp_path / "whole")
    saved = final_checkpoint(folder)["trainer"]["optimizer"]
    assert saved["discriminator"]["inner_count"] == 12


def test_a_tree_without_the_settings_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="train"):
        default_setup({"OUTPUT_DIR": str(tmp_path)}, Namespace())
