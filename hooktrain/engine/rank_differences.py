"""What a checkpoint cannot bring back, since it holds one rank's state."""

import logging
from typing import Any

from torch import Tensor

from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm
from hooktrain.utils.tensors import map_leaves

logger = logging.getLogger(__name__)


def warn_of_differences(trainer: Any) -> None:
    """Warn of what differs between the ranks, though a checkpoint holds the main process's.

    Compared are, as far as they print, the plain values in the states of the hooks and of the
    loader, and the model's buffers. Running statistics of batch norms are not: training does not
    depend on them. Collective.

    Args:
        trainer: a trainer, perhaps with a model.
    """
    states: dict[str, Any] = {
        n: hook.state_dict() for n, hook in trainer._named_hooks().items()
    }
    if hasattr(trainer, "_batches"):
        states["data"] = trainer._batches.state_dict()
    plain = map_leaves(lambda _, x: None if isinstance(x, Tensor) else x, states)
    if hasattr(trainer, "model") and not getattr(
        trainer.model, "broadcast_buffers", False
    ):
        buffers = unwrap_model(trainer.model).named_buffers()
        statistics = ("running_mean", "running_var")
        plain |= {name: b for name, b in buffers if not name.endswith(statistics)}
    prints = {name: repr(value) for name, value in plain.items()}
    everywhere = comm.all_gather(prints)
    names = [
        n for n, own in prints.items() if any(o.get(n, own) != own for o in everywhere)
    ]
    if names:
        text = (
            "Ranks differ in %s. Of these a checkpoint holds what the main process has"
        )
        logger.warning(text, names)
