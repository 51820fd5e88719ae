"""A store beside the disk, from which another machine goes on with a run.

A store is any address that fsspec knows, such as ``s3://bucket/run``. There are two kinds of files
in it, and none replaces another one:

- ``<time>-<size>-<path>`` is a file of the run. It had this time and size on the disk; dots stand
  for the slashes in its path.
- ``pointer-<number>-<process>-<count>.json`` names the newest checkpoint, the one before, and what
  is beside them, such as metrics. It is written when all of that is there. The pointer before it
  is deleted then, so that a kill that leaves half of one does no harm.

Each process that goes on with the run claims the store by pointers with the next number: the last
one counts, and the others must end.
"""

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import index
from pathlib import Path
from typing import Any
from uuid import uuid4

from hooktrain.checkpoint.files import CorruptCheckpointError, reading, verify_file
from hooktrain.checkpoint.resume import (
    pointed_iteration,
    read_pointer,
    write_iteration,
    write_pointer,
)
from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.file_io import AnyPath, atomic_write, replacing

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
"""The ``name`` of a file or a folder of shards in the output folder, the ``iteration`` of a
checkpoint, or -1 for what is beside, and the ``files``: names in the store by paths."""

RunFiles = Callable[[], Iterable[AnyPath]]
"""Returns the paths of the files and folders of shards that go into a store with each checkpoint,
such as metrics. Those that are missing or not in the output folder are left out."""

_BEAT_SECONDS = 1.0
# How long the main process waits for the shards of other ranks when its own are there.
_PATIENCE_SECONDS = 60.0
_KEY = re.compile(r"\d{18,}-\d+-[^/]+")
_POINTER = re.compile(r"pointer-\d{8}-.+\.json")
# The names that a run gives to its files in a store, some for a moment. Others may be of the user.
_OF_A_RUN = re.compile(rf"{_KEY.pattern}|\.?pointer-\d{{8}}-.+")


class StoreTakenError(RuntimeError):
    """Another process goes on with the run in the store."""


class Store:
    """Puts the newest checkpoint of a folder into a store, and brings it back. Not collective.

    Args:
        address: of a folder that no other run uses, such as ``s3://bucket/run``; or the absolute
            path of one on another disk.
        folder: the output folder, on a disk.

    Attributes:
        worker: puts a checkpoint there in a thread.

    Raises:
        ImportError: if a package for the address is not installed; it says which.
        ValueError: if it is not an address or absolute path, has an unknown scheme, or lies in the
            output folder.
    """

    def __init__(self, address: AnyPath, folder: AnyPath) -> None:
        import fsspec

        self.address = os.fspath(address).rstrip("/")
        self._system, self._root = fsspec.url_to_fs(self.address)
        self._folder = Path(folder)
        self._is_local = getattr(self._system, "local_file", False)
        if self._is_local:
            root, folder = Path(self._root).resolve(), self._folder.resolve()
            if root.is_relative_to(folder) or not self.address.endswith(self._root):
                raise ValueError(
                    f"the store {self.address!r} would be the folder {self._root}: give an "
                    "address, such as s3://bucket/run, or an absolute path outside of the output "
                    "folder"
                )
        self.worker = BackgroundWorker("upload")
        self._rank = comm.get_rank()  # the thread may outlive the process group
        self._claim = ""  # the beginning of the names of this process's pointers
        self._count = 0  # of its pointers
        self._entries: list[Entry] = []  # of its last pointer

    def begin(self, *, is_new: bool) -> None:
        """Claim the store for this process.

        Args:
            is_new: whether the run has loaded no checkpoint.

        Raises:
            ValueError: if it is new, and checkpoints are in the store.
        """
        there, entries = self._look()
        if is_new and entries:
            raise ValueError(
                f"there is a run in the store {self.address!r}: resume it, or give "
                "another address"
            )
        number = int(_newest_pointer(there)[8:16] or 0) + 1
        # No other process has this name, so two that claim it at once do not share a file.
        self._claim = f"pointer-{number:08}-{socket.gethostname()}-{uuid4()}-"
        self._write(entries)

    def names_to_resume(self, names: Iterable[str]) -> Iterator[str]:
        """The checkpoints to try, of the folder and of the store, the newest ones first.

        One of the store is fetched when its turn comes: after those of the folder that are as new.

        Args:
            names: of those in the folder, in their order. Where the iteration rises, the
                checkpoints of another run begin, which come last.

        Raises:
            CorruptCheckpointError: if no pointer is intact; at the end, if a checkpoint in the
                store was broken.
            OSError: if the store or the disk fails.
        """
        there, stored = self._look()
        broken = []
        lowest = math.inf
        for name in chain(names, [""]):
            iteration = pointed_iteration(self._folder, name)
            if iteration is None or iteration > lowest:
                iteration = -1  # all of the store come first
            lowest = iteration
            while stored and stored[-1]["iteration"] > lowest:
                saved = stored.pop()
                try:
                    self._fetch(saved, stored, there)
                    yield saved["name"]
                except (CorruptCheckpointError, FileNotFoundError) as error:
                    message = "Passing over the checkpoint %s in %s: %s"
                    logger.warning(message, saved["name"], self.address, error)
                    broken.append(saved)
                    # A machine that still trains may have replaced files.
                    there, entries = self._look()
                    stored = [each for each in entries if each not in broken]
            if name:
                yield name
        if broken:
            raise CorruptCheckpointError(
                f"in {self.address} these are broken: {[each['name'] for each in broken]}"
            )

    def _fetch(self, saved: Entry, others: list[Entry], there: dict[str, int]) -> None:
        """Bring a checkpoint into the folder, and what is intact of the files beside it."""
        logger.info("Fetching %s from %s", saved["name"], self.address)
        self._get(saved, there)
        for each in others:
            try:
                if each["iteration"] < 0:
                    self._get(each, there)
            except (CorruptCheckpointError, FileNotFoundError) as error:
                if self._list() != there:
                    raise
                logger.error("LEFT OUT, since it is not intact: %s", error)
        write_iteration(self._folder, saved["iteration"])
        # Last, so that after a kill all of it is fetched again.
        write_pointer(self._folder, saved["name"])

    def _get(self, entry: Entry, there: dict[str, int]) -> None:
        """Bring a file, or a folder of shards, and verify it."""
        from hooktrain.checkpoint.folders import verify_folder

        target = self._folder / entry["name"]
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            for path, key in entry["files"].items():
                local = temporary / os.path.relpath(path, entry["name"])
                local.parent.mkdir(exist_ok=True)
                with atomic_write(local) as file:
                    if key in there:  # a link is not
                        self._system.get_file(f"{self._root}/{key}", file.name)
                    # Metrics may have got further lines while they were being put there.
                    if os.path.getsize(file.name) < _size(key):
                        raise CorruptCheckpointError(
                            f"{path} is missing or cut in {self.address}"
                        )
            if temporary.is_dir():
                verify_folder(temporary)
            elif target.suffix == ".pth":
                verify_file(temporary)

    def offer(self, run_files: RunFiles) -> bool:
        """Begin to put the newest checkpoint of the folder into the store, in a thread.

        If the one before is still on its way, or has failed, the log says so. The other ranks put
        their own shards if the main process has begun.

        Args:
            run_files: the main process calls it in the thread.

        Returns:
            Whether it has begun.

        Raises:
            StoreTakenError: on the main process, if the upload before has found that another
                process goes on with the run.
        """
        is_free = self.worker.wait(0)
        if is_free:
            self.worker.submit(partial(self._try_upload, run_files), daemon=True)
        else:
            logger.warning(
                "This checkpoint does not go to %s, since one is still on its way",
                self.address,
            )
        return is_free

    def finish(self, run_files: RunFiles) -> None:
        """Put the newest checkpoint into the store, as the folder is at the end of the run.

        Raises:
            StoreTakenError: if another process goes on with the run.
            Exception: if the store refuses a file.
        """
        self.worker.wait()
        if self._rank == 0:
            self._upload(run_files)

    def _try_upload(self, run_files: RunFiles) -> None:
        try:
            self._upload(run_files)
        except StoreTakenError:
            raise
        except Exception as error:  # each package raises its own
            logger.error(
                "NOT IN THE STORE %s: %r. It is tried again", self.address, error
            )

    def _upload(self, run_files: RunFiles) -> None:
        name = read_pointer(self._folder)
        iteration = pointed_iteration(self._folder, name)
        if iteration is None:
            logger.warning("Nothing goes to %s without an iteration", self.address)
            return
        newest = self._entry(name, iteration)
        files = newest["files"]
        if self._rank > 0:
            self._put(files, {}, self._rank)
            return
        if not files:
            raise FileNotFoundError(f"{name} was deleted before it was in the store")
        if not self._claim:
            self.begin(is_new=False)
        there = self._list()
        self._put(files, there, self._rank)
        paths = [os.path.relpath(path, self._folder) for path in run_files()]
        beside = []
        for path in filter(_is_inside, paths):
            beside.append(self._entry(path))
            self._put(beside[-1]["files"], there)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _are_there(files, there) and time.monotonic() < deadline:
            time.sleep(_BEAT_SECONDS)
            there = self._list()
        self._put(files, there)
        known = self._entries
        # Later ones are of a past from which the run has not gone on.
        older = [each for each in known if 0 <= each["iteration"] < iteration]
        entries = [*beside, *older[-1:], newest]
        self._write([each for each in entries if each["files"]])
        if name not in [each["name"] for each in known]:  # what is beside it may be new
            logger.info("%s is in the store %s", name, self.address)
        self._delete_old(there)

    def _entry(self, name: str, iteration: int = -1) -> Entry:
        files = {}
        place = self._folder / name
        for path in filter(Path.is_file, [place, *place.rglob("*")]):
            status = path.stat()
            inside = path.relative_to(self._folder).as_posix()
            flat = inside.replace("/", ".")
            files[inside] = f"{status.st_mtime_ns:018}-{status.st_size}-{flat}"
        return {"name": name, "iteration": iteration, "files": files}

    # What is asked of a store.

    def _list(self) -> dict[str, int]:
        """The names and sizes of the files there, if this process may still write there."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            found = []
        files = [each for each in found if each["type"] == "file"]
        there = {os.path.basename(each["name"]): each["size"] for each in files}
        newest = _newest_pointer(there)
        if newest > self._claim and not newest.startswith(self._claim):
            raise StoreTakenError(
                f"another process goes on with the run in {self.address!r}: {newest}. "
                "So this one must end"
            )
        return there

    def _look(self) -> tuple[dict[str, int], list[Entry]]:
        """What is there, and what the newest intact pointer names."""
        there = self._list()
        try:
            return there, self._read(there)
        except FileNotFoundError:
            there = self._list()  # a machine that still trains has written the next one
            return there, self._read(there)

    def _put(
        self, files: dict[str, str], there: dict[str, int], rank: int | None = None
    ) -> None:
        """Put files there, unless they are there; only those of a rank if it is given."""
        for path, key in files.items():
            is_wanted = rank in (None, _rank_of(path))
            if is_wanted and not _are_there({path: key}, there):
                self._system.put_file(str(self._folder / path), f"{self._root}/{key}")
                there[key] = _size(key)

    def _read(self, there: Iterable[str]) -> list[Entry]:
        """What the newest intact pointer names: beside, and the checkpoints, the newest last."""
        pointers = sorted(filter(_POINTER.fullmatch, there))
        while pointers:
            pointer = f"{self._root}/{pointers.pop()}"
            try:
                text = self._system.cat_file(pointer)
                with reading(pointer):
                    return list(map(_checked, json.loads(text)))
            except CorruptCheckpointError as error:
                if not pointers:
                    raise
                logger.warning("Going back to an earlier pointer: %s", error)
        return []

    def _write(self, entries: list[Entry]) -> None:
        """Write the next pointer."""
        self._count += 1
        content = json.dumps(entries, indent=1).encode()
        path = f"{self._root}/{self._claim}{self._count:08}.json"
        if self._is_local:
            os.makedirs(self._root, exist_ok=True)
            with atomic_write(path) as file:  # it survives a power cut
                file.write(content)
        else:
            self._system.pipe_file(path, content)
        self._entries = entries

    def _delete_old(self, there: Iterable[str]) -> None:
        """Delete the files of runs there that the last pointer does not name."""
        needed: set[str] = set()
        for each in self._entries:
            needed.update(each["files"].values())
        try:
            for name in filter(_OF_A_RUN.fullmatch, set(there) - needed):
                # A process that takes over may be writing a pointer with a later number.
                if name.lstrip(".")[:16] <= self._claim[:16]:
                    self._system.rm_file(f"{self._root}/{name}")
        except Exception as error:
            message = "Old files stay in %s, which refuses to delete them: %r"
            logger.warning(message, self.address, error)


def _newest_pointer(there: Iterable[str]) -> str:
    """The last one of the pointers among names, or ""."""
    return max(filter(_POINTER.fullmatch, there), default="")


def _size(key: str) -> int:
    """The size that a file had when it was put there."""
    return int(key.split("-")[1])


def _are_there(files: dict[str, str], there: dict[str, int]) -> bool:
    return all(there.get(key, -1) >= _size(key) for key in files.values())


def _rank_of(path: str) -> int:
    """The rank whose shard it is, by the name that torch gives it; 0 for all other files."""
    shard = re.search(r"/__(\d+)_", path)
    return int(shard[1]) if shard else 0


def _is_inside(path: str) -> bool:
    """Whether it is the path of something in a folder, and not hidden there."""
    return path[:1] not in "./" and os.path.normpath(path) == path


def _checked(entry: Entry) -> Entry:
    """An entry of a pointer, which may be forged."""
    name, files = entry["name"], entry["files"]
    for path, key in files.items():
        is_of_entry = _is_inside(path) and f"{path}/".startswith(f"{name}/")
        if not (is_of_entry and _KEY.fullmatch(key)):
            raise ValueError(f"it names {path!r} as {key!r}")
    if not files:
        raise ValueError(f"it names no file of {name!r}")
    return {"name": name, "iteration": index(entry["iteration"]), "files": files}
