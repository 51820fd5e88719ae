"""MMEngine's base classes of models, its preprocessor of images, wrappers and averages."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hooktrain import model as models
from hooktrain.checkpoint import load_checkpoint as load_weights
from hooktrain.compat.mmengine.registry import MODEL_WRAPPERS, MODELS
from hooktrain.compat.peers import of_peers
from hooktrain.model import SeparateDistributedDataParallel, StepDistributedDataParallel
from hooktrain.utils.names import is_loss

logger = logging.getLogger(__name__)


class BaseModule(nn.Module):
    """A module whose ``init_weights`` calls those of its children.

    Args:
        init_cfg: None, or ``dict(type="Pretrained", checkpoint=..., prefix=...)``; where
            mmengine is installed any of its initialisers, or a list of such.
        args: of the next base class.
        kwargs: of the next base class.

    Attributes:
        is_init: whether weights were initialised or loaded. If not, trainers initialise them.
    """

    def __init__(self, init_cfg: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_cfg = init_cfg
        self.is_init = False
        self.register_load_state_dict_post_hook(_is_loaded)  # type: ignore[no-untyped-call]

    def init_weights(self) -> None:
        """Initialise as ``init_cfg`` says, then the children, then load what it names."""
        configs = self.init_cfg or []
        if isinstance(configs, Mapping):
            configs = [configs]
        # The type is a name or mmengine's class.
        pretrained = [each for each in configs if "Pretrained" in str(each["type"])]
        drawn = [each for each in configs if each not in pretrained]
        if drawn:
            otherwise = (
                f"initialise weights in init_weights(), or install mmengine for {drawn}"
            )
            of_peers("initialize", ["mmengine.model"], otherwise)(self, drawn)
        for child in self.children():
            if hasattr(child, "init_weights") and not getattr(child, "is_init", False):
                child.init_weights()  # type: ignore[operator]
        for each in pretrained:
            prefix = each.get("prefix") or ""
            load_weights(self, each["checkpoint"], prefix=prefix)
        self.is_init = True


def _is_loaded(module: Any, _: Any) -> None:
    module.is_init = True


class BaseModel(BaseModule, models.BaseModel):
    """:class:`hooktrain.model.BaseModel` as MMEngine has it.

    Args:
        data_preprocessor: a module, or a dict with its ``type`` in ``MODELS`` and its arguments.
            None is :class:`BaseDataPreprocessor`.
        init_cfg: see :class:`BaseModule`.

    Raises:
        TypeError: for another ``data_preprocessor``.
    """

    def __init__(
        self,
        data_preprocessor: nn.Module | Mapping[str, Any] | None = None,
        init_cfg: Any = None,
    ) -> None:
        if data_preprocessor is None:
            data_preprocessor = BaseDataPreprocessor()
        elif isinstance(data_preprocessor, Mapping):
            data_preprocessor = MODELS.build(data_preprocessor)
        elif not isinstance(data_preprocessor, nn.Module):
            raise TypeError(
                f"data_preprocessor must be a module or a dict, got {data_preprocessor!r}"
            )
        super().__init__(init_cfg, data_preprocessor)

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses, and the values to log, by MMEngine's rule.

        Every entry that has "loss" anywhere in its name is added up. The others, such as an
        accuracy, are only logged.

        Args:
            losses: by name a tensor, of which the mean is taken, or a list or tuple of tensors, of
                which the means are added up.

        Returns:
            The sum, and all values by name without gradient. The sum comes first, as ``loss``,
            unless the model has an entry of that name.

        Raises:
            TypeError: if a value is something else.
            ValueError: if no name has "loss" in it.
        """
        values = {name: _mean(name, value) for name, value in losses.items()}
        terms = [value for name, value in values.items() if is_loss(name)]
        if not terms:
            raise ValueError(
                f"no loss has 'loss' in its name, such as 'loss_cls': {list(losses)}"
            )
        total = reduce(torch.add, terms)
        to_log = {"loss": total, **values}
        return total, {name: value.detach() for name, value in to_log.items()}


def _mean(name: str, value: Any) -> Tensor:
    parts = value if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(
            f"the loss {name!r} must be a tensor or a list of tensors: {value!r}"
        )
    mean: Tensor = reduce(torch.add, [part.mean() for part in parts])
    return mean


class _Container(BaseModule):
    def __init__(self, *args: Any, init_cfg: Any = None, **kwargs: Any) -> None:
        super().__init__(init_cfg, *args, **kwargs)


class Sequential(_Container, nn.Sequential):
    """:class:`torch.nn.Sequential` as a :class:`BaseModule`."""


class ModuleList(_Container, nn.ModuleList):
    """:class:`torch.nn.ModuleList` as a :class:`BaseModule`."""


class ModuleDict(_Container, nn.ModuleDict):
    """:class:`torch.nn.ModuleDict` as a :class:`BaseModule`."""


@MODELS.register_module()
class BaseDataPreprocessor(models.BaseDataPreprocessor):
    """:class:`hooktrain.model.BaseDataPreprocessor` with MMEngine's argument.

    Args:
        non_blocking: is ignored: a copy from pinned memory never blocks.
    """

    def __init__(self, non_blocking: bool = False) -> None:
        super().__init__()


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Makes one normalised batch of images, which may have different sizes.

    In this order: reverse the channels, convert to float32, subtract the mean and divide by the
    standard deviation, pad at the right and the bottom, stack.

    Args:
        mean: of each channel, or one for all, in the order of channels after reversing. Given
            with ``std``, or both None for no normalisation.
        std: standard deviations of the channels, as many.
        pad_size_divisor: height and width are padded to the largest of the batch, rounded up to a
            multiple of this. At least 1.
        pad_value: what is padded with, after normalisation.
        bgr_to_rgb: reverse the order of the channels.
        rgb_to_bgr: the same.
        non_blocking: see :class:`BaseDataPreprocessor`.

    Attributes:
        mean: float32 of shape (C, 1, 1) or (1, 1, 1), whatever the model is cast to; or None.
        std: the same.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad_size_divisor: int = 1,
        pad_value: float = 0,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        non_blocking: bool = False,
    ) -> None:
        super().__init__(non_blocking)
        if (mean is None) != (std is None):
            raise ValueError(
                f"mean and std belong together, but got {mean!r} and {std!r}"
            )
        self.mean, self.std = map(_of_channels, (mean, std))
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value
        self._reverse = bgr_to_rgb or rgb_to_bgr
        self._needs_three = self._reverse or len(mean or ()) == 3

    def forward(
        self, data: Mapping[str, Any], training: bool = False
    ) -> dict[str, Any]:
        """Turn a batch into the arguments of the model's forward.

        Args:
            data: has the images under ``"inputs"``: a list or tuple of shapes (C, H, W), or one
                tensor of shape (N, C, H, W), of any data type. Other entries are kept.
            training: makes no difference.

        Returns:
            A dict with all of ``data`` on the device: ``inputs`` of shape (N, C, H, W), float32,
            and ``data_samples``, None if there were none.

        Raises:
            KeyError: if there is no ``"inputs"``.
            TypeError: if ``data`` is not a dict.
            ValueError: if the images have another shape.
        """
        moved = {**self.cast_data(data)}
        images = moved["inputs"]
        # One tensor is normalised at once, a list image by image.
        parts = [images]
        if not isinstance(images, Tensor):
            parts = [image[None] for image in images]
        height = self._rounded_up(max(part.shape[-2] for part in parts))
        width = self._rounded_up(max(part.shape[-1] for part in parts))
        padded = []
        for part in parts:
            values = self._normalized(part)
            margins = (0, width - part.shape[-1], 0, height - part.shape[-2])
            padded.append(nn.functional.pad(values, margins, value=self.pad_value))
        moved["inputs"] = torch.cat(padded).contiguous()
        moved.setdefault("data_samples", None)
        return moved

    def _rounded_up(self, length: int) -> int:
        return math.ceil(length / self.pad_size_divisor) * self.pad_size_divisor

    def _normalized(self, images: Tensor) -> Tensor:
        # Other shapes would be broadcast.
        if images.ndim != 4 or (self._needs_three and images.shape[1] != 3):
            raise ValueError(
                "inputs must be images of shape (C, H, W), with three channels if these "
                f"are reversed or have a mean each, but got {tuple(images.shape[1:])}"
            )
        if self._reverse:
            images = images.flip(1)
        images = images.float()
        if self.mean is None or self.std is None:
            return images
        # Kept on the device of the images, so that one batch alone waits for the copy.
        self.mean = self.mean.to(images.device)
        self.std = self.std.to(images.device)
        return (images - self.mean) / self.std


def _of_channels(values: Sequence[float] | None) -> Tensor | None:
    # Not a buffer: those lose digits where a model is cast to half precision.
    if values is None:
        return None
    return torch.tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1)


def detect_anomalous_params(loss: Any, model: nn.Module) -> list[str]:
    """Log, as errors, the trainable parameters that get no gradient from a loss.

    They were not used in the forward pass, or what was computed from them was not used for the
    loss. DistributedDataParallel waits for the gradients of all parameters, and fails if some do
    not come. Call it before or after the backward pass. It does not see what reentrant activation
    checkpointing computes, and wrongly reports those parameters.

    Args:
        loss: a tensor, or dicts, lists or tuples of tensors, nested in any way.
        model: the model.

    Returns:
        The names of the parameters.
    """
    tensors = [leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor)]
    reached = set(map(id, tensors))
    # Not recursive: a graph may be deeper than Python's stack.
    pending: Any = [tensor.grad_fn for tensor in tensors]
    seen = {None}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        # The node that accumulates the gradient of a leaf knows it.
        reached.add(id(getattr(node, "variable", None)))
        pending += [parent for parent, _ in node.next_functions]
    missed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            missed.append(name)
            logger.error(
                "%s with shape %s is not in the computational graph",
                name,
                parameter.size(),
            )
    return missed


for _wrapper in (
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    models.NamingDistributedDataParallel,
    StepDistributedDataParallel,
    SeparateDistributedDataParallel,
):
    MODEL_WRAPPERS.register(_wrapper)


@MODEL_WRAPPERS.register_module()
class MMDistributedDataParallel(StepDistributedDataParallel):
    """:class:`hooktrain.model.StepDistributedDataParallel` with MMEngine's option.

    Args:
        module: the model, on its device.
        detect_anomalous_params: log in each step the parameters that the loss does not
            depend on, see :func:`detect_anomalous_params`. It takes time.
        **kwargs: see :class:`hooktrain.model.StepDistributedDataParallel`.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(module, **kwargs)
        self.detect_anomalous_params = detect_anomalous_params

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the model's method, and log the parameters that the sum does not depend on."""
        loss, values = super().parse_losses(losses)
        if self.detect_anomalous_params:
            detect_anomalous_params(loss, self.module)
        return loss, values


@MODEL_WRAPPERS.register_module()
class MMSeparateDistributedDataParallel(SeparateDistributedDataParallel):
    """:class:`hooktrain.model.SeparateDistributedDataParallel` under MMEngine's name."""


class BaseAveragedModel(models.BaseAveragedModel):
    """:class:`hooktrain.model.BaseAveragedModel` with MMEngine's method to override.

    The first update copies the weights.

    Args:
        model: see there.
        args: see there.
        update_buffers: average buffers of floats too, instead of copying them.
        kwargs: see there.
    """

    def __init__(
        self, model: nn.Module, *args: Any, update_buffers: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(model, *args, **kwargs)
        self.update_buffers = update_buffers
        if not update_buffers:
            return
        for name, buffer in self.module.named_buffers():
            if buffer.is_floating_point():
                self._averaged.add(name)

    def avg_func(
        self, averaged_param: Tensor, source_param: Tensor, steps: int
    ) -> None:
        """Average one tensor in place, by :meth:`blending_weight`.

        Args:
            averaged_param: the average, to be changed.
            source_param: the present value.
            steps: the number of updates before this one, a multiple of ``interval``.
        """
        averaged_param.lerp_(source_param, self.blending_weight(steps))

    def _average(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        for average, weight in zip(averages, weights, strict=True):
            if self._steps == 0:
                average.copy_(weight)
            else:
                self.avg_func(average, weight, self._steps)


@MODELS.register_module()
class ExponentialMovingAverage(BaseAveragedModel, models.ExponentialMovingAverage):
    """:class:`hooktrain.model.ExponentialMovingAverage` for MMEngine's subclasses."""


@MODELS.register_module()
class StochasticWeightAverage(BaseAveragedModel, models.StochasticWeightAverage):
    """:class:`hooktrain.model.StochasticWeightAverage` for MMEngine's subclasses."""


def convert_sync_batchnorm(
    module: nn.Module, implementation: str = "torch"
) -> nn.Module:
    """Make each batch norm of a model a :class:`torch.nn.SyncBatchNorm`.

    Convert before the model is wrapped in DistributedDataParallel. torch refuses these layers on
    the CPU.

    Args:
        module: the model.
        implementation: ``"torch"``; MMEngine has others.

    Returns:
        The model with other layers in it; or another layer, if it is one batch norm.

    Raises:
        ValueError: for another implementation.
    """
    if implementation != "torch":
        raise ValueError(f"implementation must be 'torch', but got {implementation!r}")
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-any-return]
