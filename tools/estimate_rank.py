"""The trainer of a configuration as one of many ranks, with fake tensors; see estimate.py."""

import gc
import linecache
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import estimate_watch
import torch
import torch.distributed as dist
from estimate_watch import TORCH, Watch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hooktrain.config import instantiate, resolve
from hooktrain.engine import hooks
from hooktrain.engine.build import build_optimizer, build_step, prepare_model
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.strategy import BaseStrategy
from hooktrain.utils import comm
from hooktrain.utils.names import locate
from hooktrain.utils.tensors import is_sharded, local_tensor, map_leaves


class DataDependentError(RuntimeError):
    """The code of the model or of a hook reads the values of a tensor, which fakes do not have."""


_swap = torch.utils.swap_tensors


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor for :func:`copy.deepcopy`; torch's own method would copy its values."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _exchange(a: Tensor, b: Tensor) -> None:
    """Swap two tensors for Module.to(), unless both are alike, since fakes have no values."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        _swap(a, b)


@contextmanager
def pretended(ranks: int, device: str) -> Iterator[tuple[FakeTensorMode, Watch]]:
    """A context in which this process acts as rank 0 of many, and computes with fake tensors.

    Args:
        ranks: the number of ranks.
        device: the type of the device whose memory is watched.

    Yields:
        The mode that makes the fakes, and the ``Watch``. Neither is entered yet.
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
            # The other ranks of a fake group send nothing, so each counts as a copy of this one.
            enter(patch.object(comm, "all_gather", lambda data, *_: [data] * ranks))
            enter(patch.object(comm, "broadcast", lambda data, *_: data))
            # These two would exchange values, in C++.
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
        batch: the batch of each of its iterations, at first a fake of the first batch of the
            configuration's loader.
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
        with watch:  # the ranks agree by real tensors
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
        gc.collect()  # otherwise tensors in cycles would count only in some steps
        return self.watch.peak

    def parts_at_peak(self) -> dict[str, int]:
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

    def saved(self) -> int:
        """The bytes of a copy of a checkpoint's content, in the main process's memory."""
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
    """The averages that the configuration enables or has among its hooks."""
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
    own = [
        f
        for f in frames
        if not f.filename.startswith((TORCH, __file__, estimate_watch.__file__))
    ]
    where = own[-1]
    line = linecache.getline(where.filename, where.lineno or 0).strip()
    return (
        f"{where.filename}, line {where.lineno}, needs the values of a tensor ({error}):\n"
        f"    {line}\nAn estimate has no values, so code that depends on them cannot run. If "
        "possible, rewrite the line without values, for example by torch.where"
    )
