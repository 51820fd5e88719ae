"""A store beside the disk, from which another machine goes on with a run.

A store is any address that fsspec knows, such as ``s3://bucket/run``. The name of each file in it
has the time and the size of the file that was put there, so that none replaces another one. A
pointer, ``pointer-<number>-<process>.json``, names those of the newest checkpoint and of the one
before. It is written when all of them are there. Each process that goes on with the run writes a
pointer of its own, with the next number: the last one counts, and the others must end.
"""

import json
import logging
import os
import re
import socket
from collections.abc import Iterable
from itertools import groupby
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
from hooktrain.checkpoint.sources import copy_remote
from hooktrain.utils import comm, timer
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.file_io import AnyPath, atomic_write, replacing

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
# What goes up with a checkpoint. The best model is a file or a folder too.
_BESIDE = (
    "config.json",
    "metrics.json",
    "*best.pth",
    "*best/*",
    "events.out.tfevents.*",
)
# A visible file, or any in a folder: the pointer may be forged.
_INSIDE = re.compile(r"[^./][^/]*(/\.?[^./][^/]*)?")
_POINTER = re.compile(r"pointer-(\d{8})-.+\.json")
# The names that a run gives to its files in a store, some for a moment. Others may be anybody's.
_OF_A_RUN = re.compile(r"\d{18,}-\d+-.+|\.?pointer-\d{8}-.+")


class StoreTakenError(RuntimeError):
    """Another process goes on with the run in the store."""


class Store:
    """Puts the newest checkpoint of a folder into a store, and brings it back. Not collective.

    Args:
        address: of a folder that no other run uses, such as ``s3://bucket/run``.
        folder: the output folder, on a disk.

    Attributes:
        worker: puts a checkpoint there in a thread.

    Raises:
        ImportError: if a package for the address is not installed; it says which.
        ValueError: if the address begins with a scheme that nobody knows.
    """

    def __init__(self, address: AnyPath, folder: AnyPath) -> None:
        import fsspec

        self.address = os.fspath(address).rstrip("/")
        self.worker = BackgroundWorker("upload")
        self._system, self._root = fsspec.url_to_fs(self.address)
        self._folder = Path(folder)
        self._rank = comm.get_rank()  # the thread may outlive the process group
        self._pointer = ""  # the name of this process's own

    def begin(self, *, is_new: bool) -> None:
        """Claim the store for this process.

        Args:
            is_new: whether the run has loaded no checkpoint.

        Raises:
            ValueError: if it is new, and checkpoints are in the store.
        """
        there = self._list()
        checkpoints = self._read(there)
        if is_new and checkpoints:
            raise ValueError(
                f"there is a run in the store {self.address!r}: resume it, or give "
                "another address"
            )
        number = int(_newest_pointer(there)[8:16] or 0) + 1
        # No other process has this name, so two that claim it at once do not share a file.
        self._pointer = f"pointer-{number:08}-{socket.gethostname()}-{uuid4()}.json"
        self._write(checkpoints)

    def fetch(self) -> None:
        """Bring the run into the folder, if its newest checkpoint is newer than the folder's.

        If that is broken, the one before it is taken.

        Raises:
            CorruptCheckpointError: if none is intact, and the folder has none.
            OSError: if the store or the disk fails, or files are missing there.
        """
        here = pointed_iteration(self._folder, read_pointer(self._folder))
        there = self._list()
        newer = [
            saved
            for saved in self._read(there)
            if here is None or saved["iteration"] > here
        ]
        while newer:
            saved = newer.pop()
            try:
                self._fetch(**saved)
                break
            except (CorruptCheckpointError, FileNotFoundError) as error:
                if self._list() != there:  # a machine that still trains replaces files
                    self.fetch()
                    break
                message = "Passing over the checkpoint %s in %s: %s"
                logger.warning(message, saved["name"], self.address, error)
                if here is None and not newer:
                    raise

    def _fetch(self, name: str, iteration: int, files: dict[str, str]) -> None:
        from hooktrain.checkpoint.folders import verify_folder

        logger.info("Fetching %s from %s", name, self.address)
        self._folder.mkdir(parents=True, exist_ok=True)
        for first, paths in groupby(sorted(files), lambda path: path.partition("/")[0]):
            with replacing(self._folder / first) as temporary:
                for path in paths:
                    inside = path.removeprefix(first).lstrip("/")
                    self._get(path, files[path], temporary / inside)
                if temporary.is_dir():
                    verify_folder(temporary)
                elif first.endswith(".pth"):
                    verify_file(temporary)
        write_iteration(self._folder, iteration)
        write_pointer(self._folder, name)  # last: after a kill all is fetched again

    def offer(self) -> None:
        """Begin to put the newest checkpoint of the folder into the store, in a thread.

        Each process puts its own shards. The main process then puts what is missing there, and the
        pointer. If the one before is still on its way, or has failed, the log says so.

        Raises:
            StoreTakenError: if that has found that another process goes on with the run.
        """
        if self.worker.wait(0):
            self.worker.submit(self._try_upload, daemon=True)
        else:
            logger.warning(
                "This checkpoint does not go to %s, since one is still on its way",
                self.address,
            )

    def finish(self) -> None:
        """Put the newest checkpoint into the store, as the folder is at the end of the run.

        Raises:
            StoreTakenError: if another process goes on with the run.
            Exception: if the store refuses a file.
        """
        self._wait()
        self.worker.submit(self._upload, daemon=True)
        self._wait()

    def _wait(self) -> None:
        while not self.worker.wait(_BEAT_SECONDS):
            timer.beat()  # an upload may take longer than a watchdog allows

    def _try_upload(self) -> None:
        try:
            self._upload()
        except StoreTakenError:
            raise
        except Exception as error:  # each package raises its own
            logger.error(
                "NOT IN THE STORE %s: %r. It is tried again", self.address, error
            )

    def _upload(self) -> None:
        name = read_pointer(self._folder)
        iteration = pointed_iteration(self._folder, name)
        if iteration is None:
            logger.warning("Nothing goes to %s without an iteration", self.address)
            return
        if self._rank > 0:
            self._put(f"{name}/__{self._rank}_*")  # as torch names its shards
            return
        if not self._pointer:
            self.begin(is_new=False)
        # The shards come last, and its own first, so that other ranks have time to put theirs.
        files = self._put(name, f"{name}/[!_]*", *_BESIDE, f"{name}/__*")
        there = self._list()  # the upload may have taken long
        known = self._read(there)
        # Later ones are of a past from which the run has not gone on.
        older = [each for each in known if each["iteration"] < iteration]
        newest = {"name": name, "iteration": iteration, "files": files}
        checkpoints = [*older[-1:], newest]
        self._write(checkpoints)
        if name not in [each["name"] for each in known]:  # what is beside it may be new
            logger.info("%s is in the store %s", name, self.address)
        named = [each["files"].values() for each in checkpoints]
        self._delete(set(there).difference([self._pointer], *named))

    # What is asked of a store.

    def _list(self) -> dict[str, int]:
        """The names and sizes of the files there, if this process may still write there."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            found = []
        there = {os.path.basename(each["name"]): each["size"] for each in found}
        newest = _newest_pointer(there)
        if self._pointer and newest > self._pointer:
            raise StoreTakenError(
                f"another process goes on with the run in {self.address!r}: {newest}. "
                "So this one must end"
            )
        return there

    def _put(self, *patterns: str) -> dict[str, str]:
        """Put files of the folder there, unless they are there; their names by their paths."""
        there = self._list()
        files = {}
        for pattern in patterns:
            for path in filter(Path.is_file, sorted(self._folder.glob(pattern))):
                status = path.stat()
                size, inside = status.st_size, path.relative_to(self._folder).as_posix()
                key = f"{status.st_mtime_ns}-{size}-{inside.replace('/', '.')}"
                if "/__" in inside and there.get(key) != size:
                    there = self._list()  # its rank may have put it there meanwhile
                if there.get(key) != size:
                    self._system.put_file(str(path), f"{self._root}/{key}")
                files[inside] = key
        return files

    def _get(self, path: str, key: str, target: Path) -> None:
        """Bring a file, and verify its size."""
        if not _INSIDE.fullmatch(path):
            raise CorruptCheckpointError(f"the pointer names the file {path!r}")
        target.parent.mkdir(exist_ok=True)
        with atomic_write(target) as file:
            copy_remote(f"{self.address}/{key}", file)
            size = int(key.split("-")[1])
            # Metrics may have got further lines while they were being put there.
            if file.tell() < size:
                raise CorruptCheckpointError(
                    f"{path} has {file.tell()} bytes in the store, and had {size}"
                )

    def _read(self, there: dict[str, int]) -> list[Any]:
        """The checkpoints that the newest pointer names."""
        pointer = _newest_pointer(there)
        if not pointer:
            return []
        text = self._system.cat_file(f"{self._root}/{pointer}")
        with reading(f"{self.address}/{pointer}"):
            checkpoints: list[Any] = json.loads(text)
        return checkpoints

    def _write(self, checkpoints: list[Any]) -> None:
        """Write the pointer."""
        content = json.dumps(checkpoints, indent=1).encode()
        path = f"{self._root}/{self._pointer}"
        if not getattr(self._system, "local_file", False):
            self._system.pipe_file(path, content)
            return
        os.makedirs(self._root, exist_ok=True)
        with atomic_write(path) as file:  # else a kill could leave a half
            file.write(content)

    def _delete(self, names: Iterable[str]) -> None:
        """Delete those files of runs that are among the names."""
        try:
            for name in filter(_OF_A_RUN.fullmatch, names):
                # A process that takes over may be writing a pointer with a later number.
                if name.lstrip(".")[:16] <= self._pointer[:16]:
                    self._system.rm_file(f"{self._root}/{name}")
        except Exception as error:
            message = "Old files stay in %s, which refuses to delete them: %r"
            logger.warning(message, self.address, error)


def _newest_pointer(there: Iterable[str]) -> str:
    """The last one of the pointers among names, or ""."""
    return max(filter(_POINTER.fullmatch, there), default="")
