"""A store beside the disk, from which another machine can continue a run.

A store is any address that fsspec knows, such as ``s3://bucket/run``. It contains two kinds of
files, and no file ever replaces another:

- ``<time>-<size>-<path>`` is a file of the run, named by its time, size and path on the disk, with
  dots for the slashes in the path.
- ``pointer-<number>-<process>-<count>.json`` names the newest checkpoint, the one before it, and
  the files beside them, such as metrics. It is written once all of these are in the store. Only
  then is the previous pointer deleted, so a kill that leaves half a pointer does no harm.

Each process that continues the run claims the store by pointers with the next number: the last
claim counts, and the other processes must end.
"""

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
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
from hooktrain.utils.comm import on_all_ranks_patiently, on_main_process
from hooktrain.utils.file_io import AnyPath, atomic_write, replacing

logger = logging.getLogger(__name__)

# Names in the store, by the paths in the output folder.
Files = dict[str, str]

# The "name" of a file or a folder of shards in the output folder; its "iteration" if it is a
# checkpoint, else -1; and its "files".
Entry = dict[str, Any]

# Returns the paths of the files and folders of shards to upload with each checkpoint, such as
# metrics. Those that are missing or outside the output folder are skipped.
RunFiles = Callable[[], Iterable[AnyPath]]

_BEAT_SECONDS = 1.0
# How many beats the main process waits for the shards of other ranks, once its own are there.
_PATIENCE = 60
_KEY = re.compile(r"\d{18,}-\d+-[^/]+")
_POINTER = re.compile(r"pointer-\d{8}-.+\.json")
# Names of a run's files in a store, some of them temporary. Other files may be the user's.
_OF_A_RUN = re.compile(r"\d{18,}-\d+-[^/]+|\.?pointer-\d{8}-.+")


class StoreTakenError(RuntimeError):
    """Another process has taken over the run in the store."""


class Store:
    """Uploads the newest checkpoint of a folder to a store, and fetches it back.

    Each rank has a Store, which uploads and fetches its share of a folder of shards.

    Args:
        address: the address of a folder that no other run uses, such as ``s3://bucket/run``, or
            the absolute path of a folder on another disk.
        folder: the output folder, on a disk.

    Attributes:
        worker: the thread that uploads a checkpoint.

    Raises:
        ImportError: if a package for the address is not installed; the message names it.
        ValueError: if it is not an address or absolute path, has an unknown scheme, or lies in the
            output folder.
    """

    def __init__(self, address: AnyPath, folder: AnyPath) -> None:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        self.address = os.fspath(address).rstrip("/")
        system, root = fsspec.url_to_fs(self.address)
        self._system = DirFileSystem(root, system)  # in which the root is ""
        self._folder = Path(folder)
        self._is_local = getattr(system, "local_file", False)
        if self._is_local:
            is_inside = Path(root).resolve().is_relative_to(self._folder.resolve())
            if is_inside or not self.address.endswith(root):
                raise ValueError(
                    "a store must be an address, such as s3://bucket/run, or an absolute path "
                    f"outside the output folder, not {self.address!r}"
                )
        self.worker = BackgroundWorker("upload")
        self._rank = comm.get_rank()  # the thread may outlive the process group
        self._ranks = comm.get_world_size()
        self._claim = ""  # the prefix of the names of this process's pointers
        self._count = 0  # of its pointers
        self._entries: list[Entry] = []  # of its last pointer
        # The names and sizes of the files in the last listing, and of those uploaded since.
        self._there: dict[str, float] = {}

    def begin(self, *, is_new: bool) -> None:
        """Claim the store for this process. Not collective: the main process calls it.

        Args:
            is_new: whether the run has loaded no checkpoint.

        Raises:
            ValueError: if it is new, but the store has checkpoints.
        """
        entries = self.list_entries()
        if is_new and entries:
            raise ValueError(
                f"the store {self.address!r} already has a run: resume it, or use "
                "another address"
            )
        number = int(self._newest_pointer()[8:16] or 0) + 1
        # The name is unique, so that two processes that claim at once do not share a file.
        self._claim = f"pointer-{number:08}-{socket.gethostname()}-{uuid4()}-"
        self._write(entries)

    def names_to_resume(self, names: Iterable[str]) -> Iterator[str]:
        """The checkpoints to try, in the folder and in the store, newest first.

        One in the store is fetched when its turn comes, after those in the folder that are as new.
        Collective: each rank fetches its share.

        Args:
            names: the names of those in the folder, in their order. Where the iteration rises, the
                checkpoints of another run begin, which come last.

        Raises:
            CorruptCheckpointError: if no pointer is intact; at the end, if a checkpoint in the
                store was broken.
            OSError: if the store or the disk fails.
        """
        entries = on_main_process(self.list_entries)
        tried: list[Entry] = []
        lowest = math.inf
        for name in chain(names, [""]):
            iteration = on_main_process(partial(pointed_iteration, self._folder, name))
            if iteration is None or iteration > lowest:
                iteration = -1  # all checkpoints of the store come first
            lowest = iteration
            while entries and entries[-1]["iteration"] > lowest:
                saved = entries.pop()
                if saved in tried:
                    continue
                tried.append(saved)
                try:
                    self._fetch(saved, entries)
                    yield saved["name"]
                except (CorruptCheckpointError, FileNotFoundError) as error:
                    logger.warning(
                        "Passing over the checkpoint %s in %s: %s",
                        saved["name"],
                        self.address,
                        error,
                    )
                    # A machine that is still training may have replaced files.
                    entries = on_main_process(self.list_entries)
            if name:
                yield name
        if tried:
            raise CorruptCheckpointError(
                f"no checkpoint in {self.address} is intact: {[e['name'] for e in tried]}"
            )

    def _fetch(self, saved: Entry, others: list[Entry]) -> None:
        """Fetch a checkpoint into the folder, and first the files beside it that are intact."""
        logger.info("Fetching %s from %s", saved["name"], self.address)
        for each in others:
            try:
                if each["iteration"] < 0:
                    self.fetch(each)
            except CorruptCheckpointError as error:
                logger.error("LEFT OUT, since it is not intact: %s", error)
        self.fetch(saved)

        def tag() -> None:
            write_iteration(self._folder, saved["iteration"])
            # Last, so that after a kill everything is fetched again.
            write_pointer(self._folder, saved["name"])

        on_main_process(tag)

    def fetch(self, entry: Entry) -> None:
        """Fetch a file, or a folder of shards, and verify it. Collective."""
        from hooktrain.checkpoint.folders import CheckpointFolder

        target = self._folder / entry["name"]
        with ExitStack() as stack:

            def begin() -> Path:
                missing = self._missing(entry["files"])
                if missing:
                    raise CorruptCheckpointError(
                        f"{missing} is missing or truncated in {self.address}"
                    )
                target.parent.mkdir(parents=True, exist_ok=True)
                return stack.enter_context(replacing(target))

            def download() -> None:
                for path, key in self._share(entry["files"]).items():
                    local = temporary / os.path.relpath(path, entry["name"])
                    local.parent.mkdir(exist_ok=True)
                    with atomic_write(local) as file:
                        self._system.get_file(key, file.name)

            def verify() -> None:
                if temporary.is_dir():
                    CheckpointFolder(temporary).verify(self._rank, self._ranks)
                elif target.suffix == ".pth" and self._rank == 0:
                    verify_file(temporary)

            temporary = on_main_process(begin)
            on_all_ranks_patiently(download)
            on_all_ranks_patiently(verify)
            on_main_process(stack.close)  # the rename

    def start_upload(self, name: str, run_files: RunFiles) -> bool:
        """Start uploading a checkpoint to the store, in a thread.

        If the previous upload is still running, or has failed, the log says so. The other ranks
        upload their shares if the main process has started.

        Args:
            name: the name of the checkpoint in the folder to resume from.
            run_files: called by the main process in the thread.

        Returns:
            Whether the upload has started.

        Raises:
            StoreTakenError: on the main process, if the previous upload has found that another
                process has taken over the run.
        """

        def upload() -> None:
            try:
                self._upload(name, run_files)
            except StoreTakenError:
                raise
            except Exception as error:  # each package raises its own
                logger.error(
                    "NOT IN THE STORE %s: %r. It will be tried again",
                    self.address,
                    error,
                )

        if not self.worker.wait(0):
            logger.warning(
                "This checkpoint is not uploaded to %s: the previous upload is still running",
                self.address,
            )
            return False
        self.worker.submit(upload, daemon=True)
        return True

    def finish(self, run_files: RunFiles) -> None:
        """Upload the newest checkpoint and the files beside it, as they are at the end of the run.

        Each rank uploads its share.

        Raises:
            StoreTakenError: if another process has taken over the run.
            Exception: if the store refuses a file.
        """
        self.worker.wait()
        self._upload(read_pointer(self._folder), run_files)

    def _upload(self, name: str, run_files: RunFiles) -> None:
        iteration = pointed_iteration(self._folder, name)
        if iteration is None:
            logger.warning("Nothing is uploaded to %s: no iteration", self.address)
            return
        newest = self._entry(name, iteration)
        files = newest["files"]
        if not files:
            raise FileNotFoundError(f"{name} was deleted before it was uploaded")
        if self._rank > 0:
            self._put(self._share(files))
            return
        if not self._claim:
            self.begin(is_new=False)
        self._list()
        self._put(self._share(files))
        for _ in range(_PATIENCE):
            if not self._missing(files):
                break
            time.sleep(_BEAT_SECONDS)
            self._list()
        paths = [os.path.relpath(path, self._folder) for path in run_files()]
        beside = list(map(self._entry, filter(_is_inside, paths)))
        for each in (*beside, newest):
            self._put(each["files"])
        # Later ones are left over from a part of the run that was abandoned.
        older = [each for each in self._entries if 0 <= each["iteration"] < iteration]
        is_new = newest not in self._entries  # else only the files beside it may be new
        entries = [*beside, *older[-1:], newest]
        self._write([each for each in entries if each["files"]])
        if is_new:
            logger.info("%s is in the store %s", name, self.address)
        self._delete_old()

    def _entry(self, name: str, iteration: int = -1) -> Entry:
        files = {}
        place = self._folder / name
        for path in filter(Path.is_file, [place, *place.rglob("*")]):
            status = path.stat()
            inside = path.relative_to(self._folder).as_posix()
            key = f"{status.st_mtime_ns:018}-{status.st_size}-{inside}"
            files[inside] = key.replace("/", ".")
        return {"name": name, "iteration": iteration, "files": files}

    def _share(self, files: Files) -> Files:
        """The files that this rank uploads or fetches."""
        return dict(sorted(files.items())[self._rank :: self._ranks])

    # Requests to the store.

    def _list(self) -> None:
        """List the store; raise a StoreTakenError if another process has taken over the run."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls("", detail=True)
        except FileNotFoundError:
            found = []
        self._there = {
            each["name"]: each["size"]
            for each in found
            if each["type"] == "file"  # not a link
        }
        newest = self._newest_pointer()
        if newest[: len(self._claim)] > self._claim:
            raise StoreTakenError(
                f"another process has taken over the run in {self.address!r}: {newest}. "
                "So this one must end"
            )

    def _newest_pointer(self) -> str:
        """The name of the last pointer in the store, or ""."""
        return max(filter(_POINTER.fullmatch, self._there), default="")

    def _missing(self, files: Files) -> Files:
        """The files that the store lacks, or has only in part."""
        return {
            path: key
            for path, key in files.items()
            if self._there.get(key, -1) < int(key.split("-")[1])
        }

    def _put(self, files: Files) -> None:
        """Upload the files that the store lacks."""
        for path, key in self._missing(files).items():
            self._system.put_file(str(self._folder / path), key)
            self._there[key] = math.inf

    def list_entries(self) -> list[Entry]:
        """List the store; return the entries of its newest intact pointer."""
        self._list()
        try:
            return self._read()
        except FileNotFoundError:
            self._list()  # a machine that is still training has written the next one
            return self._read()

    def _read(self) -> list[Entry]:
        """The entries of the newest intact pointer: first other files, then checkpoints by age."""
        pointers = sorted(filter(_POINTER.fullmatch, self._there))
        while pointers:
            pointer = pointers.pop()
            try:
                text = self._system.cat_file(pointer)
                with reading(f"{self.address}/{pointer}"):
                    return list(map(_checked, json.loads(text)))
            except CorruptCheckpointError as error:
                if not pointers:
                    raise
                logger.warning("Going back to an earlier pointer: %s", error)
        return []

    def _write(self, entries: list[Entry]) -> None:
        """Write the next pointer."""
        self._count += 1
        content = json.dumps(entries).encode()
        name = f"{self._claim}{self._count:08}.json"
        if self._is_local:
            os.makedirs(self._system.path, exist_ok=True)
            with atomic_write(f"{self._system.path}/{name}") as file:
                file.write(content)  # it survives a power cut
        else:
            self._system.pipe_file(name, content)
        self._entries = entries

    def _delete_old(self) -> None:
        """Delete the files of runs in the store that the last pointer does not name."""
        # Other ranks may already be uploading their shares of a newer checkpoint.
        entries = [*self._entries, self._entry(read_pointer(self._folder))]
        needed = set().union(*[each["files"].values() for each in entries])
        try:
            for name in filter(_OF_A_RUN.fullmatch, self._there.keys() - needed):
                # A process that is taking over may be writing a pointer with a later number.
                if name.lstrip(".")[:16] <= self._claim[:16]:
                    self._system.rm_file(name)
        except Exception as error:
            logger.warning(
                "Old files stay in %s, which refuses to delete them: %r",
                self.address,
                error,
            )


def _is_inside(path: str) -> bool:
    """Whether a path stays inside the folder that it is relative to, and is not hidden."""
    return path[:1] not in "./" and os.path.normpath(path) == path


def _checked(entry: Entry) -> Entry:
    """Return an entry of a pointer after checking it, since it may be forged."""
    name, files = entry["name"], entry["files"]
    of_entry = [
        _is_inside(path) and f"{path}/".startswith(f"{name}/") for path in files
    ]
    if not (files and all([*of_entry, *map(_KEY.fullmatch, files.values())])):
        raise ValueError(f"it names {name!r} with {files!r}")
    return {**entry, "iteration": index(entry["iteration"])}
