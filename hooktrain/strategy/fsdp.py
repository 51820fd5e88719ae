"""The model, its gradients and the optimizer's state sharded over processes."""

from typing import Any

import torch
from torch import nn

from hooktrain.model import sharding
from hooktrain.model.sharding import Precision, WrapRule
from hooktrain.strategy.base import BaseStrategy, ModelSource
from hooktrain.utils.registry import STRATEGIES


@STRATEGIES.register_module()
class FSDPStrategy(BaseStrategy):
    """Each process holds a part of the model, of its gradients and of the optimizer.

    By torch's ``fully_shard``, over all processes; see
    :func:`hooktrain.model.sharding.shard_model`. The batch of each process is its own, as
    with :class:`DDPStrategy`, and losses are the same. The model keeps its names and is
    not wrapped, so that its checkpoints fit every other strategy.

    A model on the meta device, or one that ``deferred_init`` builds there, is initialised
    while it is sharded. Any other must fit the memory of one device until it is sharded.
    Build optimizers afterwards, as :meth:`prepare` does from a configuration.

    Args:
        wrap: module classes, or a function of name and module that chooses them: the
            modules to bring together one at a time, such as ``{Block}``.
        mp_policy: the precision to compute and to exchange gradients in, such as
            ``dict(param_dtype="bfloat16", reduce_dtype="float32")``.
        offload: keep parameters, gradients and the optimizer's state in the CPU's memory.
            The process group needs a backend for the CPU then:
            ``backend="cpu:gloo,cuda:nccl"``.
        activation_checkpointing: see :class:`BaseStrategy`; True means those of ``wrap``.
        reshard_after_forward: see :func:`hooktrain.model.sharding.shard_model`.
        deferred_init: build the model of a configuration on the meta device.
        state_dict_cfg: ``"full"`` saves one file, as other strategies do; the states are
            whole on the main process, and sharded tensors are None on the others.
            ``"sharded"`` (MMEngine's ``"local"``) saves a folder that each rank writes
            its part of, and the states hold shards. Both are read in either case.
        kwargs: see :class:`BaseStrategy`.

    Raises:
        TypeError: for an unknown option of ``mp_policy``.
        AttributeError: for an unknown data type in it.
        ValueError: for another ``state_dict_cfg``; or in :meth:`wrap_model`, if the rule
            does not fit.
        RuntimeError: in :meth:`wrap_model`, without a process group.
    """

    def __init__(
        self,
        *,
        wrap: WrapRule = (),
        mp_policy: Precision = None,
        offload: bool = False,
        activation_checkpointing: bool | WrapRule = False,
        reshard_after_forward: bool = True,
        deferred_init: bool = False,
        state_dict_cfg: str = "full",
        **kwargs: Any,
    ) -> None:
        again = wrap if activation_checkpointing is True else activation_checkpointing
        super().__init__(activation_checkpointing=again or (), **kwargs)
        if state_dict_cfg not in ("full", "sharded", "local"):
            raise ValueError(
                f"state_dict_cfg must be 'full' or 'sharded', got {state_dict_cfg!r}"
            )
        self.sharding: dict[str, Any] = {
            "wrap": wrap,
            "mp_policy": sharding.build_mp_policy(mp_policy),
            "offload": offload,
            "reshard_after_forward": reshard_after_forward,
        }
        self.deferred_init = deferred_init
        self.saves_shards = state_dict_cfg != "full"

    def build_model(self, model: ModelSource) -> nn.Module:
        """The model; of a configuration on the meta device, if that is asked for."""
        if not self.deferred_init:
            return super().build_model(model)
        with torch.device("meta"):
            return super().build_model(model)

    def init_model_weights(self, model: nn.Module) -> None:
        """Call the model's ``init_weights``; on the meta device, that comes later."""
        if not sharding.on_meta(model):
            super().init_model_weights(model)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard the model in place."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            return model
        if not self.distributed:
            raise RuntimeError(
                "FSDPStrategy needs processes: start them by torchrun or launch()"
            )
        model = self.convert_model(model)
        if not sharding.on_meta(model):
            model = self.place_model(model)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        return sharding.shard_model(model, mesh=mesh, **self.sharding)
