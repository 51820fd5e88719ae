"""A hook that a configuration can name to lose the run."""

import os
import signal

from hooktrain.engine import HookBase


class Kill(HookBase):
    """Kills the process in the middle of an iteration, before its update."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_backward(self) -> None:
        if self.trainer.iter == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)
