"""DistributedDataParallel that names unused parameters, and one for models that own their step."""

import re
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hooktrain.model.base_model import BaseModel
from hooktrain.model.step import train_step
from hooktrain.utils.registry import MODEL_WRAPPERS

__all__ = ["NamingDistributedDataParallel", "StepDistributedDataParallel", "is_model_wrapper"]

# In DDP's message about parameters whose gradients did not come.
_INDICES = re.compile(r"did not receive grad for rank \d+:((?: \d+)+)")

MODEL_WRAPPERS.register(DistributedDataParallel)
MODEL_WRAPPERS.register(DataParallel)


def is_model_wrapper(model: nn.Module) -> bool:
    """Whether a model is wrapped in something of ``MODEL_WRAPPERS``, which has it as ``module``."""
    wrappers = tuple(obj for _, obj in MODEL_WRAPPERS if isinstance(obj, type))
    return isinstance(model, wrappers)


@MODEL_WRAPPERS.register_module()
class NamingDistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel that names parameters which got no gradient, where torch counts them.

    Args:
        module: the model, on its device.
        broadcast_buffers: send the first rank's buffers to all in each forward pass. At the start
            they are sent in any case, as the parameters are.
        **kwargs: see :class:`torch.nn.parallel.DistributedDataParallel`. Without ``device_ids`` the
            module stays where it is, be that the CPU.
    """

    def __init__(self, module: nn.Module, *, broadcast_buffers: bool = True, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        # The argument of this name goes out of use in torch, and would concern the start too.
        self.broadcast_buffers = broadcast_buffers
        self._names = [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            RuntimeError: if parameters got no gradient in the step before; it names them.
        """
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            unused = _INDICES.search(str(error))
            if unused is None:
                raise
            names = [self._names[int(index)] for index in unused.group(1).split()]
            raise RuntimeError(
                f"the last loss did not depend on the parameters {names}. Use them for it or "
                "freeze them by requires_grad_(False) before the model is wrapped; or where that "
                "differs from step to step, wrap it with find_unused_parameters=True"
            ) from error


@MODEL_WRAPPERS.register_module(name=["StepDistributedDataParallel", "MMDistributedDataParallel"])
class StepDistributedDataParallel(NamingDistributedDataParallel):
    """DistributedDataParallel around a :class:`~hooktrain.model.BaseModel`, with its steps.

    The training step calls the model through DDP, so that the ranks exchange gradients. Where
    several backward passes are accumulated, they do so in the last one only. A model with
    several optimizers wants :class:`~hooktrain.model.SeparateDistributedDataParallel`.

    Args:
        module: the model, on its device. It has the ``data_preprocessor`` and ``parse_losses`` of a
            BaseModel, and no ``train_step`` of its own, which would be passed over.
        detect_anomalous_params: log in each step the parameters that the loss does not depend on,
            to find out why DDP fails or waits. It takes time.
        **kwargs: those of :class:`NamingDistributedDataParallel`.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(module, **kwargs)
        self.detect_anomalous_params = detect_anomalous_params

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on one batch; see :func:`hooktrain.model.step.train_step`.

        Returns:
            The values to log.

        Raises:
            TypeError: if the model has a ``train_step`` of its own.
        """
        own = getattr(type(self.module), "train_step", BaseModel.train_step)
        if own is not BaseModel.train_step:
            raise TypeError(
                f"{type(self.module).__name__} has a train_step of its own, which does not know of "
                "DistributedDataParallel. Wrap the model in SeparateDistributedDataParallel, or in "
                "a subclass of StepDistributedDataParallel with such a train_step"
            )
        return train_step(self.module, data, optim_wrapper, self, self.detect_anomalous_params)

    def val_step(self, data: Any) -> Any:
        """The model's own; the ranks do not communicate."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """The model's own; the ranks do not communicate."""
        return self.module.test_step(data)
