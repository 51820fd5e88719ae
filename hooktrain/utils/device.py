"""Which device a process computes on."""

import torch

from hooktrain.utils import comm

__all__ = ["choose_device"]


def choose_device(wanted: str | torch.device | None = None) -> torch.device:
    """The device for this process; an accelerator becomes the current one.

    Args:
        wanted: such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. None is the accelerator, or the CPU
            where there is none. Without a number each of several ranks has its own.

    Raises:
        ValueError: if it is not there.
    """
    wanted = None if wanted is None else torch.device(wanted)
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if (wanted or there or torch.device("cpu")).type == "cpu":
        return torch.device("cpu")
    if there is None or (wanted is not None and wanted.type != there.type):
        raise ValueError(f"device={str(wanted)!r} is not there, but {there or 'the CPU only'}")
    index = None if wanted is None else wanted.index
    if index is None:
        index = torch.accelerator.current_device_index()
        if comm.get_world_size() > 1:  # with gloo there may be more processes than devices
            index = comm.get_local_rank() % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(there.type, index)
