"""The random state of every rank, as part of a checkpoint."""

import logging
from collections.abc import Mapping
from typing import Any

from hooktrain.utils import comm
from hooktrain.utils.env import get_rng_state, seed_all_rng, set_rng_state

logger = logging.getLogger(__name__)


class RankRng:
    """Collects the ranks' random states for a checkpoint, and sets this rank's after a load."""

    def __init__(self) -> None:
        self._gathered: list[dict[str, Any]] | None = None
        self._to_restore: dict[int, Any] | None = None

    def gather(self) -> None:
        """Fetch the states of all ranks for the checkpoint that follows. A collective."""
        self._gathered = comm.all_gather(get_rng_state())

    def state_dict(self) -> dict[int, Any]:
        """State by rank: all if :meth:`gather` was just called, else only this rank's."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return {comm.get_rank(): get_rng_state()}
        return dict(enumerate(gathered))

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
            set_rng_state(saved[rank])
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
