"""A store beside the disk: up, down, rotation, two machines, and what is broken or refused."""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, sources
from hooktrain.checkpoint.store import StoreTakenError
from hooktrain.utils import comm, timer
from hooktrain.utils.file_io import atomic_write
from processes import wait_until
from s3 import s3_server
from sharding_toys import full_state_dict, make_model, make_sharded
from toys import model_of

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


def write_beside(folder: Path) -> dict[str, bytes]:
    """Write what a run has beside its checkpoints; what of it should come from the store."""
    names = ["config.json", "metrics.json", "events.out.tfevents.1.host.2.0"]
    wanted = {name: name.encode() for name in names}
    for name, content in {**wanted, "log.txt": b"log", "mine.txt": b"mine"}.items():
        (folder / name).write_bytes(content)
    return wanted


@pytest.mark.parametrize("shards", [False, True], ids=["file", "folder"])
def test_a_run_goes_on_in_a_new_folder_with_all_that_it_needs(
    store: str, shards: bool, tmp_path: Path
) -> None:
    first = machine(tmp_path / "a", store, sharded=shards)
    first.begin_run(is_new=True)
    save(first, 9)
    first.save("model_best", tag=False, iteration=9)
    wanted = write_beside(tmp_path / "a")
    save(first, 19)
    assert resumed(tmp_path / "b", store) == 19
    for name, content in wanted.items():
        assert (tmp_path / "b" / name).read_bytes() == content
    assert not (tmp_path / "b" / "log.txt").exists()
    best = Checkpointer(model_of(0.0))
    best.load(tmp_path / "b" / ("model_best" if shards else "model_best.pth"))
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
    assert resumed(tmp_path / "b", memory) == 19


def test_a_file_of_the_store_loads_by_its_address(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    save(machine(tmp_path / "a", memory), 9)
    loader = Checkpointer(model_of(0.0))
    loader.load(f"memory:/{stored(memory)['model_0000009.pth']}")
    assert loader.model.weight.mean().item() == 9


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


def test_a_file_beside_a_checkpoint_that_is_cut_counts_as_broken(
    memory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine(tmp_path / "a", memory)
    save(first, 9)
    write_beside(tmp_path / "a")
    save(first, 19)
    change(memory, "metrics.json", b"metri")
    assert resumed(tmp_path / "b", memory) == 9
    assert "metrics.json has 5 bytes" in caplog.text


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
    system, _ = fsspec.url_to_fs(memory)
    checkpoints = json.loads(system.cat_file(stored(memory)["pointer-00000001"]))
    change(memory, "pointer-00000001", b'[{"name')
    with pytest.raises(CorruptCheckpointError, match="pointer-00000001"):
        resumed(tmp_path / "b", memory)
    (key,) = checkpoints[0]["files"].values()
    for path in ("../escaped.pth", "/tmp/escaped.pth", ".lock", "a/../../b"):
        checkpoints[0]["files"] = {path: key}
        change(memory, "pointer-00000001", json.dumps(checkpoints).encode())
        with pytest.raises(CorruptCheckpointError):
            resumed(tmp_path / "b", memory)
    assert not (tmp_path / "escaped.pth").exists()


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
        left = ".pointer-00000001-host-x.json.tmp-hooktrain-1-host"
        system.pipe_file(f"{root}/{left}", b"left")
    first = machine(tmp_path / "a", store)
    first.begin_run(is_new=True)
    (tmp_path / "a" / "metrics.json").write_text("1")
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
    save(second, 39)
    assert list(stored(store))[1:] == [
        "model_0000029.pth",
        "model_0000039.pth",
        "notes.txt",
        "pointer-00000002",
    ]


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
    assert "still on its way" in caplog.text
    refusing.go.set()
    first.finish()
    assert resumed(tmp_path / "b", memory) == 29


def test_no_watchdog_ends_a_run_that_waits_for_its_last_upload(
    memory: str, refusing: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooktrain.checkpoint.store._BEAT_SECONDS", 0.01)
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    refusing.go.clear()
    offer(first, 9)
    finishing = threading.Thread(target=first.finish)
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


def test_what_a_machine_that_still_trains_replaces_while_it_is_fetched_is_no_loss(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path / "a", memory)
    save(first, 9)

    def copy_late(address: str, file: Any) -> None:
        monkeypatch.undo()
        save(first, 19)
        save(first, 29)
        sources.copy_remote(address, file)

    monkeypatch.setattr("hooktrain.checkpoint.store.copy_remote", copy_late)
    assert resumed(tmp_path / "b", memory) == 29


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


def test_an_unknown_scheme_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        machine(tmp_path / "a", "nowhere://bucket")
    assert list(tmp_path.iterdir()) == []


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
    assert "given up" in caplog.text
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


def put_by_each(folder: Path, store: str, refuses: bool) -> list[str]:
    """Save shards; the names of the files that this rank puts there. The first waits for others."""
    put = LocalFileSystem.put_file
    names = []

    def recorded(system: Any, path: str, target: str) -> None:
        if comm.get_rank() > 0 and refuses:
            raise PermissionError("denied")
        if comm.is_main_process() and not refuses:
            wait_until(lambda: list(folder.parent.glob("store/*__1_0.distcp")))
        names.append(Path(target).name.split("-", 2)[-1])
        put(system, path, target)

    LocalFileSystem.put_file = recorded
    checkpointer = Checkpointer(make_sharded(), folder, sharded=True, store=store)
    checkpointer.begin_run(is_new=True)
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.give_up()  # it waits for the upload
    return sorted(names)


def test_each_rank_puts_its_shards_and_the_main_process_what_is_missing(
    tmp_path: Path,
) -> None:
    of_main = [".metadata", "__0_0.distcp", "manifest.pth", "state.pth"]
    of_main = [f"model_0000009.{file}" for file in of_main]
    shards = ["model_0000009.__1_0.distcp"]
    for refuses in (False, True):
        folder = tmp_path / str(refuses)
        store = f"file://{folder}/store"
        main, other = run_ranks(put_by_each, 2, folder / "a", store, refuses)
        assert main == (sorted(of_main + shards) if refuses else of_main)
        assert other == ([] if refuses else shards)
        alone = Checkpointer(make_model(), folder / "b", store=store)
        assert alone.resume_or_load("")["iteration"] == 9


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


def test_shards_that_others_have_put_there_take_no_request_each(
    memory: str, tmp_path: Path, lists: list[str]
) -> None:
    first = machine(tmp_path / "a", memory, sharded=True)
    first.begin_run(is_new=True)
    offer(first, 9)
    for rank in range(1, 9):
        shard = tmp_path / "a" / "model_0000009" / f"__{rank}_0.distcp"
        shard.write_bytes(b"of another rank")
    first.finish()
    lists.clear()
    first.finish()
    assert len(lists) == 2  # before the files, and before the pointer


def test_a_file_and_what_is_beside_it_take_as_few_requests(
    memory: str, tmp_path: Path, lists: list[str]
) -> None:
    first = machine(tmp_path / "a", memory)
    first.begin_run(is_new=True)
    write_beside(tmp_path / "a")
    lists.clear()
    offer(first, 9)
    first.give_up()  # it waits for the upload
    assert len(lists) == 2
