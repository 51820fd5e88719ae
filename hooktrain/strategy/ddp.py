"""The whole model on each rank, and the gradients exchanged."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hooktrain.model import BaseModel, init_weights_once, is_model_wrapper
from hooktrain.strategy.base import BaseStrategy
from hooktrain.strategy.environment import count_processes
from hooktrain.utils.registry import MODEL_WRAPPERS, STRATEGIES


@STRATEGIES.register_module()
class SingleDeviceStrategy(BaseStrategy):
    """One process that trains on an accelerator, or on the CPU where there is none.

    Its model stays unwrapped.

    Args:
        kwargs: see :class:`BaseStrategy`.

    Raises:
        RuntimeError: in :meth:`setup`, if there are other processes.
    """

    def _join_processes(self) -> None:
        size = count_processes(self.environment.launcher)
        if size > 1:
            raise RuntimeError(
                f"SingleDeviceStrategy in one of {size} processes: use DDPStrategy or "
                "FSDPStrategy, or 'auto'"
            )
        self.launcher = "none"

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Bring the model to its device; one that is wrapped already stays as it is."""
        if is_model_wrapper(model):
            return model
        return self.place_model(self.convert_model(model))


def wrapper_for(model: nn.Module) -> str:
    """The name in ``MODEL_WRAPPERS`` of the DistributedDataParallel that fits a model.

    ``NamingDistributedDataParallel``, which is torch's with better messages, except for
    models that own their training step: ``StepDistributedDataParallel`` for one with the
    step of :class:`hooktrain.model.BaseModel`, ``SeparateDistributedDataParallel`` for
    others.
    """
    step = getattr(type(model), "train_step", None)
    if step is None:
        return "NamingDistributedDataParallel"
    if step is BaseModel.train_step:
        return "StepDistributedDataParallel"
    return "SeparateDistributedDataParallel"


def wrap_in_ddp(
    model: nn.Module,
    device: torch.device,
    *,
    type: str | type[nn.Module] | None = None,
    fp16_compression: bool = False,
    **options: Any,
) -> nn.Module:
    """Wrap a model for a process group that is there. A collective.

    Args:
        model: on ``device``.
        device: where the model is.
        type: the wrapper, by its name in ``MODEL_WRAPPERS`` or as a class; None is that of
            :func:`wrapper_for`.
        fp16_compression: exchange gradients in float16.
        options: of the wrapper; see :class:`torch.nn.parallel.DistributedDataParallel`.

    Raises:
        KeyError: if there is no such wrapper.
    """
    init_weights_once(model)  # before all ranks get those of the first
    if device.type != "cpu":
        options.setdefault("device_ids", [device.index])
    ddp: nn.Module = MODEL_WRAPPERS.build(
        {**options, "type": type or wrapper_for(model), "module": model}
    )
    if fp16_compression:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
            fp16_compress_hook,
        )

        ddp.register_comm_hook(state=None, hook=fp16_compress_hook)  # type: ignore[operator]
    return ddp


@STRATEGIES.register_module()
class DDPStrategy(BaseStrategy):
    """DistributedDataParallel over the processes of a launcher, also on the CPU.

    It joins them, unless that is done already, as inside
    :func:`hooktrain.engine.launch`. A process that is alone and has no launcher leaves
    its model unwrapped.

    Args:
        model_wrapper: the arguments of :func:`wrap_in_ddp`, ``type`` among them, such as
            ``dict(find_unused_parameters=True)``. ``broadcast_buffers`` is False by
            default.
        kwargs: see :class:`BaseStrategy`.
    """

    def __init__(
        self, *, model_wrapper: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.model_wrapper = {"broadcast_buffers": False, **(model_wrapper or {})}

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Bring the model to its device and wrap it."""
        if is_model_wrapper(model):
            return model
        model = self.place_model(self.convert_model(model))
        if not self.distributed:
            return model
        return wrap_in_ddp(model, self.device, **self.model_wrapper)
