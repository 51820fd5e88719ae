"""tools/train_net.py with one more hook, which disturbs the run: at iteration 2, once.

disturbed_train_net.py <disturbance> <rank> <arguments of train_net.py>
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from loading import load_tool

from hooktrain.engine import HookBase, build_trainer, launch
from hooktrain.engine.hooks.preemption import Preemption
from hooktrain.engine.hooks.watchdog import Watchdog
from hooktrain.strategy.environment import restart_count
from hooktrain.utils import comm


class Disturb(HookBase):
    """Acts in the middle of iteration 2, on one rank, before the update."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    def before_step(self) -> None:
        if (
            self.trainer.iter == 2
            and comm.get_rank() == self.rank
            and restart_count() == 0
        ):
            getattr(self, self.kind)()

    def nothing(self) -> None:
        pass

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self) -> None:
        raise KeyError("the cause")

    def hang(self) -> None:
        time.sleep(3600)

    def suspend(self) -> None:
        suspend(os.getpid())

    def suspend_all(self) -> None:
        """Suspend both ranks, of which the other one waits for this one."""
        agent = os.getppid()
        ranks = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        others = set(map(int, ranks)) - {os.getpid()}
        assert len(others) == 1
        suspend(*others, os.getpid())

    def terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def show(self) -> None:
        """Let the test send its signals: the file says that the run has come here."""
        Path(self.trainer.checkpointer.save_dir, "pid").write_text(str(os.getpid()))
        time.sleep(3600)


def suspend(*processes: int) -> None:
    """Stop processes, this one last; a child lets them go on when all of them have stopped."""
    waits = [
        f"until grep -q '^State:.T' /proc/{each}/status; do :; done"
        for each in processes
    ]
    goes_on = f"kill -CONT {' '.join(map(str, processes))}"
    child = subprocess.Popen(["sh", "-c", "; ".join([*waits, goes_on])])
    for each in processes:
        os.kill(each, signal.SIGSTOP)
    assert child.wait() == 0


def build_disturbed(cfg: Any) -> Any:
    trainer = build_trainer(cfg)
    watchdog = Watchdog(1.5) if sys.argv[1] == "hang" else None
    disturb = Disturb(sys.argv[1], int(sys.argv[2]))
    trainer.register_hooks([watchdog, disturb], before=HookBase)
    trainer.register_hooks([Preemption(trainer.checkpointer)])
    return trainer


if __name__ == "__main__":
    train_net = load_tool("train_net")
    train_net.build_trainer = build_disturbed
    arguments = train_net.argument_parser().parse_args(sys.argv[3:])
    launch(train_net.main, arguments.num_gpus, args=(arguments,))
