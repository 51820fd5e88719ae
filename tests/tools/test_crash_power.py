"""A short campaign of power cuts, and its account of what they may lose."""

import importlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import CONTEXT

TOOLS = Path(__file__).parent.parent.parent / "tools"


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        power = importlib.import_module("crash_power")
        patch.setattr(power, "CONTEXT", CONTEXT)
        yield power


class Written:
    """Files in a folder, and the list of changes that a Recorder makes of them."""

    def __init__(self, tool: Any, folder: Path) -> None:
        self.folder, self.keep = folder / "out", folder / "keep"
        self.folder.mkdir()
        self.keep.mkdir()
        self._tool = tool
        self.disk = tool.Disk(self.folder)

    def change(self, kind: str, name: str, target: str = "") -> None:
        path = self.folder / name
        inode = size = 0
        if path.is_file():
            inode, size = path.stat().st_ino, path.stat().st_size
            second = self.keep / str(inode)
            if not second.exists():
                os.link(path, second)
        new = str(self.folder / target) if target else ""
        self.disk.record(kind, str(path), inode, size, new)

    def write(self, name: str, content: bytes, *, flushes: bool) -> None:
        self.change("write anew", name)
        (self.folder / name).write_bytes(content)
        if flushes:
            self.change("fsync", name)

    def rename(self, name: str, target: str, *, flushes: bool) -> None:
        self.change("rename", name, target)
        (self.folder / name).rename(self.folder / target)
        if flushes:
            self.change("fsync", "")

    def after_cuts(self) -> set[tuple[tuple[str, bytes], ...]]:
        """Each state of the folder that some power cuts have left."""
        assert self.disk.missing() == []
        states = set()
        for seed in range(60):
            draw = random.Random(seed)
            self._tool.cut_power(self.disk, self.keep, self.folder, draw)
            files = sorted(filter(Path.is_file, self.folder.rglob("*")))
            at = self.folder
            states.add(tuple((str(p.relative_to(at)), p.read_bytes()) for p in files))
        return states


def test_runs_whose_power_is_cut_end_as_undisturbed_ones(
    tool: Any, tmp_path: Path
) -> None:
    cuts = tool.Cuts(4, tmp_path)
    for number in (
        2,
        5,
    ):  # a folder of shards by one rank, files in the background by two
        cuts.attempt(number)
    assert cuts.failures == []
    assert cuts.cuts.total() >= 2
    assert list(tmp_path.glob("try-*")) == []


def test_a_file_that_was_flushed_and_renamed_in_a_flushed_folder_is_safe(
    tool: Any, tmp_path: Path
) -> None:
    written = Written(tool, tmp_path)
    written.write(".a", b"new", flushes=True)
    written.rename(".a", "a", flushes=True)
    assert written.after_cuts() == {(("a", b"new"),)}


def test_names_of_a_folder_that_was_not_flushed_may_be_old(
    tool: Any, tmp_path: Path
) -> None:
    written = Written(tool, tmp_path)
    written.write(".a", b"new", flushes=True)
    written.change("fsync", "")
    written.rename(".a", "a", flushes=False)
    assert written.after_cuts() == {((".a", b"new"),), (("a", b"new"),)}


def test_data_that_were_not_flushed_are_dropped_cut_zeroed_or_kept(
    tool: Any, tmp_path: Path
) -> None:
    written = Written(tool, tmp_path)
    written.write("a", b"safe", flushes=True)
    with open(written.folder / "a", "ab") as file:
        file.write(b"more")
    written.change("fsync", "")  # the folder's names, not the file's data
    left = {b"safe", b"safemo", b"safe\0\0\0\0", b"safemore"}
    assert written.after_cuts() == {(("a", each),) for each in left}


def test_deletions_reach_the_disk_in_any_order(tool: Any, tmp_path: Path) -> None:
    written = Written(tool, tmp_path)
    for name in ("a", "b"):
        written.write(name, b"", flushes=True)
    written.change("fsync", "")
    for name in ("a", "b"):
        written.change("remove", name)
        (written.folder / name).unlink()
    a, b = ("a", b""), ("b", b"")
    assert written.after_cuts() == {(), (a,), (b,), (a, b)}


def test_what_was_removed_in_a_renamed_folder_is_missing_in_the_old_one_too(
    tool: Any, tmp_path: Path
) -> None:
    written = Written(tool, tmp_path)
    written.change("mkdir", "old")
    (written.folder / "old").mkdir()
    written.write("old/a", b"", flushes=True)
    written.change("fsync", "old")
    written.change("fsync", "")
    written.rename("old", "new", flushes=False)
    written.change("remove", "new/a")
    (written.folder / "new" / "a").unlink()
    assert written.after_cuts() == {(), (("old/a", b""),), (("new/a", b""),)}


def test_the_checkpoint_that_no_power_cut_takes_is_the_one_whose_pointer_is_safe(
    tool: Any, tmp_path: Path
) -> None:
    written = Written(tool, tmp_path)
    assert written.disk.safe_iteration(written.keep) == -1
    for name, is_safe in (("model_0000002.pth", True), ("model_0000005.pth", False)):
        written.write(".tmp", name.encode(), flushes=True)
        written.rename(".tmp", "last_checkpoint", flushes=is_safe)
    assert written.disk.safe_iteration(written.keep) == 2
