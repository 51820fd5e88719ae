"""The strategy that shards the model, its gradients and the optimizer's state over processes."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hooktrain.model import sharding
from hooktrain.model.sharding import Precision, WrapRule
from hooktrain.strategy.base import BaseStrategy, ModelSource
from hooktrain.strategy.environment import choose_device
from hooktrain.utils import comm
from hooktrain.utils.tensors import Tensors

# Ranks of the last dimensions are adjacent, since they communicate in each layer.
DIMENSIONS = ("replicate", "shard", "tensor")


class FSDPStrategy(BaseStrategy):
    """Shards the model, its gradients and the optimizer's state over all processes.

    It uses torch's ``fully_shard``; see :func:`hooktrain.model.sharding.shard_model`. Each process
    has its own batch, as with :class:`DDPStrategy`, and losses are the same. The model keeps its
    names and is not wrapped, so its checkpoints fit every other strategy.

    A model must fit into the memory of each rank's device until it is sharded, or, with
    ``deferred_init``, into that of the first rank's CPU. Build optimizers afterwards.

    Beyond data parallelism, ``mesh`` arranges the ranks in several dimensions, and ``parallelize``
    divides the computation of a batch among the ranks of the dimension ``"tensor"``. These ranks
    get the same batches and seeds, so call :meth:`setup` before you build the loaders.

    Args:
        wrap: the modules whose parameters are gathered one module at a time: classes such as
            ``{Block}``, or a function of name and module.
        mp_policy: torch's ``MixedPrecisionPolicy``: the precision of the computation and of the
            exchange of gradients. None changes nothing.
        offload: whether to keep parameters, gradients and the optimizer's state in CPU memory. The
            process group then also needs a backend for the CPU: ``backend="cpu:gloo,cuda:nccl"``.
        reshard_after_forward: see :func:`hooktrain.model.sharding.shard_model`.
        deferred_init: whether all ranks build the model (a LazyCall or function) on the meta
            device. Only the first rank also builds it with values, on the CPU, from which all
            ranks get their shards.
        mesh: the number of ranks in the dimensions ``"replicate"``, ``"shard"`` and ``"tensor"``.
            By default ``"shard"`` has all remaining ranks.
            ``dict(replicate=2)`` shards within each half of the ranks (HSDP).
        parallelize: a function of the model and the mesh, called before the model is sharded. It
            changes the model, or returns a new one, typically by torch's ``parallelize_module``
            over ``mesh["tensor"]``; it may also compile modules or checkpoint activations. Modules
            for which it calls ``fully_shard`` are not sharded again.
        kwargs: see :class:`BaseStrategy`.

    Attributes:
        mesh: the DeviceMesh with these dimensions, from :meth:`setup` on.

    Raises:
        ValueError: in :meth:`setup`, if ``mesh`` has an unknown dimension or does not fit the
            number of ranks; in :meth:`wrap_model`, if ``wrap`` or ``parallelize`` does not fit
            the model.
        RuntimeError: in :meth:`setup`, without a process group.
    """

    mesh: DeviceMesh
    _values: Tensors

    def __init__(
        self,
        *,
        wrap: WrapRule = (),
        mp_policy: Precision = None,
        offload: bool = False,
        reshard_after_forward: bool = True,
        deferred_init: bool = False,
        mesh: Mapping[str, int] | None = None,
        parallelize: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sharding: dict[str, Any] = {
            "wrap": wrap,
            "mp_policy": mp_policy,
            "offload": offload,
            "reshard_after_forward": reshard_after_forward,
        }
        self.mesh_sizes = dict(mesh or {})
        self.parallelize: Any = parallelize
        self.deferred_init = deferred_init

    def _join_processes(self) -> None:
        super()._join_processes()
        if not self.distributed:
            raise RuntimeError(
                "FSDPStrategy needs a process group: start processes by torchrun or launch()"
            )
        size = self.world_size
        left = size // math.prod(self.mesh_sizes.values())
        sizes = {"shard": left, **self.mesh_sizes}
        names = tuple(name for name in DIMENSIONS if name in sizes)
        shape = tuple(sizes[name] for name in names)
        if math.prod(shape) != size or len(names) < len(sizes):
            raise ValueError(
                f"mesh must have sizes of {DIMENSIONS} whose product is {size}, the number of "
                f"processes, not {self.mesh_sizes}"
            )
        self.mesh = init_device_mesh(
            choose_device(self._wanted_device).type, shape, mesh_dim_names=names
        )
        # The ranks that compute a batch together are adjacent.
        parts = sizes["shard"] * sizes.get("replicate", 1)
        comm.set_data_part(self.rank * parts // size, parts)
        # torch would warn on each rank that two dimensions take two collectives.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel("ERROR")

    def build_model(self, model: ModelSource) -> nn.Module:
        """Build the model, with ``deferred_init`` on the meta device."""
        if not self.deferred_init:
            return super().build_model(model)
        self._values = {}
        if self.rank == 0:
            # The other ranks draw no random numbers.
            with torch.random.fork_rng(devices=[]):
                whole = super().build_model(model)
                self.init_model_weights(whole)
            self._values = dict(sharding.named_tensors(whole))
        with torch.device("meta"):
            bare: Any = super().build_model(model)
        bare.is_init = True  # the first rank's values are initialised
        return bare  # type: ignore[no-any-return]

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard the model in place."""
        if sharding.is_unit(model):
            return model
        model = self.convert_model(model)
        if not self.deferred_init:
            model = self.place_model(model)
        if self.parallelize is not None:
            model = self.parallelize(model, self.mesh) or model
        names = self.mesh.mesh_dim_names or ()
        data = self.mesh[names[: names.index("shard") + 1]]
        values = vars(self).pop("_values", None)  # to free the memory afterwards
        return sharding.shard_model(model, mesh=data, values=values, **self.sharding)
