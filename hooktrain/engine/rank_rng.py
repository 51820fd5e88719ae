"""The random state of every rank, as part of a checkpoint."""

import io
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hooktrain.utils import comm
from hooktrain.utils.env import get_rng_state, seed_all_rng, set_rng_state

logger = logging.getLogger(__name__)


class RankRng:
    """Collects the ranks' random states for a checkpoint, and sets this rank's after a load.

    In a checkpoint each is the bytes of a small file of ``torch.save``: a state is over a thousand
    numbers, which thousands of ranks would take seconds to check, copy and read one by one.
    """

    def __init__(self) -> None:
        self._gathered: list[bytes] = []
        self._to_restore: dict[int, Any] | None = None

    def gather(self) -> None:
        """Fetch the states of all ranks for the checkpoint that follows. A collective.

        The main process gets them: what is no shard is saved from there.
        """
        self._gathered = comm.gather(_packed(get_rng_state()))

    def state_dict(self) -> dict[int, bytes]:
        """State by rank: this one's; on the main process all, if :meth:`gather` was just called."""
        gathered, self._gathered = self._gathered, []
        return dict(enumerate(gathered)) or {comm.get_rank(): _packed(get_rng_state())}

    def load_state_dict(self, state_dict: Mapping[int, Any]) -> None:
        """Keep the states until :meth:`restore`, so that nothing on the way draws from them."""
        self._to_restore = dict(state_dict)

    def restore(self, iteration: int) -> None:
        """Set what was loaded, if anything was; call it right before the first step."""
        saved, self._to_restore = self._to_restore, None
        if saved is None:
            return
        rank = comm.get_rank()
        if rank in saved:
            state = saved[rank]
            if isinstance(state, bytes):  # in the first checkpoints it was the state itself
                state = torch.load(io.BytesIO(state), weights_only=True)
            set_rng_state(state)
            return
        # Runs that resume alike get the same numbers: from the iteration and the rank alone.
        seed = seed_all_rng((1_000_003 * (iteration + 1) + rank) % 2**31)
        logger.warning(
            "The checkpoint has no random state for rank %d (it has those of ranks %s): "
            "seeded with %d instead",
            rank,
            sorted(saved),
            seed,
        )


def _packed(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
