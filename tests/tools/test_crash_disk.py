"""Power cuts of a real file system, and that the tool would notice a checkpoint that is lost."""

import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hooktrain.checkpoint.files import save_file
from hooktrain.checkpoint.resume import write_pointer
from processes import CONTEXT

TOOLS = Path(__file__).parent.parent.parent / "tools"


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        disk = importlib.import_module("crash_disk")
        for name in ("crash_disk", "crash_campaign", "crash_faults"):
            patch.setattr(importlib.import_module(name), "CONTEXT", CONTEXT)
        yield disk


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Path]:
    """A folder for file systems, which are unmounted in the end."""
    if os.getuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("only root can mount an ext4 file system")
    yield tmp_path
    for line in Path("/proc/mounts").read_text().splitlines():
        if line.split()[1].startswith(str(tmp_path)):
            subprocess.run(["umount", "--lazy", line.split()[1]], check=True)


def make_disk(tool: Any, folder: Path) -> None:
    """Mount a new file system, or skip, as in a container that has no loop devices."""
    try:
        tool.make_disk(folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no ext4 file system can be mounted here: {error}")


def test_what_was_flushed_survives_a_cut_and_what_was_not_is_lost(
    tool: Any, disks: Path
) -> None:
    disk = disks / "disk"
    make_disk(tool, disk)
    save_file({"iteration": 1}, disk / "flushed.pth")
    (disk / "written").write_text("to memory")
    tool.cut_off(disk, tool.DROPS_JOURNAL)
    with pytest.raises(OSError, match="Input/output error"):
        (disk / "later").touch()
    tool.mount_again(disk)
    assert sorted(os.listdir(disk)) == ["flushed.pth", "lost+found"]


def test_runs_whose_power_fails_end_as_undisturbed_ones(tool: Any, disks: Path) -> None:
    make_disk(tool, disks / "can")
    campaign = tool.DiskCuts(3, 1, disks, rounds=(1, 2))
    campaign.attempt(0)
    assert campaign.failures == []
    assert campaign.struck.total() >= 1


def test_a_checkpoint_that_is_lost_is_reported(tool: Any, tmp_path: Path) -> None:
    save_file({"model": {}, "iteration": 6}, tmp_path / "model_0000006.pth")
    write_pointer(tmp_path, "model_0000006.pth")
    tool.check_newest(tmp_path, 6)
    with pytest.raises(tool.LostRunError, match=r"iteration 13 .*'model_0000006\.pth'"):
        tool.check_newest(tmp_path, 13)
    (tmp_path / "last_checkpoint").unlink()
    with pytest.raises(tool.LostRunError, match=r"iteration 0 .*''"):
        tool.check_newest(tmp_path, 0)
