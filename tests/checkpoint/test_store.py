"""A store beside the disk: up, down, rotation, two machines, and what is broken or refused."""

import glob
import json
import logging
import math
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    store as store_module,
)
from hooktrain.checkpoint.resume import read_pointer
from hooktrain.checkpoint.store import StoreTakenError
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import PeriodicCheckpointer
from hooktrain.utils import comm, timer
from hooktrain.utils.file_io import atomic_write
from processes import wait_until
from s3 import s3_server
from sharding_toys import full_state_dict, make_model, make_sharded
from toys import model_of, sgd

MEMORY = "memory://bucket/run"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["memory", "file", "s3"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "s3":
        for name, value in request.getfixturevalue("server").items():
            monkeypatch.setenv(name, value)
        bucket = f"bucket-{uuid4()}"
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}/run"
        return
    (tmp_path / "store").mkdir()
    yield MEMORY if request.param == "memory" else f"file://{tmp_path}/store"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def memory() -> Iterator[str]:
    yield MEMORY
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def machine(folder: Path, store: str, **options: Any) -> Checkpointer:
    """What saves a model of one number in a folder and in the store."""
    return Checkpointer(model_of(0.0), folder, store=store, **options)


def save(checkpointer: Checkpointer, iteration: int) -> None:
    """Save a model whose weight is the iteration; it is in the store when this returns."""
    offer(checkpointer, iteration)
    checkpointer.finish()


def offer(checkpointer: Checkpointer, iteration: int) -> None:
    nn.init.constant_(checkpointer.model.weight, iteration)
    checkpointer.save(f"model_{iteration:07d}", iteration=iteration)


def resumed(folder: Path, store: str) -> float:
    """The weight with which a run goes on."""
    checkpointer = machine(folder, store)
    found = checkpointer.resume_or_load("")
    weight: float = checkpointer.model.weight.mean().item()
    assert found.get("iteration", 0) == weight
    return weight


def stored(store: str) -> dict[str, str]:
    """The paths in the store, by their names without time and size; a pointer by its number."""
    system, root = fsspec.url_to_fs(store)
    paths = {}
    for path in system.find(root):
        name = Path(path).name
        is_pointer = name.startswith("pointer-")
        paths[name[:16] if is_pointer else name.split("-", 2)[-1]] = path
    return dict(sorted(paths.items()))


def change(store: str, name: str, content: bytes | None) -> None:
    """Replace the content of a file, or delete it."""
    system, _ = fsspec.url_to_fs(store)
    if content is None:
        system.rm_file(stored(store)[name])
    else:
        system.pipe_file(stored(store)[name], content)


def write_beside(checkpointer: Checkpointer) -> dict[str, bytes]:
    """Write what a run has beside its checkpoints; what of it should come from the store."""
    folder = Path(checkpointer.save_dir)
    names = ["config.json", "metrics.json", "val/metrics.json", "best[1].pth", "a/b/c"]
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "val").mkdir()
    wanted = {name: name.encode() for name in names if not name.endswith(".pth")}
    others = {"log.txt": b"log", "val/mine.txt": b"mine", ".hidden.json": b"hidden"}
    for name, content in {**wanted, **others, "../outside.json": b"outside"}.items():
        (folder / name).write_bytes(content)
    told = [*names, ".hidden.json", "../outside.json", "missing.json", "missing"]
    checkpointer.run_files = lambda: [folder / name for name in told]
    nn.init.constant_(checkpointer.model.weight, 9)
    checkpointer.save("best[1]", tag=False, iteration=9)
    if checkpointer.sharded:
        checkpointer.run_files = lambda: [folder / name for name in [*told, "best[1]"]]
    return wanted


@pytest.mark.parametrize("shards", [False, True], ids=["file", "folder"])
def test_a_run_goes_on_in_a_new_folder_with_all_that_it_needs(
    store: str, shards: bool, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", store, sharded=shards)
    first.begin_run(is_new=True)
    save(first, 9)
    wanted = write_beside(first)
    save(first, 19)
    (tmp_path / "b" / "val").mkdir(parents=True)
    (tmp_path / "b" / "val" / "notes.txt").write_text("of the other machine")
    assert resumed(tmp_path / "b", store) == 19
    for name, content in wanted.items():
        assert (tmp_path / "b" / name).read_bytes() == content
    best_name = "best[1]" if shards else "best[1].pth"
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        *["config.json", "metrics.json", "val", "a", best_name],
        *["model_0000019" if shards else "model_0000019.pth"],
        *["last_checkpoint", ".last_iteration"],
    }
    beside = {path.name for path in (tmp_path / "b" / "val").iterdir()}
    assert beside == {"metrics.json", "notes.txt"}
    best = Checkpointer(model_of(0.0))
    best.load(tmp_path / "b" / best_name)
    assert best.model.weight.mean().item() == 9
    # The newest is there once more, since the one before could be needed too.
    second = machine(tmp_path / "b", store, sharded=shards)
    second.begin_run()
    save(second, 29)
    shutil.rmtree(tmp_path / "b")
    assert resumed(tmp_path / "b", store) == 29


def test_a_final_checkpoint_without_a_number_comes_back(
    memory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = machine(tmp_path / "a", memory)
    save(first, 9)
    nn.init.constant_(first.model.weight, 19)
    first.save("model_final", iteration=19)
    (tmp_path / "a" / "metrics.json").write_text("{}")  # as hooks do at the end
    first.finish()
    assert caplog.text.count("model_final.pth is in the store") == 1
    assert resumed(tmp_path / "b", memory) == 19
    assert (tmp_path / "b" / ".last_iteration").read_text() == "19"
    # The folder knows its iteration: it goes into another store, without a save.
    second = machine(tmp_path / "b", MEMORY + "-2")
    second.begin_run()
    second.finish()
    assert resumed(tmp_path / "c", MEMORY + "-2") == 19


def test_a_file_of_the_store_loads_by_its_address(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    save(machine(tmp_path / "a", memory), 9)
    loader = Checkpointer(model_of(0.0))
    loader.load(f"memory:/{stored(memory)['model_0000009.pth']}")
    assert loader.model.weight.mean().item() == 9


def flip_bit(content: bytes, weight: float) -> bytes:
    """Another content of the same size: the weight in it is another one."""
    place = content.index(struct.pack("f", weight))
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("shards", [False, True], ids=["file", "folder"])
def test_what_was_altered_in_the_store_and_has_its_size_is_not_taken(
    shards: bool, memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory, sharded=shards)
    for iteration in (9, 19):
        save(first, iteration)
    name = "model_0000019"
    file = f"{name}.__0_0.distcp" if shards else f"{name}.pth"
    system, _ = fsspec.url_to_fs(memory)
    change(memory, file, flip_bit(system.cat_file(stored(memory)[file]), 19))
    assert resumed(tmp_path / "b", memory) == 9
    assert not list((tmp_path / "b").glob(f"{name}*"))


@pytest.mark.parametrize("damage", [None, b"", b"garbage"])
def test_what_is_broken_in_the_store_falls_back_to_the_checkpoint_before(
    damage: bytes | None, store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine(tmp_path / "a", store)
    for iteration in (9, 19, 29):
        save(first, iteration)
    change(store, "model_0000029.pth", damage)
    assert resumed(tmp_path / "b", store) == 19
    assert "Passing over the checkpoint model_0000029.pth" in caplog.text
    change(store, "model_0000019.pth", damage)
    with pytest.raises((CorruptCheckpointError, FileNotFoundError), match="0000019"):
        resumed(tmp_path / "c", store)
    assert resumed(tmp_path / "a", store) == 29  # the disk has it


def test_a_fetch_that_breaks_off_leaves_no_checkpoint_without_its_metrics(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path / "a", memory)
    wanted = write_beside(first)
    save(first, 9)
    get_file = MemoryFileSystem.get_file

    def refuse(self: Any, key: str, *args: Any) -> None:
        if key.endswith("-metrics.json"):
            raise OSError("no route to the store")
        get_file(self, key, *args)

    monkeypatch.setattr(MemoryFileSystem, "get_file", refuse)
    with pytest.raises(OSError, match="no route to the store"):
        resumed(tmp_path / "b", memory)
    monkeypatch.undo()
    assert resumed(tmp_path / "b", memory) == 9
    for name, content in wanted.items():
        assert (tmp_path / "b" / name).read_bytes() == content


@pytest.mark.parametrize("shards", [False, True], ids=["file", "folder"])
def test_a_file_beside_a_checkpoint_that_is_not_intact_is_left_out(
    shards: bool, memory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine(tmp_path / "a", memory, sharded=shards)
    write_beside(first)
    save(first, 19)
    best = "best[1].__0_0.distcp" if shards else "best[1].pth"
    system, _ = fsspec.url_to_fs(memory)
    flipped = flip_bit(system.cat_file(stored(memory)[best]), 9)
    for name, content in [(best, flipped), ("metrics.json", b"met"), ("a.b.c", None)]:
        change(memory, name, content)
    assert resumed(tmp_path / "b", memory) == 19
    there = {path.name for path in (tmp_path / "b").rglob("*") if path.is_file()}
    assert "config.json" in there
    assert not there & {best, "best[1].pth", "c"}
    assert not (tmp_path / "b" / "metrics.json").exists()
    assert (tmp_path / "b" / "val" / "metrics.json").exists()
    assert caplog.text.count("LEFT OUT, since it is not intact") == 3
    assert "-metrics.json'} is missing or truncated" in caplog.text


def test_the_newest_that_is_intact_counts_wherever_it_is(
    memory: str, tmp_path: Path
) -> None:
    def path_of(iteration: int) -> Path:
        return tmp_path / "a" / f"model_{iteration:07d}.pth"

    first = machine(tmp_path / "a", memory)
    for iteration in (9, 19):
        save(first, iteration)
    # The store is behind the disk, where the pointer was damaged.
    offer(Checkpointer(first.model, tmp_path / "a"), 29)
    (tmp_path / "a" / "last_checkpoint").write_bytes(b"")
    assert resumed(tmp_path / "a", memory) == 29
    path_of(29).write_bytes(b"damaged")
    assert resumed(tmp_path / "a", memory) == 19
    # The disk's newest is damaged, and the store has it.
    path_of(19).write_bytes(flip_bit(path_of(19).read_bytes(), 19))
    path_of(9).unlink()
    assert resumed(tmp_path / "a", memory) == 19
    assert read_pointer(tmp_path / "a") == path_of(19).name


def test_a_checkpoint_of_the_store_counts_more_than_one_of_another_run(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    for iteration in (9, 19, 29):
        save(first, iteration)
    change(memory, "model_0000029.pth", None)
    nn.init.constant_(first.model.weight, 2000)
    first.save("model_0002000", tag=False, iteration=2000)
    for name in ("model_0000009.pth", "model_0000019.pth"):
        (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / "model_0000029.pth").write_bytes(b"damaged")
    assert resumed(tmp_path / "a", memory) == 19


def test_a_damaged_folder_of_shards_is_fetched_again(
    memory: str, tmp_path: Path
) -> None:
    save(machine(tmp_path / "a", memory, sharded=True), 9)
    (tmp_path / "a" / "model_0000009" / "__0_0.distcp").write_bytes(b"damaged")
    assert resumed(tmp_path / "a", memory) == 9


def test_of_a_broken_folder_nothing_is_left(memory: str, tmp_path: Path) -> None:
    first = machine(tmp_path / "a", memory, sharded=True)
    for iteration in (9, 19):
        save(first, iteration)
    for name in ("manifest.pth", "state.pth", "__0_0.distcp"):
        change(memory, f"model_0000019.{name}", None)
        assert resumed(tmp_path / name, memory) == 9
        assert not (tmp_path / name / "model_0000019").exists()
    second = machine(tmp_path / "__0_0.distcp", memory, sharded=True)
    second.begin_run()
    save(second, 19)
    assert resumed(tmp_path / "b", memory) == 19


def test_a_damaged_or_forged_pointer_is_an_error(memory: str, tmp_path: Path) -> None:
    save(machine(tmp_path / "a", memory), 9)
    name = "model_0000009.pth"
    key = Path(stored(memory)[name]).name
    contents: list[Any] = [{"a": 1}, [1], ["name"], [{"name": name}], [[]], 9, None]
    paths = ["../escaped", "/tmp/escaped", ".lock", "a/../../b", "a/..", "a/../b", "a/"]
    for path in [*paths, "a//b", "./a", "", "."]:
        contents.append([{"name": path, "iteration": 9, "files": {path: key}}])
    keys = [f"{key}/../b", "../b", "0-0-/../b", "/etc/passwd", f"a{key}", "x", "", 9]
    for each in keys:
        contents.append([{"name": name, "iteration": 9, "files": {name: each}}])
    for iteration in ("9", None, 9.5):
        entry = {"name": name, "iteration": iteration, "files": {name: key}}
        contents.append([entry])
    for files in ({}, {"model": key}, {f"{name}x": key}, [name], None):
        contents.append([{"name": name, "iteration": 9, "files": files}])
    for content in [b'[{"name', b"", b"\xff", *map(json.dumps, contents)]:
        forged = content.encode() if isinstance(content, str) else content
        change(memory, "pointer-00000001", forged)
        with pytest.raises(CorruptCheckpointError, match="pointer-00000001"):
            resumed(tmp_path / "b" / "c", memory)
    assert not (tmp_path / "b").exists()
    good = [{"name": name, "iteration": 9, "files": {name: key}, "more": 1}]
    change(memory, "pointer-00000001", json.dumps(good).encode())
    assert resumed(tmp_path / "b", memory) == 9


def test_a_link_in_a_store_is_not_followed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = machine(tmp_path / "a", f"file://{store}")
    first.begin_run(is_new=True)
    write_beside(first)
    save(first, 9)
    (tmp_path / "secret").write_text("secret" * 9)  # no less than the file had
    (link,) = store.glob("*-config.json")
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    assert resumed(tmp_path / "b", f"file://{store}") == 9
    assert not (tmp_path / "b" / "config.json").exists()
    # Nor is a pointer.
    (pointer,) = store.glob("pointer-*")
    pointer.rename(tmp_path / "moved")
    pointer.symlink_to(tmp_path / "moved")
    assert resumed(tmp_path / "c", f"file://{store}") == 0


def test_only_what_is_newer_than_the_folder_is_fetched(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    save(first, 9)
    shutil.copytree(tmp_path / "a", tmp_path / "older")
    save(first, 19)
    change(memory, "model_0000009.pth", None)
    newer = Checkpointer(first.model, tmp_path / "a")  # it did not reach the store
    offer(newer, 29)
    assert resumed(tmp_path / "a", memory) == 29
    assert resumed(tmp_path / "older", memory) == 19


def test_the_store_keeps_two_checkpoints_and_what_others_have_put_there(
    store: str, tmp_path: Path
) -> None:
    system, root = fsspec.url_to_fs(store)
    system.pipe_file(f"{root}/notes.txt", b"mine")
    # A killed process has not come to its pointer.
    system.pipe_file(f"{root}/1795852534912475873-4-model_0000005.pth", b"left")
    if store.startswith("file"):
        left = ".pointer-00000001-host-x-00000001.json.tmp-hooktrain-1-host"
        system.pipe_file(f"{root}/{left}", b"left")
    first = machine(tmp_path / "a", store)
    first.begin_run(is_new=True)
    metrics = tmp_path / "a" / "metrics.json"
    metrics.write_text("1")
    first.run_files = lambda: [metrics]
    for iteration in (9, 19, 29):
        save(first, iteration)
    assert list(stored(store)) == [
        "metrics.json",
        "model_0000019.pth",
        "model_0000029.pth",
        "notes.txt",
        "pointer-00000001",
    ]
    # On another machine the checkpoint that it has resumed from stays until a newer one is there.
    assert resumed(tmp_path / "b", store) == 29
    second = machine(tmp_path / "b", store)
    second.begin_run()
    assert "model_0000029.pth" in stored(store)
    second.run_files = lambda: [tmp_path / "b" / "metrics.json"]
    save(second, 39)
    assert list(stored(store))[1:] == [
        "model_0000029.pth",
        "model_0000039.pth",
        "notes.txt",
        "pointer-00000002",
    ]


def test_a_best_model_that_a_better_one_of_its_size_replaces_goes_there_again(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    best = tmp_path / "a" / "model_best.pth"
    first.run_files = lambda: [best]
    for iteration in (9, 19):
        nn.init.constant_(first.model.weight, iteration)
        first.save("model_best", tag=False, iteration=iteration)
        save(first, iteration)
    assert resumed(tmp_path / "b", memory) == 19
    assert (tmp_path / "b" / "model_best.pth").read_bytes() == best.read_bytes()


def test_later_checkpoints_of_a_past_that_a_run_left_are_replaced(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    for iteration in (9, 19):
        save(first, iteration)
    save(first, 14)
    assert list(stored(memory))[:2] == ["model_0000009.pth", "model_0000014.pth"]
    assert resumed(tmp_path / "b", memory) == 14


class Refusing:
    """A store that waits at each write, and then refuses it, or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.refuses = False
        create = MemoryFileSystem._open

        def opened(system: Any, path: str, mode: str = "rb", **options: Any) -> Any:
            if mode == "wb":
                assert self.go.wait(20)
                if self.refuses:
                    raise PermissionError("refused")
            return create(system, path, mode, **options)

        monkeypatch.setattr(MemoryFileSystem, "_open", opened)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    return Refusing(monkeypatch)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_checkpoint_that_is_deleted_before_it_is_there_is_not_named(
    is_listed: bool,
    memory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = machine(tmp_path / "a", memory)
    save(first, 9)
    ls = MemoryFileSystem.ls

    def listed_late(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        (tmp_path / "a" / "model_0000019.pth").unlink()
        return ls(*args, **options)

    def deleted(*_: Any) -> int:
        (tmp_path / "a" / "model_0000019.pth").unlink()
        return 19

    if is_listed:
        monkeypatch.setattr(MemoryFileSystem, "ls", listed_late)
    else:
        monkeypatch.setattr(store_module, "pointed_iteration", deleted)
    offer(first, 19)
    first.give_up()  # it waits for the upload
    monkeypatch.undo()
    assert "NOT IN THE STORE" in caplog.text
    assert resumed(tmp_path / "b", memory) == 9
    assert list(stored(memory)) == ["model_0000009.pth", "pointer-00000001"]


def test_a_name_with_the_characters_of_patterns_goes_there(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    nn.init.constant_(first.model.weight, 9)
    first.save("net[1]*?_0000009", iteration=9)
    first.finish()
    assert list(stored(memory)) == ["net[1]*?_0000009.pth", "pointer-00000001"]
    assert resumed(tmp_path / "b", memory) == 9


def test_half_a_pointer_of_a_killed_process_does_no_harm(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path / "a", memory)
    for iteration in (9, 19):
        save(first, iteration)
    pipe_file = MemoryFileSystem.pipe_file

    def killed(system: Any, path: str, content: bytes) -> None:
        pipe_file(system, path, content[: len(content) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save(first, 29)
    monkeypatch.undo()
    assert resumed(tmp_path / "b", memory) == 19
    second = machine(tmp_path / "b", memory)
    second.begin_run()
    save(second, 29)
    system, root = fsspec.url_to_fs(memory)
    (pointer,) = system.glob(f"{root}/pointer-*")
    assert "pointer-00000002" in pointer


@pytest.mark.parametrize("background", [False, True])
def test_a_refused_upload_is_logged_and_tried_again_and_raises_at_the_end(
    background: bool,
    memory: str,
    refusing: Refusing,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = machine(tmp_path / "a", memory, background=background)
    first.begin_run(is_new=True)
    refusing.refuses = True
    offer(first, 9)
    first.wait()
    first.give_up()  # it waits for the upload
    assert "NOT IN THE STORE" in caplog.text
    offer(first, 19)
    with pytest.raises(PermissionError):
        first.finish()
    refusing.refuses = False
    first.finish()
    assert resumed(tmp_path / "b", memory) == 19
    refusing.refuses = True
    with pytest.raises(PermissionError):
        machine(tmp_path / "b", memory).begin_run()


def test_a_run_does_not_wait_for_an_upload_and_has_one_at_a_time(
    memory: str, refusing: Refusing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    refusing.go.clear()
    before = threading.active_count()
    for iteration in (9, 19, 29):
        offer(first, iteration)
        assert threading.active_count() == before + 1
    assert "previous upload is still running" in caplog.text
    refusing.go.set()
    first.finish()
    assert resumed(tmp_path / "b", memory) == 29


def test_no_watchdog_ends_a_run_that_waits_for_its_last_upload(
    memory: str, refusing: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooktrain.utils.comm._BEAT_SECONDS", 0.01)
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    refusing.go.clear()
    offer(first, 9)
    finish = partial(comm.on_all_ranks_patiently, first.finish)
    finishing = threading.Thread(target=finish)
    finishing.start()
    before = timer.last_beat
    wait_until(lambda: timer.last_beat > before)
    refusing.go.set()
    finishing.join()
    assert resumed(tmp_path / "b", memory) == 9


def test_of_two_machines_with_one_run_the_later_one_goes_on(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    save(first, 9)
    assert resumed(tmp_path / "b", memory) == 9
    second = machine(tmp_path / "b", memory)
    second.begin_run()
    offer(first, 19)  # its disk has it
    with pytest.raises(StoreTakenError, match="another process"):
        save(first, 29)
    with pytest.raises(StoreTakenError):
        first.finish()
    save(second, 19)
    assert list(stored(memory))[:2] == ["model_0000009.pth", "model_0000019.pth"]


def test_a_machine_whose_clock_is_behind_goes_on_as_well(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    offer(Checkpointer(first.model, tmp_path / "a"), 9)
    os.utime(tmp_path / "a" / "model_0000009.pth", (4e9, 4e9))
    first.begin_run()
    first.finish()
    assert resumed(tmp_path / "b", memory) == 9
    second = machine(tmp_path / "b", memory)
    second.begin_run()
    for iteration in (19, 29):
        save(second, iteration)
    names = ["model_0000019.pth", "model_0000029.pth", "pointer-00000002"]
    assert list(stored(memory)) == names
    assert resumed(tmp_path / "c", memory) == 29


def test_what_a_machine_that_still_trains_replaces_while_it_is_fetched_is_no_loss(
    memory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = machine(tmp_path / "a", memory)
    save(first, 9)

    get_file = MemoryFileSystem.get_file

    def get_late(*args: Any) -> None:
        monkeypatch.undo()
        save(first, 19)
        save(first, 29)
        get_file(*args)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_late)
    assert resumed(tmp_path / "b", memory) == 29
    # Nothing is wrong with the run, so the log has no error.
    told = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.levelname for each in told] == ["WARNING"]
    assert told[0].message.startswith("Passing over the checkpoint model_0000009.pth")


def test_a_pointer_that_a_machine_that_still_trains_replaces_is_no_loss(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path / "a", memory)
    save(first, 9)
    cat_file = MemoryFileSystem.cat_file

    def read_late(*args: Any) -> Any:
        monkeypatch.undo()
        save(first, 19)
        return cat_file(*args)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", read_late)
    assert resumed(tmp_path / "b", memory) == 19


def interrupted(patch: pytest.MonkeyPatch, function: Callable[[], object]) -> None:
    """Let something else happen right before the next pointer is written."""
    write = MemoryFileSystem.pipe_file

    def written_late(*args: Any) -> None:
        patch.undo()
        function()
        write(*args)

    patch.setattr(MemoryFileSystem, "pipe_file", written_late)


def test_of_two_machines_that_begin_at_once_one_goes_on(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [machine(tmp_path / name, memory) for name in "ab"]
    interrupted(monkeypatch, machines[1].begin_run)
    machines[0].begin_run()
    taken = 0
    for each in machines * 2:
        try:
            save(each, 9)
        except StoreTakenError:
            taken += 1
    assert taken == 2
    assert resumed(tmp_path / "c", memory) == 9
    assert list(stored(memory)) == ["model_0000009.pth", "pointer-00000001"]


def test_a_pointer_that_is_written_when_another_machine_goes_on_changes_nothing(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    save(first, 9)
    second = machine(tmp_path / "b", memory)

    def go_on() -> None:
        assert resumed(tmp_path / "b", memory) == 9
        second.begin_run()
        save(second, 39)
        save(second, 49)

    interrupted(monkeypatch, go_on)
    offer(first, 19)
    first.give_up()  # it waits for the upload
    assert resumed(tmp_path / "c", memory) == 49
    with pytest.raises(StoreTakenError, match="another process"):
        save(first, 29)
    save(second, 59)
    assert list(stored(memory)) == [
        "model_0000049.pth",
        "model_0000059.pth",
        "pointer-00000002",
    ]


def test_the_pointer_that_a_machine_is_writing_is_not_swept_by_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file://{tmp_path}/store"
    first = machine(tmp_path / "a", store)
    first.begin_run(is_new=True)
    save(first, 9)
    assert resumed(tmp_path / "b", store) == 9
    second = machine(tmp_path / "b", store)

    @contextmanager
    def written_late(path: str) -> Iterator[Any]:
        monkeypatch.undo()
        with atomic_write(path) as file:
            save(first, 19)
            yield file

    monkeypatch.setattr("hooktrain.checkpoint.store.atomic_write", written_late)
    second.begin_run()
    with pytest.raises(StoreTakenError, match="another process"):
        save(first, 29)
    save(second, 39)
    names = ["model_0000009.pth", "model_0000039.pth", "pointer-00000002"]
    assert list(stored(store)) == names


def test_a_store_that_refuses_to_delete_keeps_old_files_and_the_run_goes_on(
    memory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError("denied")

    first = machine(tmp_path / "a", memory)
    for iteration in (9, 19):
        save(first, iteration)
    monkeypatch.setattr(MemoryFileSystem, "rm_file", refuse)
    save(first, 29)
    offer(first, 39)
    first.give_up()  # it waits for the upload
    assert resumed(tmp_path / "b", memory) == 39
    assert "Old files stay" in caplog.text
    assert "NOT IN THE STORE" not in caplog.text
    monkeypatch.undo()
    save(first, 49)
    assert list(stored(memory))[:2] == ["model_0000039.pth", "model_0000049.pth"]
    assert len(stored(memory)) == 3


def test_a_new_run_does_not_replace_one_in_the_store(
    memory: str, tmp_path: Path
) -> None:
    save(machine(tmp_path / "a", memory), 9)
    with pytest.raises(ValueError, match="resume it"):
        machine(tmp_path / "b", memory).begin_run(is_new=True)
    assert resumed(tmp_path / "b", memory) == 9


@pytest.mark.parametrize(
    "address",
    [
        *["nowhere://bucket", "s3:/bucket/run", "bucket/run", "a/store", "./store"],
        *["{}/a", "file://{}/a/store", "{}/a/b/c", "{}/link/store", "file://store"],
    ],
)
def test_an_address_that_cannot_be_meant_is_refused_before_anything_is_made(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a")
    given = address.format(tmp_path)
    for folder in (tmp_path / "a", Path("a")):
        with pytest.raises(ValueError, match=re.escape(given.partition(":")[0])):
            machine(folder, given)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_a_folder_beside_the_output_folder_is_a_store(tmp_path: Path) -> None:
    save(machine(tmp_path / "a", str(tmp_path / "a-store")), 9)
    assert resumed(tmp_path / "b", str(tmp_path / "a-store")) == 9


def test_a_failed_run_waits_for_an_upload_but_not_for_ever(
    memory: str,
    refusing: Refusing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    refusing.go.clear()
    offer(first, 9)
    monkeypatch.setattr("hooktrain.checkpoint.checkpointer._UPLOAD_SECONDS", 0.01)
    first.give_up()
    assert "Giving up the checkpoint" in caplog.text
    refusing.go.set()
    first.finish()


def share(folder: Path, store: str, background: bool) -> list[bool]:
    """Save shards, lose the folder, and go on; then another machine begins."""

    def sharded(**options: Any) -> Checkpointer:
        return Checkpointer(
            make_sharded(),
            folder,
            sharded=True,
            background=background,
            store=store,
            **options,
        )

    first = sharded()
    first.begin_run(is_new=True)
    for iteration in (9, 19):
        nn.init.constant_(first.model.norm.weight, iteration)
        first.save(f"model_{iteration:07d}", iteration=iteration)
        comm.on_all_ranks(first.finish)
    expected = full_state_dict(first.model)
    if comm.is_main_process():
        shutil.rmtree(folder)
    comm.synchronize()
    second = sharded()
    assert second.resume_or_load("")["iteration"] == 19
    found = full_state_dict(second.model)
    equal = [torch.equal(found[name], expected[name]) for name in expected]
    second.begin_run()
    first.save("model_0000029", iteration=29)
    with pytest.raises(StoreTakenError):
        comm.on_all_ranks(first.finish)
    first.save("model_0000039", iteration=39)
    comm.on_all_ranks(first.wait)
    for thread in threading.enumerate():
        if thread.name == "upload":
            thread.join()
    first.background = False
    with pytest.raises(StoreTakenError):
        first.save("model_0000049", iteration=49)
    return equal


@pytest.mark.parametrize("background", [False, True])
def test_folders_of_shards_go_there_and_come_back_for_any_number_of_ranks(
    background: bool, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path}/store"
    equal, others = run_ranks(share, 2, tmp_path / "a", store, background)
    assert equal
    assert all(equal)
    assert others == []
    alone = Checkpointer(make_model(), tmp_path / "b", store=store)
    assert alone.resume_or_load("")["iteration"] == 19
    assert torch.equal(alone.model.norm.weight, torch.full((16,), 19.0))


def go_on(
    folder: Path, address: str, iterations: list[int], refused: int
) -> tuple[int, float]:
    """Resume and save on these ranks; the store refuses one of the checkpoints.

    Returns:
        The iteration and the weight of the checkpoint that was resumed, on the main process.
    """
    model = make_sharded()
    checkpointer = Checkpointer(model, folder, sharded=True, store=address)
    found = checkpointer.resume_or_load("").get("iteration", -1)
    weight = full_state_dict(model).get("norm.weight", torch.tensor(math.nan)).mean()
    checkpointer.begin_run(is_new=found < 0)
    put = LocalFileSystem.put_file

    def refuse(*_: Any) -> None:
        raise PermissionError("denied")

    for iteration in iterations:
        nn.init.constant_(model.norm.weight, iteration)
        LocalFileSystem.put_file = refuse if iteration == refused else put
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
        checkpointer.give_up()  # it waits for the upload
        comm.synchronize()
    return found, weight.item()


def test_a_run_whose_store_is_behind_goes_on_with_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    folder, address = tmp_path / "a", f"file://{tmp_path}/store"
    run_ranks(go_on, 2, folder, address, [9, 19], 19)
    names = {name[:13] for name in stored(address)}
    assert names == {"model_0000009", "pointer-00000"}
    # What is newest counts, and is on the disk.
    assert run_ranks(go_on, 3, folder, address, [29, 39], 39)[0] == (19, 19.0)
    shutil.rmtree(folder)
    assert run_ranks(go_on, 1, folder, address, [49], -1)[0] == (29, 29.0)
    alone = Checkpointer(make_model(), tmp_path / "b", store=address)
    assert alone.resume_or_load("")["iteration"] == 49
    assert torch.equal(alone.model.norm.weight, torch.full((16,), 49.0))


def put_by_each(
    folder: Path, address: str, refuses: bool
) -> tuple[list[str], list[bool]]:
    """Save shards; the names of the files that this rank puts there, and what its lists showed.

    Unless they are refused, those of the other rank are there when this one has seen that they are
    not.
    """
    names: list[str] = []
    looks: list[bool] = []
    put, ls = LocalFileSystem.put_file, LocalFileSystem.ls
    of_other = f"{folder.parent}/store/*manifest.pth"
    looked = folder.parent / "looked"

    def recorded(system: Any, path: str, target: str) -> None:
        if comm.get_rank() > 0 and refuses:
            raise PermissionError("denied")
        if comm.get_rank() > 0:
            wait_until(looked.exists)
        names.append(Path(target).name.split("-", 2)[-1])
        put(system, path, target)

    def listed(system: Any, path: str, **options: Any) -> Any:
        found = ls(system, path, **options)
        looks.append(bool(glob.glob(of_other)))
        if len(looks) > 2:
            looked.touch()
        return found

    LocalFileSystem.put_file, LocalFileSystem.ls = recorded, listed
    store_module._BEAT_SECONDS = 0.01
    store_module._PATIENCE = 10 if refuses else 3000
    checkpointer = Checkpointer(make_sharded(), folder, sharded=True, store=address)
    checkpointer.begin_run(is_new=True)
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.give_up()  # it waits for the upload
    comm.synchronize()
    return sorted(names), looks


SHARES = [[".metadata", "__1_0.distcp", "state.pth"], ["__0_0.distcp", "manifest.pth"]]


def test_each_rank_puts_its_share_and_the_main_process_what_is_missing(
    tmp_path: Path,
) -> None:
    of_main, of_other = ([f"model_0000009.{file}" for file in each] for each in SHARES)
    for refuses in (False, True):
        folder = tmp_path / str(refuses)
        address = f"file://{folder}/store"
        main, other = run_ranks(put_by_each, 2, folder / "a", address, refuses)
        names, looks = main
        assert names == (sorted(of_main + of_other) if refuses else of_main)
        assert other == ([] if refuses else of_other, [])  # it asks for no list
        assert (
            looks[:3] == [False] * 3
        )  # as it begins, before its files, and as it waits
        assert looks[-1] != refuses
        alone = Checkpointer(make_model(), folder / "b", store=address)
        assert alone.resume_or_load("")["iteration"] == 9


def put_late(folder: Path, address: str) -> list[str]:
    """Save shards again and again while rank 1 puts its share late; the files that it puts."""
    names: list[str] = []
    put, pointed = LocalFileSystem.put_file, store_module.pointed_iteration
    saved = folder.parent / "saved"

    def recorded(system: Any, path: str, target: str) -> None:
        names.append(Path(target).name.split("-", 2)[-1])
        put(system, path, target)

    def late(*args: Any) -> Any:
        wait_until(saved.exists)
        return pointed(*args)

    LocalFileSystem.put_file = recorded
    store_module._PATIENCE = 30 if comm.get_rank() == 0 else 0
    checkpointer = Checkpointer(make_sharded(), folder, sharded=True, store=address)
    checkpointer.begin_run(is_new=True)
    store_module.pointed_iteration = late
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.save(
        "model_0000019", iteration=19
    )  # one is previous upload is still running
    saved.touch()
    checkpointer.give_up()  # it waits for the upload
    comm.on_all_ranks(checkpointer.finish)
    return names


def test_a_rank_puts_its_share_of_the_checkpoint_that_the_main_process_puts(
    tmp_path: Path,
) -> None:
    main, other = run_ranks(put_late, 2, tmp_path / "a", f"file://{tmp_path}/store")
    for names, share in zip((main, other), SHARES, strict=True):
        assert names == [
            f"{name}.{file}"
            for name in ("model_0000009", "model_0000019")
            for file in share
        ]


def sharded_run(folder: Path, address: str, *iterations: int) -> Checkpointer:
    """Save folders of shards of a model in one process, whose weights are the iterations."""
    model = make_model()
    saver = Checkpointer(model, folder, store=address, sharded=True)
    for iteration in iterations:
        nn.init.constant_(model.norm.weight, iteration)
        saver.save(f"model_{iteration:07d}", iteration=iteration)
        saver.finish()
    return saver


def get_by_each(folder: Path, address: str) -> tuple[str, list[str], float]:
    """The error of a fetch that fails on rank 1; what each rank fetches then, and the weight."""
    names: list[str] = []
    get = LocalFileSystem.get_file
    refuses = True

    def recorded(system: Any, path: str, target: str) -> None:
        if refuses and comm.get_rank() == 1:
            raise PermissionError("denied")
        names.append(Path(path).name.split("-", 2)[-1])
        get(system, path, target)

    LocalFileSystem.get_file = recorded
    # It saves files, and goes on from a folder of shards.
    checkpointer = Checkpointer(make_sharded(), folder, store=address)
    with pytest.raises(PermissionError) as problem:
        checkpointer.resume_or_load("")
    if comm.is_main_process():
        # Nothing of the checkpoint: its metrics come before it.
        assert [path.name for path in folder.iterdir()] == ["metrics.json"]
    comm.synchronize()
    refuses = False
    names.clear()
    assert checkpointer.resume_or_load("")["iteration"] == 9
    model = full_state_dict(checkpointer.model)  # on the main process
    weight = model["norm.weight"].mean().item() if model else math.nan
    return str(problem.value), sorted(names), weight


def test_each_rank_fetches_its_share_and_an_error_of_one_reaches_all(
    tmp_path: Path,
) -> None:
    address = f"file://{tmp_path}/store"
    first = sharded_run(tmp_path / "a", address, 9)
    first.run_files = lambda: [tmp_path / "a" / "metrics.json"]
    (tmp_path / "a" / "metrics.json").write_text("{}")
    first.finish()
    main, other = run_ranks(get_by_each, 2, tmp_path / "b", address)
    of_main = [".metadata", "manifest.pth"]
    of_other = ["__0_0.distcp", "state.pth"]
    of_main, of_other = (
        [f"model_0000009.{file}" for file in each] for each in (of_main, of_other)
    )
    assert main == ("denied", ["metrics.json", *of_main], 9.0)
    assert other[:2] == ("denied", of_other)
    assert (tmp_path / "b" / "metrics.json").read_text() == "{}"


def pass_over(folder: Path, address: str) -> int:
    checkpointer = Checkpointer(make_sharded(), folder, store=address)
    return int(checkpointer.resume_or_load("")["iteration"])


@pytest.mark.parametrize("file", ["__0_0.distcp", "state.pth"])
def test_of_a_folder_that_one_rank_finds_to_be_altered_nothing_is_left(
    file: str, tmp_path: Path
) -> None:
    address = f"file://{tmp_path}/store"
    sharded_run(tmp_path / "a", address, 9, 19)
    system, _ = fsspec.url_to_fs(address)
    name = f"model_0000019.{file}"
    content = bytearray(system.cat_file(stored(address)[name]))
    content[len(content) // 2] ^= 1
    change(address, name, bytes(content))
    assert run_ranks(pass_over, 2, tmp_path / "b", address) == [9, 9]
    assert not (tmp_path / "b" / "model_0000019").exists()


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests for lists of files."""
    seen = []
    ls = MemoryFileSystem.ls

    def counted(system: Any, path: str, detail: bool) -> Any:
        seen.append(path)
        return ls(system, path, detail)

    monkeypatch.setattr(MemoryFileSystem, "ls", counted)
    return seen


@pytest.mark.parametrize("shards", [False, True], ids=["file", "folder"])
def test_a_save_takes_one_list_of_the_store(
    shards: bool, memory: str, tmp_path: Path, lists: list[str]
) -> None:
    first = machine(tmp_path / "a", memory, sharded=shards)
    first.begin_run(is_new=True)
    write_beside(first)
    lists.clear()
    offer(first, 9)
    first.give_up()  # it waits for the upload
    assert len(lists) == 1


def test_a_list_that_the_file_system_keeps_does_not_hide_another_machine(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ls = MemoryFileSystem.ls
    kept: list[Any] = []

    def keeping(*args: Any, **options: Any) -> Any:
        kept[:] = kept or [ls(*args, **options)]
        return kept[0]

    monkeypatch.setattr(MemoryFileSystem, "ls", keeping)
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda *_: kept.clear())
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    save(first, 9)
    assert resumed(tmp_path / "b", memory) == 9
    machine(tmp_path / "b", memory).begin_run()
    with pytest.raises(StoreTakenError, match="another process"):
        save(first, 19)


def test_files_that_a_late_list_does_not_show_are_there(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    early: list[Any] = fsspec.url_to_fs(memory)[0].ls("/bucket/run", detail=True)
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: early)
    for iteration in (9, 19):
        save(first, iteration)
    monkeypatch.undo()
    assert resumed(tmp_path / "b", memory) == 19
    save(first, 29)
    assert list(stored(memory)) == [
        "model_0000019.pth",
        "model_0000029.pth",
        "pointer-00000001",
    ]


def test_a_file_that_has_vanished_from_the_store_is_put_there_again(
    memory: str, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", memory)
    write_beside(first)
    save(first, 9)
    change(memory, "best[1].pth", None)
    save(first, 19)
    assert "best[1].pth" in stored(memory)


def wait_for_store(folder: Path, address: str) -> float:
    """Fetch from a store, and wait for its uploads, longer than the process group waits."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), comm.object_group())
    comm._BEAT_SECONDS = 0.1
    is_main = comm.is_main_process()
    if is_main:
        save(machine(folder / "a", address), 9)
    comm.synchronize()
    get, put = LocalFileSystem.get_file, LocalFileSystem.put_file

    def slow(function: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(2.5)
            return function(*args)

        return call

    LocalFileSystem.get_file = slow(get)
    LocalFileSystem.put_file = slow(put)
    checkpointer = machine(folder / "b", address)
    assert checkpointer.resume_or_load("")["iteration"] == 9
    trainer = SimpleTrainer(
        checkpointer.model, [torch.ones(1)], sgd(checkpointer.model)
    )
    saving = PeriodicCheckpointer(checkpointer, 1)
    trainer.register_hooks([saving])
    trainer.train(10, 10)
    checkpointer.save("model_0000019", iteration=19)
    saving.after_train()
    if is_main:
        other = store_module.Store(address, folder / "b")
        other.begin(is_new=False)
    comm.synchronize()
    with pytest.raises(StoreTakenError, match="another process"):
        saving.after_train()
    return checkpointer.model.weight.mean().item()


def test_no_rank_times_out_while_the_main_process_is_busy_with_a_store(
    tmp_path: Path,
) -> None:
    found = run_ranks(wait_for_store, 2, tmp_path, f"file://{tmp_path}/store")
    assert found == [9.0, 9.0]
