"""Saving and loading by one process, files and folders, in the foreground and background."""

import argparse
import copy
import errno
import logging
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from equality import assert_equal
from faults import full_disk
from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    checkpointer,
    checkpointer as checkpointer_module,
    folders,
    load_file,
    load_model_state,
)
from hooktrain.checkpoint.files import save_file, write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.compat.detectron2 import PeriodicCheckpointer
from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA, PeriodicCheckpointer as Saving
from hooktrain.model.sharding import shard_model
from hooktrain.model.wrappers import SeparateDistributedDataParallel, unwrap_model
from hooktrain.strategy import (
    BaseStrategy,
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)
from hooktrain.utils import comm
from hooktrain.utils.file_io import is_disk_full, sweep
from hooktrain.utils.tensors import full_tensors
from processes import CONTEXT
from sharding_toys import batches, make_model, make_sharded, make_wrapper, own_part
from toys import Counter, model_of

LIMIT = 20.0
BROKEN = OSError(errno.EIO, "the disk failed")


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def shards(request: pytest.FixtureRequest) -> bool:
    """Whether folders are saved."""
    return bool(request.param)


@contextmanager
def writing_by(write: Callable[..., None]) -> Iterator[None]:
    """What writes all of a file, or a part of each folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer_module, "write_file", write)
        patch.setattr(folders, "write_file", write)
        yield


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Writing goes on when it is set."""
    event = threading.Event()

    def wait_and_save(*args: Any) -> None:
        assert event.wait(LIMIT)
        write_file(*args)

    with writing_by(wait_and_save):
        yield event


def failing(error: Exception) -> Callable[..., None]:
    """A write that fails once."""
    errors = [error]

    def save(*args: Any) -> None:
        if errors:
            raise errors.pop()
        write_file(*args)

    return save


def names(folder: Path) -> list[str]:
    found = (path.name.removesuffix(".pth") for path in folder.iterdir())
    return sorted(name for name in found if not name.startswith("."))


def pointer(folder: Path) -> str:
    return (folder / "last_checkpoint").read_text().removesuffix(".pth")


def checkpoint(folder: Path, name: str, shards: bool) -> Any:
    return read_checkpoint(str(folder / (name if shards else f"{name}.pth")))


def test_a_save_comes_back_from_files_as_in_detectron2(tmp_path: Path) -> None:
    saved = model_of(3)
    checkpointer = Checkpointer(saved, tmp_path, trainer=Counter(5))
    checkpointer.save("a", iteration=9, note=[1, "x"])
    assert names(tmp_path) == ["a", "last_checkpoint"]
    assert (tmp_path / "last_checkpoint").read_text() == "a.pth"
    state = torch.load(tmp_path / "a.pth", weights_only=True)
    assert list(state) == ["model", "trainer", "iteration", "note"]
    assert torch.equal(state["model"]["weight"], saved.weight)
    model, trainer = model_of(0), Counter()
    rest = Checkpointer(model, trainer=trainer).load(tmp_path / "a.pth")
    assert torch.equal(model.weight, saved.weight)
    assert (trainer.value, trainer.loaded) == (5, {"value", "optimizer"})
    assert rest == {"iteration": 9, "note": [1, "x"]}


def test_without_a_folder_nothing_is_saved(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer(model_of(0), "")
    checkpointer.save("b")
    assert os.listdir() == []
    assert "save_dir is empty" in caplog.text
    assert not checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() == ""
    assert checkpointer.resume_or_load("") == {}


def test_weights_to_begin_with_are_told_where_a_run_is_resumed_instead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = Checkpointer(model_of(1), tmp_path / "other")
    other.save("model_final")
    weights = tmp_path / "other" / "model_final.pth"
    model = model_of(3)
    saver = Checkpointer(model, tmp_path / "run")
    saver.resume_or_load(weights)
    assert torch.equal(model.weight, model_of(1).weight)
    assert "is not loaded" not in caplog.text
    saver.save("model_0000009", iteration=9)
    caplog.clear()
    assert saver.resume_or_load(weights) == {"iteration": 9}
    assert f"{weights} is not loaded" in caplog.text
    caplog.clear()
    saver.resume_or_load()
    assert "is not loaded" not in caplog.text


@pytest.mark.parametrize("name", ["", ".a", "sub/model", "../model"])
def test_a_name_with_a_folder_or_a_hidden_one_is_refused(
    name: str, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path)
    with pytest.raises(ValueError, match=f"'{name}'"):
        checkpointer.save(name)
    with pytest.raises(ValueError, match=f"'{name}'"):
        PeriodicCheckpointer(checkpointer, 1, file_prefix=name)


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    extra = {"lr": [np.float64(0.5)], "flag": np.bool_(True)}
    Checkpointer(model_of(3), tmp_path, trainer=Counter(np.int64(5))).save("a", **extra)
    loaded = load_file(tmp_path / "a.pth")
    assert_equal(loaded["trainer"], {"value": 5, "optimizer": 7})
    assert_equal([loaded["lr"], loaded["flag"]], [[0.5], True])


def test_extra_entries_do_not_replace_states(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path, trainer=Counter())
    for taken in ("model", "trainer"):
        with pytest.raises(TypeError, match=f"'{taken}'"):
            checkpointer.save("a", **{taken: 1}, iteration=3)


@pytest.mark.parametrize("background", [False, True])
def test_a_state_that_cannot_come_back_is_refused_by_its_key(
    background: bool, shards: bool, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(
        model_of(3), tmp_path, sharded=shards, background=background
    )
    with pytest.raises(TypeError, match="args"):
        checkpointer.save("a", iteration=2, args=argparse.Namespace())
    assert names(tmp_path) == []


def test_a_save_without_tag_leaves_the_resume_point(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model_of(3), tmp_path / "out")
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.save("model_best", tag=False, iteration=4)
    assert checkpointer.resume_or_load("") == {"iteration": 9}
    checkpointer.tag_last_checkpoint("model_best.pth")
    assert checkpointer.resume_or_load("") == {"iteration": 4}


@pytest.mark.parametrize("first", [0, 5])
def test_a_run_from_the_beginning_is_warned_of_what_it_overwrites(
    first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Checkpointer(model_of(3), tmp_path).save("model_0000004")
    periodic = PeriodicCheckpointer(Checkpointer(model_of(3), tmp_path), 10)
    for iteration in range(first, 8):
        periodic.step(iteration)
    assert caplog.text.count("['model_0000004.pth']") == (first == 0)


class Strict(Counter):
    """Takes its own value only, and says so beforehand."""

    def check_state_dict(self, state: dict[str, int]) -> None:
        if state["value"] != self.value:
            raise ValueError(f"value must be {self.value!r}, got {state['value']!r}")


def refused_on_rank_1(folder: Path) -> Any:
    model, first = model_of(0), Counter(1)
    second = Strict(6 if torch.distributed.get_rank() else 5)
    checkpointer = Checkpointer(model, folder, first=first, second=second)
    with pytest.raises(ValueError, match="value must be 6, got 5"):
        checkpointer.resume_or_load("")
    checkpointer.model = nn.Linear(3, 1)
    second.value = 5
    with pytest.raises(ValueError, match="another model"):
        checkpointer.resume_or_load("")
    return model.weight[0, 0].item(), first.value


def test_nothing_is_loaded_on_any_rank_if_one_refuses(tmp_path: Path) -> None:
    saver = Checkpointer(model_of(3), tmp_path, first=Counter(2), second=Counter(5))
    saver.save("a", iteration=9)
    assert run_ranks(refused_on_rank_1, 2, tmp_path) == [(0.0, 1)] * 2


def test_a_resume_refuses_another_model_whose_weights_can_be_loaded(
    shards: bool, tmp_path: Path
) -> None:
    saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    Checkpointer(saved, tmp_path, sharded=shards, trainer=Counter(5)).save("a")
    model, trainer = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), Counter(1)
    first = model[0].weight.tolist()
    checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
    with pytest.raises(ValueError, match=r"1\.weight"):
        checkpointer.resume_or_load("")
    assert (model[0].weight.tolist(), trainer.value) == (first, 1)
    checkpointer.load(checkpointer.get_checkpoint_file(), checkpointables=[])
    assert torch.equal(model[0].weight, saved[0].weight)


class Batchwise(nn.Module):
    """Keeps a tensor that its state has under one name, or renamed under another."""

    def __init__(self, name: str, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2) if norm else nn.Identity()
        setattr(self, name, nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("now", "names"),
    [
        (Batchwise("renamed"), ["renamed.weight", "head.bias"]),
        (Batchwise("head", norm=False), ["norm.running_mean"]),
        (nn.Sequential(nn.BatchNorm1d(2)), ["0.running_var"]),
    ],
)
def test_a_resume_refuses_names_that_are_missing_or_unexpected(
    now: nn.Module, names: list[str], shards: bool, tmp_path: Path
) -> None:
    saved = Batchwise("head")
    Checkpointer(saved, tmp_path, sharded=shards, trainer=Counter(5)).save("a")
    before, trainer = copy.deepcopy(dict(now.state_dict())), Counter(1)
    checkpointer = Checkpointer(now, tmp_path, trainer=trainer)
    with pytest.raises(ValueError, match=r"strict=False|revise_keys=") as caught:
        checkpointer.resume_or_load("")
    assert [name for name in names if f"'{name}'" not in str(caught.value)] == []
    assert_equal(dict(now.state_dict()), before)
    assert trainer.value == 1


def test_a_checkpoint_that_is_partial_on_purpose_is_resumed(
    shards: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Adapters(Checkpointer):
        """Saves the head alone."""

        def content(self, extra: dict[str, Any]) -> dict[str, Any]:
            content = super().content(extra)
            content["model"] = {"head.bias": content["model"]["head.bias"]}
            return content

    Adapters(Batchwise("head"), tmp_path, sharded=shards, trainer=Counter(5)).save("a")
    trainer = Counter()
    checkpointer = Checkpointer(Batchwise("head"), tmp_path, trainer=trainer)
    with pytest.raises(ValueError, match=r"'head\.weight'"):
        checkpointer.resume_or_load("")
    checkpointer.resume_or_load("", strict=False)
    assert trainer.value == 5
    assert "'head.weight'" in caplog.text


class Adapted(nn.Module):
    """A pretrained layer that is frozen, with a norm, and an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.base(x) + self.adapter(x)).square().mean()


def leave_out_frozen(model: nn.Module) -> None:
    """As docs/guide/fine-tuning.md does."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = [name for name, parameter in named if not parameter.requires_grad]

    def leave_out(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in frozen:
            del state[prefix + name]

    model.register_state_dict_post_hook(leave_out)


def adapted() -> Adapted:
    """A model whose state has no frozen parameters."""
    model = Adapted()
    leave_out_frozen(model)
    return model


def adapted_run(
    folder: Path, end: int, strategy: BaseStrategy | None = None, **options: Any
) -> Any:
    """Go on with a run of `Adapted` up to an iteration."""
    strategy = strategy or SingleDeviceStrategy(device="cpu", seed=0)
    model = strategy.prepare(adapted)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, build_train_loader(DATA, **LOADING), optimizer)
    saver = Checkpointer(model, folder, trainer=trainer, **options)
    trainer.register_hooks([EMA(model, 0.5), Saving(saver, 2)])
    saver.resume_or_load()
    trainer.train(max_iter=end)
    return trainer


def result(trainer: Any) -> Any:
    """Whole parameters, those of the average, statistics, and the losses of a run."""
    (ema,) = (hook for hook in trainer.hooks if isinstance(hook, EMA))
    tensors = {}
    for module in (unwrap_model(trainer.model), ema.average):
        named = (*module.named_parameters(), *module.named_buffers())
        tensors[type(module).__name__] = dict(named)
    losses = trainer.storage.history("total_loss").values()
    return full_tensors(tensors), losses


DATA = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
LOADING: Any = {"total_batch_size": 8, "seed": 0}


STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
ADAPTER = {f"adapter.{n}.{name}" for n in (0, 1) for name in ("weight", "bias")}


def test_a_run_that_leaves_out_frozen_parameters_goes_on_exactly(
    shards: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = adapted_run(tmp_path / "whole", 8, sharded=shards)
    for end in (3, 5, 8):
        parts = adapted_run(tmp_path / "parts", end, sharded=shards)
    assert_equal(result(parts), result(whole))
    saved = checkpoint(tmp_path / "parts", "model_final", shards)
    assert saved["model"].keys() == ADAPTER | STATISTICS
    average = {f"module.{name}" for name in ADAPTER | STATISTICS}
    assert saved["trainer"]["hooks"]["EMA"].keys() == average | {"steps"}
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []


def go_on_adapted(kind: type[BaseStrategy], folder: Path, sharded: bool) -> Any:
    def run(name: str, end: int) -> Any:
        strategy = kind(device="cpu", seed=0)
        return adapted_run(folder / name, end, strategy, sharded=sharded)

    whole = result(run("whole", 6))
    for end in (3, 6):
        parts = result(run("parts", end))
    return whole, parts


@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy])
def test_ranks_that_leave_out_frozen_parameters_go_on_exactly(
    kind: type[BaseStrategy], shards: bool, tmp_path: Path
) -> None:
    (whole, parts), _ = run_ranks(go_on_adapted, 2, kind, tmp_path, shards)
    assert_equal(parts, whole)
    saved = checkpoint(tmp_path / "parts", "model_final", shards)
    assert saved["model"].keys() == ADAPTER | STATISTICS
    assert not torch.equal(
        saved["model"]["adapter.0.weight"], Adapted().adapter[0].weight
    )


def test_a_resume_without_frozen_parameters_refuses_what_else_is_missing(
    shards: bool, tmp_path: Path
) -> None:
    adapted_run(tmp_path, 2, sharded=shards)
    model = adapted()
    model.more = nn.Linear(4, 4)
    lacking = Checkpointer(model, tmp_path)
    with pytest.raises(ValueError, match=r"\['more\.weight', 'more\.bias'\]"):
        lacking.resume_or_load()
    other = Adapted()
    del other.norm
    leave_out_frozen(other)
    with pytest.raises(ValueError, match=r"unexpected_keys: \['norm\.running_mean'"):
        Checkpointer(other, tmp_path).resume_or_load()
    with pytest.raises(
        ValueError, match=r"'base\.weight', 'base\.bias', 'norm\.weight"
    ):
        Checkpointer(Adapted(), tmp_path).resume_or_load()


def swapped(model: nn.Module) -> None:
    """Average the weights, and look at the average."""
    ema = EMA(model, 0.5)
    nn.init.ones_(next(ema.average.parameters()))
    with ema.swap():
        assert model.state_dict()


def warnings_of_resumed(
    kind: type[BaseStrategy], folder: Path, change: Callable[[nn.Module], object]
) -> list[list[str]]:
    """The warnings of a new run and of two resumed ones whose models were changed at last."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    of_runs = []
    for end in (2, 4, 6):
        told.clear()
        model = kind(device="cpu", seed=0).prepare(lambda: nn.Sequential(Adapted()))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        trainer = SimpleTrainer(model, build_train_loader(DATA, **LOADING), optimizer)
        saver = Checkpointer(model, folder, trainer=trainer)
        trainer.register_hooks([Saving(saver, 2)])
        saver.resume_or_load()
        change(unwrap_model(model))
        trainer.train(max_iter=end - 1)
        trainer.train(max_iter=end)
        of_runs.append([text for text in told if "weights have changed" in text])
    logging.getLogger("hooktrain").removeHandler(handler)
    return of_runs


def initialised(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.ones_(parameter)


def pretrained(model: nn.Module) -> None:
    model.load_state_dict(nn.Sequential(Adapted()).state_dict())


@pytest.mark.parametrize("change", [initialised, pretrained])
def test_weights_that_are_replaced_after_a_resume_are_told_once(
    change: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    new, *resumed = warnings_of_resumed(SingleDeviceStrategy, tmp_path, change)
    assert new == []
    for told in resumed:
        (text,) = told
        assert "before resume_or_load()" in text


def moved(model: nn.Module) -> None:
    model.double().float()


def unfrozen(model: nn.Module) -> None:
    model.requires_grad_(True)


@pytest.mark.parametrize("change", [swapped, moved, unfrozen])
def test_the_same_weights_after_a_resume_are_not_told(
    change: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    told = warnings_of_resumed(SingleDeviceStrategy, tmp_path, change)
    assert told == [[], [], []]


@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy])
def test_weights_of_ranks_that_are_replaced_after_a_resume_are_told(
    kind: type[BaseStrategy], tmp_path: Path
) -> None:
    for change, counts in ((id, [0, 0, 0]), (initialised, [0, 1, 1])):
        folder = tmp_path / change.__name__
        for told in run_ranks(warnings_of_resumed, 2, kind, folder, change):
            assert list(map(len, told)) == counts


def test_a_checkpoint_of_a_part_of_the_model_resumes_that_part(tmp_path: Path) -> None:
    model = Adapted()
    Checkpointer(model.adapter, tmp_path).save("adapter", iteration=3)
    nn.init.zeros_(model.adapter[0].weight)
    assert Checkpointer(model.adapter, tmp_path).resume_or_load() == {"iteration": 3}
    assert_equal(model.state_dict(), Adapted().state_dict())
    assert set(checkpoint(tmp_path, "adapter", False)["model"]) == {
        f"{layer}.{name}" for layer in "01" for name in ("weight", "bias")
    }


class Compiled(nn.Module):
    """Has the names of torch.compile, which takes its time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self._orig_mod(x)


def test_torch_compile_adds_the_names_of_its_stand_in() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 1), backend="eager")
    assert [*compiled.state_dict()] == [*Compiled(nn.Linear(2, 1)).state_dict()]


def wrapped(kind: str, net: nn.Module) -> nn.Module:
    if kind == "compiled inside":
        net[1] = Compiled(net[1])  # type: ignore[index, assignment]
    elif kind == "recomputed inside":
        net[1] = checkpoint_wrapper(net[1], CheckpointImpl.NO_REENTRANT)  # type: ignore[index, assignment, no-untyped-call]
    elif kind == "parallel inside":
        net[0] = nn.DataParallel(net[0])  # type: ignore[index]
    elif kind == "averaged":
        return AveragedModel(net)
    elif kind == "all":
        net[0] = Compiled(nn.DataParallel(net[0]))  # type: ignore[index, assignment]
        net[1] = checkpoint_wrapper(Compiled(net[1]))  # type: ignore[index, assignment, no-untyped-call]
        return nn.DataParallel(Compiled(net))  # type: ignore[arg-type]
    return net


def net_of(value: float) -> nn.Sequential:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    return net


INSIDE = ["compiled inside", "recomputed inside", "parallel inside"]


@pytest.mark.parametrize("before", ["bare", *INSIDE, "averaged", "all"])
@pytest.mark.parametrize("now", ["bare", *INSIDE, "all"])
def test_names_that_only_a_wrapper_adds_are_no_difference(
    before: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = wrapped(before, net_of(3.0))
    # By the names of the wrapped model, as a loop of one's own saves them.
    save_file({"model": saved.state_dict(), "trainer": {}}, tmp_path / "a.pth")
    (tmp_path / "last_checkpoint").write_text("a.pth")
    model = wrapped(now, net_of(0.0))
    caplog.clear()
    Checkpointer(model, tmp_path).resume_or_load("")
    assert {each.sum().item() / each.numel() for each in model.parameters()} == {3.0}
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("before", ["bare", *INSIDE])
@pytest.mark.parametrize("now", ["bare", *INSIDE])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_goes_on_exactly_when_a_part_of_its_model_is_wrapped(
    before: str, now: str, sharded: bool, tmp_path: Path
) -> None:
    def build(kind: str, folder: str) -> tuple[SimpleTrainer, Checkpointer]:
        model = wrapped(kind, net_of(1.0))
        adam = torch.optim.Adam(model.parameters())
        loader = build_train_loader(list(torch.eye(2)), total_batch_size=2, seed=0)
        trainer = SimpleTrainer(LossOf(model), loader, adam)
        checkpointer = Checkpointer(
            trainer.model, tmp_path / folder, trainer=trainer, sharded=sharded
        )
        trainer.register_hooks([EMA(trainer.model, decay=0.5)])
        return trainer, checkpointer

    whole, _ = build(before, "none")
    whole.train(max_iter=6)
    first, checkpointer = build(before, "out")
    first.train(max_iter=3)
    checkpointer.save("a", iteration=2)
    second, checkpointer = build(now, "out")
    checkpointer.resume_or_load("")
    second.train(max_iter=6)
    ends = [whole.state_dict(), second.state_dict()]
    averages = [[*end["hooks"]["EMA"].values()] for end in ends]
    assert_equal(*averages)
    weights = [[*trainer.model.state_dict().values()] for trainer in (whole, second)]
    assert_equal(*weights)


@pytest.mark.parametrize("kind", ["bare", *INSIDE, "all"])
def test_what_a_wrapped_model_lacks_or_does_not_know_is_told_by_its_names(
    kind: str,
) -> None:
    model = wrapped(kind, net_of(0.0))
    state = {**net_of(3.0).state_dict(), "1.other": torch.ones(1)}
    del state["1.weight"]
    with pytest.raises(ValueError, match=r"(?s)missing_keys.*1\..*weight.*1\.other"):
        load_model_state(model, state, strict=True)
    assert {each.sum().item() for each in model.parameters()} == {0.0}
    found = load_model_state(model, state)
    assert found.missing_keys == [n for n in model.state_dict() if "1." in n][:1]
    assert found.unexpected_keys == ["1.other"]
    with pytest.raises(ValueError, match="nothing in the state fits"):
        load_model_state(model, {"1.other": torch.ones(1)})


@pytest.mark.parametrize("kind", [*INSIDE, "all"])
def test_a_state_with_the_names_of_the_parameters_loads(kind: str) -> None:
    named = wrapped(kind, net_of(3.0)).named_parameters()
    state = {name: parameter.detach() for name, parameter in named}
    for model in (net_of(0.0), wrapped(kind, net_of(0.0))):
        assert load_model_state(model, state).unexpected_keys == []
        assert {each.mean().item() for each in model.parameters()} == {3.0}


def test_a_tensor_that_a_wrapped_part_shares_is_not_missing() -> None:
    def tied(value: float) -> nn.Sequential:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        nn.init.constant_(net[0].weight, value)  # type: ignore[arg-type]
        net[1].weight = net[0].weight
        return net

    state = tied(3.0).state_dict()
    del state["1.weight"]
    model = wrapped("recomputed inside", tied(0.0))
    load_model_state(model, state, strict=True)
    assert {*model.state_dict()["1.weight"].flatten().tolist()} == {3.0}


def lacks_of_parts_in_ddp() -> list[Any]:
    """What models with parts in DDP lack of a state of the bare one, and whether it loads."""
    found = []
    for wrap in (DistributedDataParallel, SeparateDistributedDataParallel):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        state = {name: torch.ones_like(t) for name, t in net.state_dict().items()}
        if wrap is DistributedDataParallel:
            net[1] = wrap(net[1])
        else:
            wrap(net)  # each child, in place
        load_model_state(net, state, strict=True)
        del state["1.bias"]
        lack = load_model_state(net, state).missing_keys
        found.append((sum(p.sum().item() for p in net.parameters()), lack))
    return found


def test_parts_in_ddp_load_by_bare_names_and_say_what_they_lack() -> None:
    for found in run_ranks(lacks_of_parts_in_ddp, 2):
        assert found == [(9.0, ["1.module.bias"]), (9.0, ["1.bias"])]


class LossOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x).square().mean()
        return loss


def test_a_resume_refuses_a_file_that_lacks_a_state(tmp_path: Path) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a", iteration=9)
    model, trainer = model_of(0), Counter()
    checkpointer = Checkpointer(model, tmp_path, trainer=trainer, ema=Counter())
    with pytest.raises(ValueError, match="'ema'"):
        checkpointer.resume_or_load("")
    assert (trainer.value, model.weight.tolist()) == (0, [[0.0, 0.0]])
    rest = checkpointer.resume_or_load("", checkpointables=["trainer"])
    assert (rest, trainer.value) == ({"iteration": 9}, 5)


@pytest.mark.parametrize(
    ("names", "value", "loaded"),
    [
        (None, 5, {"value", "optimizer"}),
        ([], 0, set()),
        (["trainer"], 5, {"value", "optimizer"}),
        (["trainer.optimizer"], 0, {"optimizer"}),
        (["trainer.optimizer", "trainer"], 5, {"value", "optimizer"}),
    ],
)
def test_parts_are_chosen_by_name(
    names: Any, value: int, loaded: set[str], tmp_path: Path
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a")
    model, trainer = model_of(0), Counter()
    Checkpointer(model, trainer=trainer).load(tmp_path / "a.pth", names)
    assert torch.equal(model.weight, torch.full((1, 2), 3.0))
    assert (trainer.value, trainer.loaded) == (value, loaded)


@pytest.mark.parametrize(
    ("name", "message"),
    [("trainr", "'trainer'"), ("ema", "'ema'"), ("trainer.optimiser", "'optimizer'")],
)
def test_a_name_that_cannot_be_loaded_is_refused_beforehand(
    name: str, message: str, tmp_path: Path
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("a")
    model = model_of(0)
    checkpointer = Checkpointer(model, trainer=Counter(), ema=Counter())
    with pytest.raises(ValueError, match=message):
        checkpointer.load(tmp_path / "a.pth", checkpointables=[name])
    assert torch.equal(model.weight, torch.zeros(1, 2))


def test_a_file_of_which_nothing_fits_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    wrapped = nn.ModuleDict({"backbone": model_of(3)})
    Checkpointer(wrapped, tmp_path, trainer=Counter(5)).save("a")
    trainer = Counter()
    checkpointer = Checkpointer(model_of(0), tmp_path, trainer=trainer)
    with pytest.raises(ValueError, match=r"'backbone\.weight'"):
        checkpointer.resume_or_load("")
    assert trainer.value == 0


def test_without_resume_only_the_model_of_the_given_file_is_loaded(
    tmp_path: Path,
) -> None:
    Checkpointer(model_of(3), tmp_path, trainer=Counter(5)).save("model_0000009")
    Checkpointer(model_of(8), tmp_path / "pre", trainer=Counter(6)).save("a")
    for folder, resume in ((tmp_path, False), (tmp_path / "fresh", True)):
        model, trainer = model_of(0), Counter()
        checkpointer = Checkpointer(model, folder, trainer=trainer)
        checkpointer.resume_or_load(tmp_path / "pre" / "a.pth", resume=resume)
        assert (trainer.value, model.weight.tolist()) == (0, [[8.0, 8.0]])


class Killed(BaseException):
    """As a kill: nobody catches it to clean up."""


def break_at(patch: pytest.MonkeyPatch, n: int, error: BaseException) -> list[str]:
    """Let the n-th of the calls that change a folder raise, and the later ones if it is a kill."""
    made: list[str] = []

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) == n or (len(made) > n and isinstance(error, Killed)):
                raise error
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "unlink"):
        patch.setattr(os, name, faulty(name, getattr(os, name)))
    patch.setattr(shutil, "rmtree", faulty("rmtree", shutil.rmtree))
    return made


@pytest.mark.parametrize("replace", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("kind", [OSError, Killed])
def test_whatever_call_breaks_the_old_or_the_new_one_is_resumed(
    kind: type[BaseException],
    replace: bool,
    shards: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = 1 if replace else None
    outcomes = set()
    for n in range(1, 100):
        folder = tmp_path / str(n)
        old, new = (Checkpointer(model_of(i), folder, sharded=shards) for i in (1, 2))
        if replace:
            old.save("model_0000009", iteration=1)
        with monkeypatch.context() as patch:
            made = break_at(patch, n, kind(errno.EIO, "the disk failed"))
            problem = ""
            try:
                new.save("model_0000009", iteration=2)
            except (OSError, Killed) as error:
                problem = str(error)
        if n > len(made):
            break
        if kind is OSError and replace:
            assert old.has_checkpoint()  # also before anything is swept
        if problem and kind is OSError and made[n - 1] != "mkdir":
            assert f"the disk failed: '{folder}/" in problem
        folder.mkdir(exist_ok=True)
        sweep(folder)
        found = old.resume_or_load("").get("iteration")
        assert old.model.weight[0, 0].item() == (found or 1)
        assert set(names(folder)) <= {"last_checkpoint", "model_0000009"}
        assert not [path for path in folder.iterdir() if ".tmp-" in path.name]
        outcomes.add((bool(problem), found))
    assert not problem
    assert n > 6
    assert outcomes >= {(True, before), (True, 2)}
    assert outcomes <= {(True, before), (True, 2), (False, 2)}


def test_what_is_saved_in_the_background_is_the_state_of_the_call(
    shards: bool, go: threading.Event, tmp_path: Path
) -> None:
    model, trainer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), Counter(5)
    options: Any = {"sharded": shards, "trainer": trainer}
    go.set()
    now = Checkpointer(model, tmp_path / "a", **options)
    now.save("x", iteration=9, note=[torch.ones(2), "text"])
    go.clear()
    later = Checkpointer(model, tmp_path / "b", background=True, **options)
    later.save("x", iteration=9, note=[torch.ones(2), "text"])
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 1
    trainer.value = 6
    go.set()
    later.wait()
    states = [checkpoint(tmp_path / name, "x", shards) for name in ("a", "b")]
    assert_equal(*states)
    assert states[0]["trainer"]["value"] == 5


LOOKS: dict[str, Callable[[Checkpointer], Any]] = {
    "has": lambda c: c.has_checkpoint(),
    "file": lambda c: c.get_checkpoint_file(),
    "resume": lambda c: c.resume_or_load(""),
    "load": lambda c: c.load(os.path.join(c.save_dir, "a" if c.sharded else "a.pth")),
    "save": lambda c: c.save("b"),
    "wait": lambda c: c.wait(),
    "give up": lambda c: c.give_up(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_what_failed_in_the_background_is_raised_once_by_the_next_call(
    look: Callable[[Checkpointer], Any], shards: bool, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    with writing_by(failing(BROKEN)):
        checkpointer.save("a")
        with pytest.raises(OSError, match="the disk failed"):
            look(checkpointer)
    assert names(tmp_path) == []
    checkpointer.wait()
    checkpointer.save("c")
    checkpointer.wait()
    assert names(tmp_path) == ["c", "last_checkpoint"]


def run(folder: Path, start: int, stop: int, **settings: Any) -> PeriodicCheckpointer:
    """Step through the iterations from ``start`` to ``stop - 1``, as one process would."""
    periodic = PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), folder), **settings)
    for iteration in range(start, stop):
        periodic.step(iteration)
    return periodic


@pytest.mark.parametrize(
    ("stop", "max_iter", "expected"),
    [
        (25, 25, ["model_0000009", "model_0000019", "model_final"]),
        (20, 20, ["model_0000009", "model_final"]),  # once
        (20, None, ["model_0000009", "model_0000019"]),
    ],
)
def test_each_period_and_a_known_end_are_saved(
    stop: int, max_iter: int | None, expected: list[str], tmp_path: Path
) -> None:
    run(tmp_path, 0, stop, period=10, max_iter=max_iter)
    assert names(tmp_path) == ["last_checkpoint", *expected]
    assert pointer(tmp_path) == expected[-1]
    assert load_file(tmp_path / f"{expected[-1]}.pth")["iteration"] == stop - 1


@pytest.mark.parametrize(
    "settings", [{"period": -1}, {"period": 2.5}, {"period": 1, "max_to_keep": 0}]
)
def test_a_period_or_count_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    name, value = list(settings.items())[-1]
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1)), **settings)


def test_a_process_that_does_not_write_deletes_nothing(tmp_path: Path) -> None:
    run(tmp_path, 0, 30, period=10)
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, save_to_disk=False)
    PeriodicCheckpointer(checkpointer, 10, max_to_keep=1).step(39)
    assert len(names(tmp_path)) == 4


def test_old_ones_are_deleted_only_when_the_new_one_is_there(
    shards: bool, go: threading.Event, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(model_of(1), tmp_path, background=True, sharded=shards)
    periodic = PeriodicCheckpointer(checkpointer, 10, max_iter=50, max_to_keep=2)
    go.set()
    for iteration in range(20):
        periodic.step(iteration)
    checkpointer.wait()
    go.clear()
    periodic.step(29)
    assert names(tmp_path) == ["last_checkpoint", "model_0000009", "model_0000019"]
    assert pointer(tmp_path) == "model_0000019"
    go.set()
    periodic.step(39)
    periodic.step(49)
    kept = ["model_0000029", "model_0000039", "model_final"]
    assert names(tmp_path) == ["last_checkpoint", *kept]


def test_nothing_is_deleted_while_the_newest_one_is_broken(
    shards: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save_badly(state: dict[str, Any], path: str) -> None:
        write_file(state, path)
        os.truncate(path, os.path.getsize(path) - 1)

    run(tmp_path, 0, 20, period=10)
    checkpointer = Checkpointer(model_of(1), tmp_path, sharded=shards)
    with writing_by(save_badly):
        PeriodicCheckpointer(checkpointer, 10, max_to_keep=1).step(29)
    assert len(names(tmp_path)) == 4
    assert "the newest is broken" in caplog.text


def test_a_file_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise PermissionError(errno.EACCES, "not yours", path)

    run(tmp_path, 0, 10, period=10)
    monkeypatch.setattr("hooktrain.checkpoint.resume.delete", fail)
    run(tmp_path, 10, 20, period=10, max_to_keep=1)
    assert "not yours" in caplog.text
    assert names(tmp_path)[1:] == ["model_0000009", "model_0000019"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("limit", [500, 1_500])
def test_a_full_disk_costs_one_save_only(
    limit: int,
    background: bool,
    shards: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(30, 30)
    saver = Checkpointer(model, tmp_path, background=background, sharded=shards)
    periodic = PeriodicCheckpointer(saver, 10, max_iter=40, max_to_keep=1)
    periodic.step(9)
    saver.wait()
    with full_disk(limit):
        periodic.step(19)
        saver.wait()
    assert re.search("NOT SAVED: .* too large: .*model_0000019", caplog.text)
    assert names(tmp_path) == ["last_checkpoint", "model_0000009"]
    assert saver.resume_or_load("") == {"iteration": 9}
    periodic.step(29)
    saver.wait()
    with full_disk(limit), pytest.raises(OSError, match="model_final") as caught:
        periodic.step(39)
    assert is_disk_full(caught.value)
    assert names(tmp_path) == ["last_checkpoint", "model_0000029"]


def constant_model(iteration: int) -> nn.Linear:
    model = nn.Linear(200, 50)
    for parameter in model.parameters():
        nn.init.constant_(parameter, iteration)
    return model


def save_without_end(
    folder: Path, start: int, committed: Connection, background: bool, sharded: bool
) -> None:
    torch.set_num_threads(1)
    model = constant_model(start)
    checkpointer = Checkpointer(model, folder, background=background, sharded=sharded)
    periodic = PeriodicCheckpointer(checkpointer, period=1, max_to_keep=2)
    for iteration in range(start, 1_000_000):
        for parameter in model.parameters():
            nn.init.constant_(parameter, iteration)
        periodic.step(iteration)
        # In the background it is known to be there when the next one has begun.
        committed.send(iteration - background)


def kill_while_saving(
    folder: Path, start: int, saves: int, seconds: float, *mode: bool
) -> int:
    """Kill a saving process ``seconds`` after its n-th save; return the last one it committed."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(
        target=save_without_end, args=(folder, start, sender, *mode)
    )
    process.start()
    sender.close()
    committed = [receiver.recv() for _ in range(saves)]
    moment = time.perf_counter() + seconds
    while time.perf_counter() < moment:
        pass
    process.kill()
    process.join()
    try:
        while True:
            committed.append(receiver.recv())
    except EOFError:
        receiver.close()
    return int(committed[-1])


@pytest.mark.parametrize(
    ("background", "sharded"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["file", "file in the background", "folder", "folder in the background"],
)
def test_the_newest_committed_checkpoint_loads_after_each_kill(
    background: bool, sharded: bool, tmp_path: Path
) -> None:
    draw = random.Random(0)
    start = kills = leftovers = 0
    while (
        kills < 5 or leftovers == 0
    ):  # before some kill has hit a save the test proves nothing
        assert kills < 100, "no kill hits a save"
        kills += 1
        saves, seconds = draw.randint(2, 4), draw.uniform(0, 0.01)
        committed = kill_while_saving(
            tmp_path, start, saves, seconds, background, sharded
        )
        leftovers += any(".tmp-" in p.name for p in tmp_path.iterdir())
        model = constant_model(-1)
        iteration = Checkpointer(model, tmp_path).resume_or_load("")["iteration"]
        # Killed between the commit and its message, the run is one further than it could tell; and
        # one more, where another was begun meanwhile.
        assert committed <= iteration <= committed + 1 + background
        for parameter in model.parameters():
            assert torch.equal(parameter, torch.full_like(parameter, iteration))
        start = iteration + 1
    Checkpointer(constant_model(0), tmp_path).begin_run()
    assert not any(".tmp-" in p.name for p in tmp_path.iterdir())


class NeedsAllRanks:
    """Its state is gathered in a collective, as that of a sharded model."""

    def state_dict(self) -> dict[str, int]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": int(total)}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def save_on_all_ranks(folder: Path) -> Any:
    folder = folder / str(dist.get_rank())  # so that it can be seen who wrote
    checkpointer = Checkpointer(
        DistributedDataParallel(model_of(3)), folder, gathered=NeedsAllRanks()
    )
    periodic = PeriodicCheckpointer(checkpointer, 1, max_to_keep=1)
    periodic.step(0)
    periodic.step(1)
    dist.barrier()
    written = shown(folder) if folder.exists() else []
    return checkpointer.save_to_disk, type(checkpointer.model).__name__, written


def test_of_all_ranks_the_main_one_writes(tmp_path: Path) -> None:
    main, other = run_ranks(save_on_all_ranks, 2, tmp_path)
    assert main == (True, "Linear", ["last_checkpoint", "model_0000001.pth"])
    assert other == (False, "Linear", [])
    state = torch.load(tmp_path / "0" / "model_0000001.pth", weights_only=True)
    assert list(state["model"]) == ["weight", "bias"]
    assert state["gathered"] == {"total": 2}


def save_on_one_rank(folder: Path) -> None:
    if dist.get_rank() == 0:
        Checkpointer(model_of(3), folder).save("a")
    # Were there a barrier in the save, it would meet this one, and rank 0 would wait for ever here.
    comm.synchronize()


def test_one_rank_may_save_alone(tmp_path: Path) -> None:
    run_ranks(save_on_one_rank, 2, tmp_path)
    assert (tmp_path / "a.pth").exists()


def gone(folder: Path) -> None:
    (folder / "model_0000019.pth").unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / "model_0000019.pth", 100)


def emptied(folder: Path) -> None:
    for path in folder.glob("*.pth"):
        path.write_bytes(b"")


# What happens on the disk of which rank, what is loaded (or resumed), and what every rank gets.
CASES: list[tuple[Callable[[Path], object], int, str, str]] = [
    (gone, 0, "model_0000019.pth", "FileNotFoundError: .*out/model_0000019.pth"),
    (gone, 1, "model_0000019.pth", "FileNotFoundError: .*out/model_0000019.pth"),
    (gone, 1, "", "9.0"),  # one that all can read
    (cut, 0, "", "9.0"),  # what the main process can read
    (emptied, 0, "", r"(?s)CorruptCheckpointError: .*model_0000009.pth"),
    (shutil.rmtree, 0, "", "0.0"),  # from scratch
]


def load_on_own_disks(root: Path) -> list[tuple[str, str]]:
    """The weight or the error of each case, and what was logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    found = []
    for number, (_, _, name, _) in enumerate(CASES):
        os.chdir(root / str(number) / str(dist.get_rank()))
        checkpointer = Checkpointer(model_of(0), "out")
        try:
            checkpointer.load(f"out/{name}") if name else checkpointer.resume_or_load(
                ""
            )
            outcome = str(checkpointer.model.weight[0, 0].item())
        except (OSError, CorruptCheckpointError) as error:
            outcome = f"{type(error).__name__}: {error}"
        found.append((outcome, "\n".join(told)))
        told.clear()
        assert comm.all_gather(dist.get_rank()) == [0, 1]  # no rank has run ahead
    return found


def test_ranks_with_disks_of_their_own_load_the_same_or_fail_alike(
    tmp_path: Path,
) -> None:
    for number, (harm, struck, _, _) in enumerate(CASES):
        for rank in range(2):
            folder = tmp_path / str(number) / str(rank) / "out"
            for value in (9, 19):
                saver = Checkpointer(model_of(value), folder)
                saver.save(f"model_{value:07d}", iteration=value)
            if rank == struck:
                harm(folder)
    for results in run_ranks(load_on_own_disks, 2, tmp_path):
        for case, (outcome, told) in zip(CASES, results, strict=True):
            assert re.match(case[3], outcome), case
            is_passed = re.search(r"Passing over the .*/[01]/out/model_00000", told)
            assert bool(is_passed) == (not case[2] and case[0] is not shutil.rmtree)


def make_trainer(model: nn.Module, folder: Path, **options: Any) -> SimpleTrainer:
    trainer = SimpleTrainer(model, [own_part(batches(1)[0])], make_wrapper(model))
    saver = Checkpointer(model, folder, trainer=trainer, **options)
    periodic = PeriodicCheckpointer(saver, period=1, max_to_keep=1)
    trainer.register_hooks([EMA(model), periodic])
    saver.resume_or_load("")
    return trainer


def states(trainer: SimpleTrainer) -> Any:
    """Model, optimizer and average, whole on the main process."""
    trained = trainer.state_dict()
    parts = [
        dict(trainer.model.state_dict()),
        trained["optimizer"]["state"],
        trained["hooks"],
    ]
    return copy.deepcopy(full_tensors(parts))


def trained(model: nn.Module, folder: Path, **options: Any) -> Any:
    trainer = make_trainer(model, folder, **options)
    trainer.train(max_iter=3)
    return states(trainer)


def shown(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


SAVED = {
    "folder": {"sharded": True},
    "background": {"sharded": True, "background": True},
    "file": {"background": True},
}


def on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in SAVED.items():
        found[name] = trained(make_sharded(), folder / name, **options)
        comm.synchronize()  # files are written by the main process alone
        found[f"{name} shown"] = shown(folder / name)
    return found


def resumed(folder: Path) -> tuple[list[Any], list[int]]:
    """The states after each resume, and how many rows this rank has read of some tensors."""
    found = [states(make_trainer(make_sharded(), folder / name)) for name in SAVED]
    whole = make_trainer(make_sharded(), folder / "file")
    assert f"{folder}/file" not in Path("/proc/self/maps").read_text()
    assert whole.done == 3  # it is still here, and holds nothing of the file
    one = make_trainer(make_sharded(), folder / "one", sharded=True)
    read = Checkpointer(one.model).read(folder / "folder" / "model_final")
    name = "embedding.weight"
    tensors = [
        read["model"][name],
        read["trainer"]["hooks"]["EMA"][f"module.{name}"],
        read["trainer"]["optimizer"]["state"][name]["exp_avg"],
    ]
    return [*found, states(one)], [len(tensor.to_local()) for tensor in tensors]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def one(folder: Path) -> Any:
    return trained(make_model(), folder / "one")


@pytest.fixture(scope="module")
def two(folder: Path, one: Any) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


def test_all_ways_to_save_hold_the_same(two: list[dict[str, Any]]) -> None:
    assert_equal(two[0]["folder"], two[0]["background"])
    assert_equal(two[0]["folder"], two[0]["file"])
    kept = ["last_checkpoint", "model_0000001", "model_final"]
    assert two[1]["folder shown"] == two[1]["background shown"] == kept
    kept[1:] = [f"{name}.pth" for name in kept[1:]]
    assert two[1]["file shown"] == kept


@pytest.mark.parametrize(("ranks", "rows"), [(1, [17]), (2, [9, 8]), (4, [5, 5, 5, 2])])
def test_what_2_ranks_saved_is_resumed_by_others_each_its_shards(
    ranks: int, rows: list[int], folder: Path, one: Any, two: list[dict[str, Any]]
) -> None:
    results = run_ranks(resumed, ranks, folder)
    assert [read for _, read in results] == [[count] * 3 for count in rows]
    found, _ = results[0]
    assert_equal(found, [two[0]["folder"]] * 3 + [one])


def private_bytes() -> int:
    """The memory that this process shares with no other."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(1024 * int(kb) for kb in re.findall(r"Private_\w+:\s+(\d+)", text))


def read_whole_file(path: Path) -> tuple[float, int]:
    """The mean of what was kept, and the memory that this rank has taken."""
    model = shard_model(nn.Sequential(nn.Linear(1024, 4096)), wrap={nn.Linear})
    before = private_bytes()
    state = Checkpointer(model).read(path)
    grown = private_bytes() - before
    state["model"]["0.weight"].zero_()  # what is written there is this process's alone
    comm.synchronize()
    assert load_file(path)["model"]["0.weight"].mean() == 1
    comm.synchronize()
    if comm.is_main_process():
        write_file({}, path)
        path.unlink()
    comm.synchronize()
    return state["kept"].mean().item(), grown


def test_ranks_share_the_memory_of_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    weight = torch.ones(4096, 1024)
    save_file({"model": {"0.weight": weight}, "kept": torch.ones(9)}, path)
    results = run_ranks(read_whole_file, 2, path)
    for kept, grown in results:
        assert kept == 1
        assert grown < weight.nbytes / 2


def test_a_folder_resumes_in_1_process_with_a_plain_model(
    folder: Path, two: list[dict[str, Any]]
) -> None:
    for name in ("folder", "background"):
        trainer = make_trainer(make_model(), folder / name)
        assert trainer.state_dict()["iteration"] == 2
        assert_equal(states(trainer), two[0]["folder"])


def fail_on_main(*_: Any) -> None:
    raise OSError("no disk on the main process")


def load_after_a_failure(folder: Path) -> list[str]:
    """What each rank gets to know of a failure in the background of the main process."""
    checkpointer.write_file = folders.write_file = fail_on_main  # of this process only
    errors = []
    for sharded in (False, True):
        saver = Checkpointer(nn.Linear(2, 1), folder, sharded=sharded, background=True)
        saver.save("a")
        try:
            saver.resume_or_load("")
        except OSError as error:
            errors.append(str(error))
    return errors


def test_a_load_raises_on_every_rank_what_failed_in_the_background_of_one(
    tmp_path: Path,
) -> None:
    assert (
        run_ranks(load_after_a_failure, 2, tmp_path)
        == [["no disk on the main process"] * 2] * 2
    )


def one_rank_fails(folder: Path) -> float:
    """How long the rank that has begun a save without the other waits, as its run has failed."""
    saver = Checkpointer(nn.Linear(2, 1), folder, sharded=True, background=True)
    saver.save("model_0000000", iteration=0)
    saver.wait()
    checkpointer._GIVE_UP_SECONDS = 0.5
    start = time.perf_counter()
    if comm.is_main_process():
        job = partial(folders.save_folder, {"model": {}}, folder / "a", saver._group)
        saver._worker.submit(job, daemon=True)
        saver.give_up()
    seconds = time.perf_counter() - start
    comm.synchronize()
    return seconds


def test_after_a_failure_no_rank_waits_long_for_another(tmp_path: Path) -> None:
    seconds, _ = run_ranks(one_rank_fails, 2, tmp_path)
    assert 0.5 <= seconds < 5
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000000"
    assert not (tmp_path / "a").exists()
