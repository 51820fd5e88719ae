"""For Python's fork server only: imported by it, this keeps it alive when a run gets a signal.

The workers of loaders with the start method ``"forkserver"`` are children of the server and end
with it. The server blocks the signals; its children do not.
"""

import os
import signal
from functools import partial

from hooktrain.utils.workers import ENDING

signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
os.register_at_fork(
    after_in_child=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)
)
