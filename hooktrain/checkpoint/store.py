"""A store beside the disk, from which another machine goes on with a run.

A store is any address that fsspec knows, such as ``s3://bucket/run``. The name of each file in it
has the time and the size of the file that was put there, so that none replaces another one. The
file ``pointer.json`` names those of the newest checkpoint and of the one before. It is written when
all of them are there. Its token is that of the process that has begun last: only that one goes on.
"""

import json
import logging
import os
import re
import socket
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
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.file_io import AnyPath, atomic_write, replacing, sweep

logger = logging.getLogger(__name__)

_POINTER = "pointer.json"
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
# The names that a run gives to its files in a store. Others may be anybody's.
_OF_A_RUN = re.compile(r"\d{18,}-\d+-.+")


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
        self._is_disk = getattr(self._system, "local_file", False)
        self._folder = Path(folder)
        self._token = f"{uuid4()} on {socket.gethostname()}"

    def begin(self, *, is_new: bool) -> None:
        """Claim the store for this process.

        Args:
            is_new: whether the run has loaded no checkpoint.

        Raises:
            ValueError: if it is new, and checkpoints are in the store.
        """
        checkpoints = self._read()
        if is_new and checkpoints:
            raise ValueError(
                f"there is a run in the store {self.address!r}: resume it, or give "
                "another address"
            )
        if self._is_disk:
            os.makedirs(self._root, exist_ok=True)
        self._write(checkpoints)
        if self._is_disk:
            sweep(self._root)

    def fetch(self) -> None:
        """Bring the run into the folder, if its newest checkpoint is newer than the folder's.

        If that is broken, the one before it is taken.

        Raises:
            CorruptCheckpointError: if none is intact, and the folder has none.
            OSError: if the store or the disk fails, or files are missing there.
        """
        here = pointed_iteration(self._folder, read_pointer(self._folder))
        checkpoints = self._read()
        try:
            self._fetch_newer(checkpoints, here)
        except FileNotFoundError:
            # A machine that still trains replaces what is being fetched.
            if self._read() == checkpoints:
                raise
            self.fetch()

    def _fetch_newer(self, checkpoints: list[Any], here: int | None) -> None:
        newer = [
            saved for saved in checkpoints if here is None or saved["iteration"] > here
        ]
        while newer:
            saved = newer.pop()
            try:
                self._fetch(**saved)
                return
            except (CorruptCheckpointError, FileNotFoundError) as error:
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
        write_iteration(self._folder, iteration)
        write_pointer(self._folder, name)  # last: after a kill all is fetched again

    def offer(self) -> None:
        """Begin to put the newest checkpoint of the folder into the store, in a thread.

        If the one before is still on its way, or has failed, the log says so.

        Raises:
            StoreTakenError: if that has found that another process goes on with the run.
        """
        if self.worker.wait(0):
            self.worker.submit(self._try_upload, daemon=True)
        else:
            message = "This checkpoint does not go to %s, since one is still on its way"
            logger.warning(message, self.address)

    def finish(self) -> None:
        """Put the newest checkpoint into the store, as the folder is at the end of the run.

        Raises:
            StoreTakenError: if another process goes on with the run.
            Exception: if the store refuses a file.
        """
        self.worker.wait()
        self._upload()

    def _try_upload(self) -> None:
        try:
            self._upload()
        except StoreTakenError:
            raise
        except Exception as error:  # each package raises its own
            message = "NOT IN THE STORE %s: %r. The next save tries again"
            logger.error(message, self.address, error)

    def _upload(self) -> None:
        name = read_pointer(self._folder)
        iteration = pointed_iteration(self._folder, name)
        if iteration is None:
            logger.warning("Nothing goes to %s without an iteration", self.address)
            return
        before = self._read(own=True)
        files = {}
        for pattern in (name, f"{name}/*", *_BESIDE):
            for path in filter(Path.is_file, self._folder.glob(pattern)):
                inside = path.relative_to(self._folder).as_posix()
                files[inside] = self._put(path, inside, _keys(before))
        # Later ones are of a past from which the run has not gone on.
        older = [saved for saved in before if saved["iteration"] < iteration]
        newest = {"name": name, "iteration": iteration, "files": files}
        checkpoints = [*older[-1:], newest]
        self._read(own=True)  # the upload may have taken long
        self._write(checkpoints)
        logger.info("%s is in the store %s", name, self.address)
        self._delete_all_but(_keys(checkpoints))

    # What is asked of a store.

    def _put(self, path: Path, inside: str, known: set[str]) -> str:
        """Put a file there, unless it is there already; its name there."""
        status = path.stat()
        key = f"{status.st_mtime_ns}-{status.st_size}-{inside.replace('/', '.')}"
        if key not in known:
            self._system.put_file(str(path), f"{self._root}/{key}")
        return key

    def _get(self, path: str, key: str, target: Path) -> None:
        """Bring a file, and verify its size; of a checkpoint its checksums, too."""
        if not _INSIDE.fullmatch(path):
            raise CorruptCheckpointError(f"{_POINTER} names the file {path!r}")
        target.parent.mkdir(exist_ok=True)
        with atomic_write(target) as file:
            copy_remote(f"{self.address}/{key}", file)
            with reading(f"{self.address}/{_POINTER}"):
                size = int(key.split("-")[1])
            # Metrics may have got further lines while they were being put there.
            if file.tell() < size:
                raise CorruptCheckpointError(
                    f"{path} has {file.tell()} bytes in the store, and had {size}"
                )
            file.flush()
            if path.endswith(".pth"):
                verify_file(file.name)

    def _read(self, *, own: bool = False) -> list[Any]:
        """The checkpoints that the pointer names, which must be this process's own, or not."""
        try:
            text = self._system.cat_file(f"{self._root}/{_POINTER}")
        except FileNotFoundError:
            return []
        with reading(f"{self.address}/{_POINTER}"):
            pointer = json.loads(text)
        if own and pointer["token"] != self._token:
            raise StoreTakenError(
                f"another process goes on with the run in {self.address!r}: "
                f"{pointer['token']}. So this one must end"
            )
        checkpoints: list[Any] = pointer["checkpoints"]
        return checkpoints

    def _write(self, checkpoints: list[Any]) -> None:
        pointer = {"token": self._token, "checkpoints": checkpoints}
        content = json.dumps(pointer, indent=1).encode()
        path = f"{self._root}/{_POINTER}"
        if not self._is_disk:
            self._system.pipe_file(path, content)
            return
        try:  # a kill could leave a half
            with atomic_write(path) as file:
                file.write(content)
        except FileNotFoundError:
            self._read(own=True)  # who has claimed the store has swept it
            raise

    def _delete_all_but(self, keys: set[str]) -> None:
        self._system.invalidate_cache()
        for path in self._system.ls(self._root, detail=False):
            key = os.path.basename(path)
            if key not in keys and _OF_A_RUN.fullmatch(key):
                self._system.rm_file(path)


def _keys(checkpoints: list[Any]) -> set[str]:
    """The names of the files of checkpoints in the store."""
    return {key for saved in checkpoints for key in saved["files"].values()}
