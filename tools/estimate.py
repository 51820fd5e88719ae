"""Estimate the memory and the messages of one rank, before there is one.

    hooktrain train --config-file FILE --dry-run --ranks 64 --device-memory 80GiB

The parts of the configuration are built as in a run, and the trainer makes real iterations, but all
tensors are torch's fakes: they have types, shapes and a device, and no numbers, so a model of any
size fits and a step takes as long as its Python code. The process group is torch's fake one, in
which this process is rank 0 and the others never answer. So what is counted is what the model,
DistributedDataParallel, fully_shard and the optimizer themselves do:

- each operation hands its results to `Watch`, which adds up the storages that are alive. The
  second iteration finds the peak, since the optimizer has its state by then, and the third one
  looks at this moment whose bytes they are;
- each collective goes through `Watch` too, with its tensors and its group.

torch.distributed._tools.MemTracker counts in the same way, but refuses a model that is called twice
in an iteration, as in gradient accumulation and in a GAN.

Private names of torch are used in this file only, most of them in `pretended`.
"""

import gc
import linecache
import math
import re
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.fake_collectives import (
    CollectiveOp,
    collective_ops,
    sync_ops,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import hooktrain
from hooktrain.config import instantiate, resolve
from hooktrain.engine import hooks
from hooktrain.engine.build import build_optimizer, build_step, prepare_model
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.strategy import BaseStrategy, choose_device
from hooktrain.utils import comm
from hooktrain.utils.names import locate
from hooktrain.utils.tensors import is_sharded, local_tensor, map_leaves

UNKNOWN = """
Not in these figures:
- workspaces of kernels and of the communication library, which allocate them by themselves;
- fragmentation: an allocator reserves more than is in use at one time;
- the CUDA context and what other programs keep on the device, often 0.5 to 1 GiB;
- what depends on the data: other batches than the first one may be larger;
- evaluations, hooks other than EMA, and what torch.compile saves or adds."""

# The bytes that a rank sends for a tensor of 1 byte in a ring of n ranks, by the beginning of the
# collective's name. As many are received. NCCL's tests compute the bus bandwidth by these factors.
SENT = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}

MOST_SAMPLES = 2**20  # to look for in a batch of a rank

_TORCH = str(Path(torch.__file__).parent)
_HOOKTRAIN = str(Path(hooktrain.__file__).parent)
_DEMOS = str(Path(_HOOKTRAIN, "demos"))
_READ = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class DataDependentError(RuntimeError):
    """The code of the model or of a hook reads the values of a tensor, which fakes lack."""


class Watch(TorchDispatchMode):
    """Counts the bytes of the fakes that are alive on a device, and the messages of the rank.

    Args:
        fakes: the mode that makes the fakes. Others, such as those by which DTensor computes
            shapes, are not counted.

    Attributes:
        device: the type of the device.
        live: the bytes of each storage that is alive, by its identity.
        new: those of them that were not there at :meth:`begin`.
        now: their sum.
        peak: the largest sum since :meth:`begin`.
        peak_at: the number of the operation after which it was reached.
        messages: the collectives, by their kind: their number, and the bytes that the rank sends.
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
        """Count the storages of tensors, unless they are counted already."""
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
            return args[0]  # as for a real tensor; of a fake one torch makes a copy
        if func is torch.ops.c10d.allreduce_.default:
            # DistributedDataParallel takes the tensors from the future, and torch's fake has none.
            done: Future[Any] = Future()
            done.set_result(list(args[0]))
            work = torch._C._distributed_c10d._create_work_from_future(done)
            result = (args[0], work.boxed())
        else:
            result = func(*args, **(kwargs or {}))
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
    # Known are those of real tensors, and such as the number of steps of an optimizer.
    is_unknown = isinstance(tensor, FakeTensor) and tensor.constant is None
    if is_unknown and _is_read_by_trainer():
        return tensor.dtype is torch.bool  # all is finite, and losses are 0
    return _READ(tensor)


def _is_read_by_trainer() -> bool:
    """Whether hooktrain itself asks for the value of a tensor, or what it calls in torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, __file__)):
            return name.startswith(_HOOKTRAIN) and not name.startswith(_DEMOS)
        frame = frame.f_back
    return False


_resize = torch.UntypedStorage.resize_
_swap = torch.utils.swap_tensors


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor for :func:`copy.deepcopy`; torch's own method copies its numbers."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _exchange(a: Tensor, b: Tensor) -> None:
    """Exchange two tensors for Module.to(), unless they are alike, as fakes have no values."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        _swap(a, b)


@contextmanager
def pretended(ranks: int, device: str) -> Iterator[tuple[FakeTensorMode, Watch]]:
    """Inside, this process is rank 0 of so many, and what it computes is to be computed in fakes.

    Args:
        ranks: the number of ranks.
        device: the type of the device whose memory is watched.

    Yields:
        The mode that makes the fakes, and what watches them. They are still to be entered.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    # Its weak references would keep Module.to() from exchanging parameters.
    fakes.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    watch = Watch(fakes, device)
    setup = BaseStrategy.setup

    def real_setup(strategy: BaseStrategy) -> None:
        with _disable_current_modes():  # a mesh reads the numbers of the ranks
            setup(strategy)

    ddp = torch.nn.parallel.distributed
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(Tensor, "__deepcopy__", _copy))
        enter(patch.object(torch.utils, "swap_tensors", _exchange))
        enter(patch.object(BaseStrategy, "setup", real_setup))
        enter(
            patch.object(
                torch.UntypedStorage, "resize_", lambda s, n: watch.resize(s, n)
            )
        )
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            stack.callback(dist.destroy_process_group)
            # The others of a fake group send nothing, so each is as this one.
            enter(patch.object(comm, "all_gather", lambda data, *_: [data] * ranks))
            enter(patch.object(comm, "broadcast", lambda data, *_: data))
            # These two exchange numbers, in C++.
            enter(
                patch.object(
                    ddp, "_verify_param_shape_across_processes", lambda *_: None
                )
            )
            enter(patch.object(dist.Reducer, "_rebuild_buckets", lambda _: False))
        yield fakes, watch


class Rank:
    """The trainer of a configuration on a rank of fakes.

    Args:
        cfg: the configuration; it is changed.
        fakes: see :func:`pretended`.
        watch: see :func:`pretended`.

    Attributes:
        trainer: the trainer.
        batch: the batch that each of its iterations takes: at first a real one of the
            configuration's loader, made fake.
        building: the peak until the first iteration, in bytes.
    """

    def __init__(self, cfg: Any, fakes: FakeTensorMode, watch: Watch) -> None:
        resolve(cfg)
        self.watch = watch
        self.modes = (fakes, watch)
        self.cfg = cfg
        cfg.train.compile = False
        cfg.train.log_period = 10**9  # so that no metric is read
        loader_of = cfg.dataloader.train
        if "num_workers" in loader_of:
            loader_of.num_workers = 0
        with self._in_fakes():
            _, model = prepare_model(cfg)
        loader = instantiate(loader_of)
        self.batch = map_leaves(
            lambda _, leaf: (
                fakes.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf
            ),
            next(iter(loader)),
        )
        with self._in_fakes():
            optimizer = build_optimizer(cfg, model)
            self.trainer = build_step(cfg, model, self._batches(), optimizer)
            self.averages = [*_averages(cfg, model)]
        self.trainer.register_hooks(self.averages)
        self.trainer.seed = 0
        self.trainer.max_iter = 10**9
        with watch:  # the ranks agree by real numbers
            self.trainer.before_train()
        self.weights = [*model.parameters()]
        self.building = watch.peak

    def _batches(self) -> Iterator[Any]:
        while True:
            yield self.batch

    @contextmanager
    def _in_fakes(self) -> Iterator[None]:
        fakes, watch = self.modes
        try:
            with fakes, watch:
                yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DataDependentError(_explained(error)) from error

    def step(self, batch: Any, look_at: int = -1, look: Any = None) -> int:
        """Make an iteration with a batch, and return its peak in bytes."""
        trainer = self.trainer
        self.batch = batch
        self.watch.count(tree_leaves(batch))
        self.watch.begin(look_at, look)
        with self._in_fakes(), trainer.storage:
            trainer.before_step()
            trainer.run_step()
            trainer.after_step()
        trainer.iter += 1
        gc.collect()  # else what is in cycles would count in some steps only
        return self.watch.peak

    def look(self) -> dict[str, int]:
        """The bytes of the parts of an iteration at its peak. It makes three iterations."""
        self.step(self.batch)
        self.step(self.batch)
        parts: dict[str, int] = {}
        self.step(self.batch, self.watch.peak_at, lambda: parts.update(self._parts()))
        return parts

    def _parts(self) -> dict[str, int]:
        model = self.trainer.model
        optimizers = [w.optimizer for w in by_name(self.trainer.optim_wrapper).values()]
        states = [state for each in optimizers for state in each.state.values()]
        groups = {
            "weights": self.weights,
            "gradients": [p.grad for p in self.weights],
            "optimizer": tree_leaves(states),
            "averages (EMA)": [
                tensor
                for hook in self.averages
                for tensor in (*hook.average.parameters(), *hook.average.buffers())
            ],
            "buffers": [*model.buffers()],
            "the batch": tree_leaves(self.batch),
            "gathered weights (FSDP)": [*model.parameters()],
        }
        left = dict(self.watch.live)
        parts = {}
        for name, tensors in groups.items():
            found = [t for t in tensors if isinstance(t, Tensor)]
            keys = {id(each) for t in found for each in get_untyped_storages(t)}
            parts[name] = sum(left.pop(key, 0) for key in keys)
        parts["kept between steps (buckets of DDP, units of FSDP)"] = sum(
            left.pop(key) for key in left.keys() - self.watch.new
        )
        parts["activations, and others of the step"] = sum(left.values())
        return parts

    def largest_batch(self, limit: int) -> int:
        """The largest batch of this rank whose peak is within a limit in bytes; 0 for none.

        Most models take the same memory for each further sample, so the line through two sizes
        points at the largest one, and a few iterations find it. If the update takes more than small
        batches do, the sizes double first.
        """
        first, size = self.batch, batch_size(self.batch)
        stays = sum(
            leaf.nbytes for leaf in tree_leaves(first) if isinstance(leaf, Tensor)
        )
        points: list[tuple[int, int]] = []
        fits, too_large = 0, MOST_SAMPLES
        guess = size
        while too_large - fits > 1:
            peak = self.step(resized(first, size, guess, self.watch.fakes)) - stays
            points.append((guess, peak))
            if peak <= limit:
                fits = guess
            else:
                too_large = guess
            guess = 2 * guess
            if len(points) > 1:
                (a, low), (b, high) = points[-2:]
                slope = (high - low) / (b - a)
                guess = b + math.floor((limit - high) / slope) if slope > 0 else 2 * b
            if len(points) > 8:
                guess = (fits + too_large) // 2
            guess = max(fits + 1, min(guess, too_large - 1))
        self.batch = first
        return fits

    def saved(self) -> int:
        """The bytes of a copy of what a checkpoint holds, in the main process's memory."""
        found: dict[int, int] = {}
        is_local = self.cfg.train.checkpointer.sharded

        def add(_: Any, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                tensor = local_tensor(leaf) if is_local else leaf
                key = leaf if is_sharded(leaf) else leaf.untyped_storage()
                found[id(key)] = tensor.numel() * tensor.itemsize
            return leaf

        with self._in_fakes():
            state = (self.trainer.model.state_dict(), self.trainer.state_dict())
        map_leaves(add, state)
        return sum(found.values())


def _averages(cfg: Any, model: nn.Module) -> Iterator[hooks.EMA]:
    """The averages that the configuration enables, or has among its hooks."""
    if cfg.train.ema.enabled:
        yield hooks.EMA(model, cfg.train.ema.decay)
    for call in cfg.get("hooks", []):
        kind = call.get("_target_")
        kind = locate(kind) if isinstance(kind, str) else kind
        if isinstance(kind, type) and issubclass(kind, hooks.EMA):
            yield instantiate(call)


def _explained(error: Exception) -> str:
    """The line of the user's code that needs the values of a tensor."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH, __file__))]
    where = own[-1]
    line = linecache.getline(where.filename, where.lineno or 0).strip()
    return (
        f"{where.filename}, line {where.lineno}, needs the values of a tensor ({error}):\n"
        f"    {line}\nAn estimate has no values, so what depends on them cannot be known. If the "
        "line can do without them, such as by torch.where, write it so"
    )


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its tensors, or its length.

    Raises:
        ValueError: if the tensors differ in it.
    """
    if isinstance(batch, list) and not isinstance(batch[0], Tensor):
        return len(batch)  # a list of samples
    sizes = {leaf.shape[:1] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"the first dimensions of the batch's tensors differ, {sorted(map(tuple, sizes))}, so "
            "it is not known how larger batches look"
        )
    return int(sizes.pop()[0])


def resized(batch: Any, size: int, new: int, fakes: FakeTensorMode) -> Any:
    """A batch with another number of samples; see :func:`batch_size`."""
    if isinstance(batch, list) and not isinstance(batch[0], Tensor):
        return [batch[i % size] for i in range(new)]

    def change(_: Any, leaf: Any) -> Any:
        return (
            leaf.new_empty(new, *leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf
        )

    with fakes:
        return map_leaves(change, batch)


def parse_size(text: str) -> int:
    """Bytes of a text such as "80GiB" or "24 GB".

    Raises:
        ValueError: for another text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip())
    if found is None:
        raise ValueError(f"a size of memory is like '80GiB' or '24GB', not {text!r}")
    number, unit, is_binary = found.groups()
    return round(
        float(number) * (1024 if is_binary else 1000) ** ("KMGT".index(unit) + 1)
    )


def in_words(size: int) -> str:
    """A number of bytes with three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def estimate(cfg: Any, ranks: int = 1, device_memory: str = "") -> None:
    """Print the memory and the messages of rank 0, which has the largest shards.

    Args:
        cfg: the configuration; it is changed.
        ranks: the number of ranks.
        device_memory: the memory of a device, such as "80GiB", to say whether the rank fits.

    Raises:
        ValueError: for a number of ranks below 1, or a ``device_memory`` of another form.
        DataDependentError: if the model's code reads the values of a tensor.
    """
    if ranks < 1:
        raise ValueError(f"--ranks must be at least 1, not {ranks}")
    limit = parse_size(device_memory) if device_memory else None
    device = choose_device(cfg.train.device).type
    with pretended(ranks, device) as (fakes, watch):
        rank = Rank(cfg, fakes, watch)
        parts = rank.look()
        peak, messages = watch.peak, watch.messages
        saved = rank.saved()
        print(
            f"One of {ranks} ranks on {device}, in bytes that tensors take at the peak of a step:\n"
        )
        rows = [(name, in_words(size)) for name, size in parts.items() if size]
        print(tabulate([*rows, ("peak", in_words(peak))], colalign=("left", "right")))
        print(f"\nUntil the first step: {in_words(rank.building)}")
        if cfg.train.checkpointer.background:
            whose = (
                "each rank's"
                if cfg.train.checkpointer.sharded
                else "the main process's"
            )
            print(
                f"A save in the background keeps in {whose} host memory: {in_words(saved)}"
            )
        if ranks > 1:
            print_messages(messages)
        if limit is not None:
            print_fit(rank, max(peak, rank.building), limit)
    print(UNKNOWN)


def print_messages(messages: Mapping[str, Mapping[str, int]]) -> None:
    """Print the collectives of a step."""
    rows = [(kind, n["count"], in_words(n["bytes"])) for kind, n in messages.items()]
    print(
        "\nMessages of a step, which a rank sends, and as many bytes it receives (in rings):\n"
    )
    print(
        tabulate(rows, ["kind", "number", "bytes"], colalign=("left", "right", "right"))
    )


def print_fit(rank: Rank, needed: int, limit: int) -> None:
    """Print whether a rank fits into a memory, and the largest batch that does."""
    verdict = "fits" if needed <= limit else "does not fit"
    print(f"\nIt {verdict} into {in_words(limit)}: {needed / limit:.0%}")
    try:
        size, largest = batch_size(rank.batch), rank.largest_batch(limit)
    except ValueError as error:
        print(f"The largest batch is not known: {error}")
        return
    print(
        f"The batch of a rank has {size} samples; the largest that fits has {largest:,}"
    )
