"""Runs whose machine is lost: the same command goes on from the store, in an empty folder."""

import json
import os
import shutil
import signal
import traceback
from pathlib import Path
from typing import Any

import fsspec
import pytest
from loading import load_tool

from equality import assert_same_end
from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.store import Store
from hooktrain.config import LazyConfig, instantiate
from hooktrain.data import build_train_loader
from hooktrain.engine import (
    HookBase,
    SimpleTrainer,
    build_trainer,
    default_hooks,
    default_writers,
)
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hooktrain.events import CommonMetricPrinter, JSONWriter, TensorboardXWriter
from hooktrain.utils.logger import close_logger
from processes import end, start
from s3 import s3_server
from toys import LinearLoss, batches, sgd

CONFIG = str(Path(__file__).parent.parent.parent / "configs" / "digits_cnn.py")
SETTINGS = [
    "train.max_iter=24",
    "train.checkpointer.period=5",
    "train.eval_period=8",
    "train.log_period=3",
    "model.channels=2",
    "model.dropout=0.5",
    "dataloader.train.total_batch_size=16",
]


class Kill(HookBase):
    """Kills the process when the upload of an iteration is there, and not sooner."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_step(self) -> None:
        if self.trainer.iter == self.iteration:
            self.trainer.checkpointer.give_up()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kill_at: int, *extra: str) -> None:
    """Run tools/train_net.py --resume in this process, which may kill itself."""
    train_net = load_tool("train_net")

    def build(cfg: Any) -> Any:
        trainer = build_trainer(cfg)
        trainer.register_hooks([Kill(kill_at)])
        return trainer

    train_net.build_trainer = build
    options = ["--resume", "--config-file", CONFIG, f"train.output_dir={folder}"]
    train_net.main(
        train_net.argument_parser().parse_args([*options, *SETTINGS, *extra])
    )


def run(folder: Path, *extra: str, kill_at: int = -1) -> None:
    code = end(start(train, folder, kill_at, *extra))
    assert code == (0 if kill_at < 0 else -signal.SIGKILL)


def assert_same_run(folder: Path, other: Path) -> None:
    """Two runs have the same end, and the same best model in their records."""
    assert_same_end(folder, other)
    of_one, of_other = (
        read_checkpoint(str(each / "model_best.pth"))["best"]
        for each in (folder, other)
    )
    assert of_one == of_other


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_whose_folder_is_lost_twice_ends_as_an_undisturbed_one(
    background: str, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    store = (
        f"train.store=file://{tmp_path}/store",
        f"train.checkpointer.background={background}",
    )
    run(tmp_path / "lost", *store, "train.seed=null", kill_at=11)
    seed = read_checkpoint(str(tmp_path / "lost" / "model_0000009.pth"))["trainer"][
        "seed"
    ]
    shutil.rmtree(tmp_path / "lost")
    run(tmp_path / "lost", *store, "train.seed=null", kill_at=20)
    shutil.rmtree(tmp_path / "lost")
    run(tmp_path / "lost", *store, "train.seed=null")
    run(tmp_path / "undisturbed", f"train.seed={seed}")
    assert_same_run(tmp_path / "lost", tmp_path / "undisturbed")
    # At its end all of it is in the store.
    shutil.rmtree(tmp_path / "lost")
    next(Store(f"file://{tmp_path}/store", tmp_path / "lost").names_to_resume([]))
    assert_same_run(tmp_path / "lost", tmp_path / "undisturbed")
    assert len(list((tmp_path / "lost").glob("events.out.tfevents.*"))) >= 2


@pytest.mark.parametrize(
    ("how", "fetched"),
    [
        ("--resume", True),
        ("--best", True),
        ("train.init_checkpoint={}/first/model_best.pth", False),
    ],
)
def test_an_evaluation_in_an_empty_folder_fetches_the_run(
    how: str, fetched: bool, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}/store"
    model = instantiate(LazyConfig.load(CONFIG).model)
    first = Checkpointer(model, tmp_path / "first", store=store)
    first.run_files = lambda: [tmp_path / "first" / "model_best.pth"]
    best = {"metric": "a", "best_metric": 1, "best_iter": 4}
    first.save("model_best", tag=False, best=best)
    first.save("model_0000009", iteration=9)
    first.finish()
    train_net = load_tool("train_net")

    def evaluate(folder: str) -> Any:
        options = ["--eval-only", "--config-file", CONFIG, how.format(tmp_path)]
        settings = [f"train.output_dir={tmp_path}/{folder}", f"train.store={store}"]
        parser = train_net.argument_parser()
        return train_net.main(parser.parse_intermixed_args([*options, *settings]))

    try:
        assert evaluate("second") == evaluate("first")
    finally:
        close_logger()
    assert (tmp_path / "second" / "model_0000009.pth").exists() == fetched
    assert not list(tmp_path.glob("store/pointer-00000002*"))


class Notes(HookBase):
    """Has a file of its own, which goes on elsewhere."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_step(self) -> None:
        self._path.write_text(str(self.trainer.iter))

    def run_files(self) -> list[Path]:
        return [self._path]


@pytest.mark.parametrize("shards", [False, True], ids=["file", "folder"])
def test_the_files_that_hooks_and_writers_name_go_to_the_store(
    shards: bool, tmp_path: Path
) -> None:
    folder, store = tmp_path / "a", f"file://{tmp_path}/store"
    model = LinearLoss()
    trainer = SimpleTrainer(model, batches(6)[0], sgd(model))
    saver = Checkpointer(model, folder, store=store, sharded=shards, trainer=trainer)
    writers = [
        JSONWriter(folder / "val" / "metrics.json"),
        JSONWriter(folder / "rows.json"),
        JSONWriter(tmp_path / "elsewhere.json"),
        TensorboardXWriter(folder / "a" / "b"),
        CommonMetricPrinter(2),
    ]
    trainer.register_hooks(
        [
            EvalHook(2, lambda: {"score": float(trainer.iter)}),
            BestCheckpointer(saver, "score", "max", "best_score"),
            PeriodicCheckpointer(saver, 2),
            PeriodicWriter(writers, 1),
            Notes(folder / "notes"),
        ]
    )
    (folder / "val").mkdir(parents=True)
    for name in ("config.json", "log.txt", "val/mine.txt"):
        (folder / name).write_text("{}")
    trainer.train(max_iter=2)
    next(Store(store, tmp_path / "b").names_to_resume([]))
    there = set()
    for path in filter(Path.is_file, (tmp_path / "b").rglob("*")):
        place = path.relative_to(tmp_path / "b")
        in_checkpoint = place.parts[0] in ("best_score", "model_final")
        there.add(place.parts[0] if in_checkpoint else place.as_posix())
    (event,) = (tmp_path / "b" / "a" / "b").glob("events.out.tfevents.*")
    end = "" if shards else ".pth"
    assert there == {
        *["config.json", "rows.json", "val/metrics.json", "notes"],
        *[f"a/b/{event.name}", f"best_score{end}", f"model_final{end}"],
        *["last_checkpoint", ".last_iteration"],
    }


def small_run(folder: Path, store: str) -> None:
    """Six iterations with three checkpoints and a best model. Each upload is waited for."""
    model = LinearLoss()
    loader = build_train_loader(batches(6)[0], total_batch_size=3, seed=3)
    trainer = SimpleTrainer(model, loader, sgd(model))
    trainer.seed = 3
    checkpointer = Checkpointer(model, folder, store=store, trainer=trainer)
    made = default_hooks(
        checkpointer=checkpointer,
        checkpoint_period=2,
        eval_function=lambda: {"score": float(trainer.iter)},
        eval_period=3,
        best_metric="score",
        best_mode="max",
        writers=default_writers(str(folder))[1:2],
        log_period=1,
    )
    trainer.register_hooks(made)
    wait = CallbackHook(after_step=lambda _: checkpointer.give_up())
    trainer.register_hooks([wait])
    checkpointer.resume_or_load("")
    trainer.train(max_iter=6)


def kill_at_request(number: int) -> None:
    """Kill this process when a request was answered by the server, and nobody has read it."""
    from aiobotocore.httpsession import AIOHTTPSession

    send = AIOHTTPSession.send
    left = number

    async def counted(session: Any, request: Any) -> Any:
        nonlocal left
        answer = await send(session, request)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    AIOHTTPSession.send = counted


def forked(folder: Path, store: str, kill_at: int = 0) -> bool:
    """Whether a run in a copy of this process came to its end."""
    process = os.fork()
    if process == 0:
        kill_at_request(kill_at)
        try:
            small_run(folder, store)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def lose_machines(folder: Path, environment: dict[str, str]) -> None:
    """Kill a run at each of its requests, and go on elsewhere twice."""
    import s3fs  # noqa: F401 - it takes long, and the copies have it

    os.environ.update(environment)
    assert forked(folder / "undisturbed", f"file://{folder}/disk")
    number = 0
    came_to_its_end = False
    while not came_to_its_end:
        number += 1
        store = f"s3://bucket/run-{number}"
        came_to_its_end = forked(folder / "first", store, number)
        shutil.rmtree(folder / "first", ignore_errors=True)
        if number % 3 == 0:
            forked(folder / "second", store, 6 + number // 3)
            shutil.rmtree(folder / "second", ignore_errors=True)
        assert forked(folder / "last", store)
        assert_same_run(folder / "last", folder / "undisturbed")
        shutil.rmtree(folder / "last")
        (folder / "killed").write_text(str(number))


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_at_any_request_goes_on_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with s3_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3")
        system.mkdir("bucket")
        code = end(start(lose_machines, tmp_path, environment), limit_seconds=500)
        assert code == 0
        assert int((tmp_path / "killed").read_text()) > 25
        # Nothing else is left there than what the pointer names.
        for run in system.ls("bucket"):
            there = {Path(path).name for path in system.ls(run)}
            (pointer,) = system.glob(f"{run}/pointer-*")
            checkpoints = json.loads(system.cat_file(pointer))
            parts = [each["files"].values() for each in checkpoints]
            assert sum(each["iteration"] >= 0 for each in checkpoints) == 2
            assert there == {Path(pointer).name}.union(*parts)
