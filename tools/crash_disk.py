"""Cut the power of a real file system, and check that each run ends as if nothing had happened.

    sudo unshare --mount python tools/crash_disk.py --cuts 100

The output folder of a run is its own ext4 file system, stored in a file. Linux can shut it down
(``EXT4_IOC_SHUTDOWN``): everything that is not in its journal or its data blocks at that moment is
lost, as in a power cut, and each further call fails. Then the processes are killed, the file system
is mounted again, which replays the journal, and the same command continues. A checkpoint that was
complete must still exist, and at the end the run must equal an undisturbed one. The scripts and the
comparison are those of tools/crash_campaign.py.
"""

import argparse
import fcntl
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from crash_campaign import Campaign, preload_forkserver
from crash_faults import CONTEXT, LostRunError, end, kill, train
from crash_scripts import Variant

from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import read_pointer

_SHUTDOWN = 0x8004587D
DROPS_JOURNAL, WRITES_JOURNAL = 2, 1  # the part that has not reached the disk
_MEGABYTES = 48
_UNMOUNT_SECONDS = 10.0
_SAVING = re.compile(rb"Saving checkpoint to .*_(\d{7})")


class DiskCuts(Campaign):
    """A campaign whose faults shut the file system down; see the base class."""

    kinds: ClassVar = {"the power fails": 3, "the file system fails": 1}

    def variant(self, number: int, folder: Path, draw: random.Random) -> Variant:
        """See the base class. Also creates the file system."""
        make_disk(folder)
        return super().variant(number, folder, draw)

    def disturb(
        self, folder: Path, variant: Variant, fault: str, seconds: float, draw: Any
    ) -> tuple[int, bool]:
        """Start a run, and shut its file system down, usually while it saves."""
        log = Path(f"{folder}.log")
        before = log.stat().st_size
        process = CONTEXT.Process(target=train, args=(str(folder), variant, None))
        process.start()
        begins = draw.randint(0, 7)
        while process.is_alive() and len(_saves(log, before)) < begins:
            time.sleep(0.001)
        process.join(draw.uniform(0, 0.06 if begins else seconds / 3))
        saves = _saves(log, before)
        hit = process.is_alive()
        is_power = fault == "the power fails"
        cut_off(folder, DROPS_JOURNAL if is_power else WRITES_JOURNAL)
        process.join(draw.choice((0, 0.2)))  # the run may see the errors
        kill(process.pid)
        end(process)
        mount_again(folder)
        if saves[:-1]:  # the last one may not be complete
            check_newest(folder, saves[-2])
        return process.exitcode, hit

    def comparable(self, outcome: Any, variant: Variant) -> Any:
        """All metrics of an iteration as one row.

        If detectron2's last row is lost, it is written again together with the final evaluation's.
        """
        rows: dict[int, dict[str, Any]] = {}
        for row in outcome["rows"]:
            rows.setdefault(row["iteration"], {}).update(row)
        return {**outcome, "rows": list(rows.values())}

    def forget(self, folder: Path, variant: Variant) -> None:
        """See the base class. Also removes the file system."""
        _unmount(folder)
        _image(folder).unlink()
        super().forget(folder, variant)


def make_disk(folder: Path) -> None:
    """Create a file system in a file beside the folder, and mount it at the folder."""
    image = _image(folder)
    with image.open("wb") as file:
        file.truncate(_MEGABYTES << 20)
    _call("mkfs.ext4", "-q", "-F", image)
    folder.mkdir()
    _mount(folder)


def mount_again(folder: Path) -> None:
    """Mount a file system again after a shutdown, which replays its journal."""
    _unmount(folder)
    _mount(folder)


def cut_off(folder: Path, how: int) -> None:
    """Shut down the file system that is mounted at the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", how))
    os.close(descriptor)


def _saves(log: Path, before: int) -> list[int]:
    """The iterations of the numbered checkpoints that a run has started to save."""
    return [int(number) for number in _SAVING.findall(log.read_bytes()[before:])]


def check_newest(folder: Path, least: int) -> None:
    """Raise an error if the checkpoint to resume from is broken, or older than an iteration."""
    name = read_pointer(folder)
    content = read_checkpoint(str(folder / name)) if name else {"iteration": -1}
    if content["iteration"] < least:
        raise LostRunError(
            f"iteration {least} was saved, but the pointer names {name!r}"
        )


def _image(folder: Path) -> Path:
    return Path(f"{folder}.ext4")


def _mount(folder: Path) -> None:
    # With the default of 5 seconds between commits, more data would be safe by chance.
    _call("mount", "-o", "loop,commit=300", _image(folder), folder)


def _unmount(folder: Path) -> None:
    # The system may still be closing the files of killed processes.
    deadline = time.monotonic() + _UNMOUNT_SECONDS
    while subprocess.run(["umount", folder], capture_output=True).returncode != 0:
        if time.monotonic() > deadline:
            raise LostRunError(f"{folder} cannot be unmounted")
        time.sleep(0.05)


def _call(*command: Any) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=20, help="at least this many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    preload_forkserver()
    folder = Path(tempfile.mkdtemp(prefix="crash-disk-"))
    campaign = DiskCuts(options.seed, options.cuts, folder)
    campaign.go(jobs=1)
    print(campaign.table())
    for failure in campaign.failures:
        print(*failure)
    if not campaign.failures:
        shutil.rmtree(folder)
    sys.exit(bool(campaign.failures))
