"""Copies of a state in memory that is kept, so that training may go on while they are written."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hooktrain.utils.dtensor import local_tensor

__all__ = ["StagingBuffers"]

T = TypeVar("T")

# The accelerators from which a copy into page-locked memory is faster and does not block.
_PINNABLE = ("cuda", "xpu")


class StagingBuffers:
    """Copies states of the same shape into the same host memory each time.

    Fresh memory would cost several times the copy itself (its pages must be mapped first). A buffer
    is replaced when a tensor of another size takes its place. Memory is copied once however many
    tensors share it, and the copies share it likewise.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def stage(self, state: T) -> T:
        """A deep copy of ``state`` with every tensor on the CPU. It is valid until the next call.

        Tensors with plain memory, anywhere in dicts, lists and tuples, are copied into the kept
        buffers; whatever else is copied by :func:`copy.deepcopy`. A DTensor becomes the copy of
        this rank's shard. Parameters become tensors without a gradient.

        Waits for the accelerators that tensors were copied from, once.
        """
        tensors = {id(tensor): tensor for tensor in _tensors(state)}
        # Shards may be made on the fly: held, so that no two of them have one address in turn.
        local = {key: local_tensor(tensor).detach() for key, tensor in tensors.items()}
        memories = {_address(tensor): tensor for tensor in local.values() if _is_plain(tensor)}
        self._buffers = [
            self._copy(tensor, index) for index, tensor in enumerate(memories.values())
        ]
        copies = dict(zip(memories, self._buffers, strict=True))
        memo = {
            key: _view_like(tensor, copies[_address(tensor)])
            if _is_plain(tensor)
            else tensor.to("cpu", copy=True)
            for key, tensor in local.items()
        }
        for device in {tensor.device for tensor in memories.values()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)  # host-device synchronisation: copies arrive
        return copy.deepcopy(state, memo)

    def _copy(self, source: Tensor, index: int) -> Tensor:
        """The bytes of the memory behind ``source``, in the buffer ``index`` if it fits."""
        storage = source.untyped_storage()
        size = storage.nbytes()
        pinned = source.device.type in _PINNABLE
        buffer = self._buffers[index] if index < len(self._buffers) else None
        if buffer is None or buffer.numel() != size or buffer.is_pinned() != pinned:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        memory = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
        return buffer.copy_(memory, non_blocking=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _address(tensor: Tensor) -> tuple[torch.device, int, int]:
    """What tells the memory behind a tensor from others; all empty ones are taken for one."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but a strided view of memory that can be read."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _view_like(source: Tensor, buffer: Tensor) -> Tensor:
    """The tensor that looks at ``buffer`` as ``source`` looks at its memory."""
    return torch.empty(0, dtype=source.dtype).set_(
        buffer.untyped_storage(), source.storage_offset(), source.size(), source.stride()
    )
