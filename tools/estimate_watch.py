"""Counts the bytes of live fake tensors, and the messages of a rank; see estimate.py.

torch.distributed._tools.MemTracker counts in the same way, but refuses a model that is called twice
in an iteration, as in gradient accumulation and in a GAN.
"""

import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fake_collectives import (
    CollectiveOp,
    collective_ops,
    sync_ops,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hooktrain

# The bytes that a rank sends (and receives) for a tensor of 1 byte in a ring of n ranks, by the
# prefix of the collective's name. NCCL's tests compute the bus bandwidth with these factors.
SENT = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}

TORCH = str(Path(torch.__file__).parent)
_HOOKTRAIN = str(Path(hooktrain.__file__).parent)
_DEMOS = str(Path(_HOOKTRAIN, "demos"))
_READ = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Torch computes these for each element, and returns the mean in the first bytes of that memory.
_ELEMENTWISE_LOSSES = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
}
_resize = torch.UntypedStorage.resize_


class Watch(TorchDispatchMode):
    """Counts the bytes of the live fakes on a device, and the messages of the rank.

    Args:
        fakes: the mode that makes the fakes. Other fakes, such as those with which DTensor computes
            shapes, are not counted.

    Attributes:
        device: the type of the device.
        live: the bytes of each live storage, by its id.
        new: the live storages that did not exist at :meth:`begin`.
        now: the sum of all live bytes.
        peak: the largest sum since :meth:`begin`.
        peak_at: the number of the operation after which the peak was reached.
        messages: for each kind of collective, their number, and the bytes that the rank sends.
    """

    def __init__(self, fakes: FakeTensorMode, device: str) -> None:
        super().__init__()
        self.fakes = fakes
        self.device = device
        self.live: dict[int, int] = {}
        self.now = 0
        self._references: dict[int, Any] = {}
        self.begin()

    def begin(self, look_at: int = -1, look: Any = None) -> None:
        """Begin an iteration.

        Args:
            look_at: the number of the operation after which to call ``look``.
            look: a function without arguments.
        """
        self.peak, self.peak_at, self._operations = self.now, 0, 0
        self.new: set[int] = set()
        self.messages: dict[str, Counter[str]] = {}
        self._look_at, self._look = look_at, look

    def count(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors that are not counted yet."""
        for tensor in tensors:
            is_fake = isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fakes
            if is_fake and tensor.device.type == self.device:
                self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self.live:
            self.new.add(key)
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.now += storage.nbytes() - self.live.get(key, 0)
        self.live[key] = storage.nbytes()

    def _forget(self, key: int) -> None:
        self.now -= self.live.pop(key)
        self.new.discard(key)
        del self._references[key]

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Resize a storage, as fully_shard does to free the weights that it has gathered."""
        _resize(storage, size)
        if id(storage) in self.live:
            self._count(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it becomes collectives and operations on shards
        if func is _READ:
            return _read(args[0])
        if func is _WAIT:
            return args[0]  # as for a real tensor; torch would copy a fake one
        if func is torch.ops.c10d.allreduce_.default:
            # DistributedDataParallel reads the tensors from the future, but torch's fake has none.
            done: Future[Any] = Future()
            done.set_result(list(args[0]))
            work = torch._C._distributed_c10d._create_work_from_future(done)
            result = (args[0], work.boxed())
        else:
            result = func(*args, **(kwargs or {}))
        if func in _ELEMENTWISE_LOSSES:
            elements = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
            _resize(result.untyped_storage(), elements * result.itemsize)
        if func in collective_ops and func not in sync_ops:
            self._record(func, args, kwargs, result)
        self.count(tree_leaves(result))
        self._operations += 1
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, self._operations
        if self._operations == self._look_at:
            self._look()
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
        ranks = CollectiveOp.get_process_group(func, args).size()
        name = func._schema.name.partition("::")[2].replace("_", "")
        kind = next((kind for kind in SENT if name.startswith(kind)), name)
        found = self.messages.setdefault(kind, Counter())
        found["count"] += 1
        found["bytes"] += round(size * SENT.get(kind, lambda _: 1)(ranks))


def _read(tensor: Tensor) -> Any:
    """The value of a tensor, if it is known or if only the trainer reads it."""
    # Known values are those of real tensors, or for example an optimizer's number of steps.
    is_unknown = isinstance(tensor, FakeTensor) and tensor.constant is None
    if is_unknown and _is_read_by_trainer():
        return tensor.dtype is torch.bool  # everything is finite, and losses are 0
    return _READ(tensor)


def _is_read_by_trainer() -> bool:
    """Whether hooktrain, or a torch function that it calls, reads the value of a tensor."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, __file__)):
            return name.startswith(_HOOKTRAIN) and not name.startswith(_DEMOS)
        frame = frame.f_back
    return False
