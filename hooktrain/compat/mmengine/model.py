"""MMEngine's base classes of models, wrappers and averages."""

import logging
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hooktrain import model as models
from hooktrain.checkpoint import load_checkpoint, load_model_state, local_path
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.compat.mmengine.registry import MODEL_WRAPPERS, MODELS
from hooktrain.compat.peers import import_from_peers
from hooktrain.model import SeparateDistributedDataParallel, StepDistributedDataParallel
from hooktrain.utils.names import is_loss

logger = logging.getLogger(__name__)


class BaseModule(nn.Module):
    """A module whose ``init_weights`` also calls that of its children.

    Args:
        init_cfg: None, or ``dict(type="Pretrained", checkpoint=..., prefix=...)``; if
            mmengine is installed, also any of its initialisers, or a list of them.
        args: arguments of the next base class.
        kwargs: arguments of the next base class.

    Attributes:
        is_init: whether weights were initialised or loaded. If not, trainers initialise them.
    """

    def __init__(self, init_cfg: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_cfg = init_cfg
        self.is_init = False
        self.register_load_state_dict_post_hook(_is_loaded)  # type: ignore[no-untyped-call]

    def init_weights(self) -> None:
        """Initialise by ``init_cfg``, then the children, then load a pretrained checkpoint."""
        configs = self.init_cfg or []
        if isinstance(configs, Mapping):
            configs = [configs]
        # The type is a name or mmengine's class.
        pretrained = [each for each in configs if "Pretrained" in str(each["type"])]
        drawn = [each for each in configs if each not in pretrained]
        if drawn:
            otherwise = f"initialise the weights in init_weights(), or install mmengine for {drawn}"
            import_from_peers("initialize", ["mmengine.model"], otherwise)(self, drawn)
        for child in self.children():
            if hasattr(child, "init_weights") and not getattr(child, "is_init", False):
                child.init_weights()  # type: ignore[operator]
        for each in pretrained:
            prefix = each.get("prefix")
            if not prefix:
                load_checkpoint(self, each["checkpoint"])
                continue
            start = prefix.removesuffix(".") + "."
            state = read_checkpoint(local_path(each["checkpoint"]))["model"]
            part = {n[len(start) :]: state[n] for n in state if n.startswith(start)}
            load_model_state(self, part)
        self.is_init = True


def _is_loaded(module: Any, _: Any) -> None:
    module.is_init = True


class BaseModel(BaseModule, models.BaseModel):
    """MMEngine's form of :class:`hooktrain.model.BaseModel`.

    Args:
        data_preprocessor: a module, or a dict with its ``type`` in ``MODELS`` and its arguments.
            None is :class:`BaseDataPreprocessor`.
        init_cfg: see :class:`BaseModule`.

    Raises:
        TypeError: if ``data_preprocessor`` is any other object.
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
                f"data_preprocessor must be a module or a dict, not {data_preprocessor!r}"
            )
        super().__init__(init_cfg, data_preprocessor)

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the losses, and collect the values to log, by MMEngine's rule.

        Entries with "loss" anywhere in their names are summed. The others, such as an
        accuracy, are only logged.

        Args:
            losses: a dict that maps names to tensors, whose means are taken, or to lists or tuples
                of tensors, whose means are summed.

        Returns:
            The sum, and all values by name without gradient. The sum comes first, as ``loss``,
            unless the model has an entry of that name.

        Raises:
            TypeError: if a value is any other object.
            ValueError: if no name contains "loss".
        """
        values = {name: _mean(name, value) for name, value in losses.items()}
        terms = [value for name, value in values.items() if is_loss(name)]
        if not terms:
            raise ValueError(
                f"no loss has 'loss' in its name, as in 'loss_cls': {list(losses)}"
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
        non_blocking: ignored, since a copy from pinned memory never blocks.
    """

    def __init__(self, non_blocking: bool = False) -> None:
        super().__init__()


def detect_anomalous_params(loss: Any, model: nn.Module) -> list[str]:
    """Log, as errors, the trainable parameters that get no gradient from a loss.

    Either they were not used in the forward pass, or the loss does not depend on their outputs.
    DistributedDataParallel waits for the gradients of all parameters, and fails if some never
    come. Call this before or after the backward pass. It cannot look inside reentrant activation
    checkpointing, and wrongly reports parameters that are used there.

    Args:
        loss: a tensor, or dicts, lists or tuples of tensors, nested in any way.
        model: the model.

    Returns:
        The names of these parameters.
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
        # The node that accumulates the gradient of a leaf holds the leaf.
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
        detect_anomalous_params: whether to log in each step the parameters that the loss does
            not depend on, see :func:`detect_anomalous_params`. This is slow.
        **kwargs: see :class:`hooktrain.model.StepDistributedDataParallel`.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(module, **kwargs)
        self.detect_anomalous_params = detect_anomalous_params

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the model's method, and log the parameters that the loss does not depend on."""
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
        model: see the base class.
        args: see the base class.
        update_buffers: whether to average floating-point buffers too, instead of copying them.
        kwargs: see the base class.
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
        self, averaged_param: Tensor, source_param: Tensor, steps: Any
    ) -> None:
        """Average one tensor in place, by :meth:`blending_weight`.

        Args:
            averaged_param: the average, which is changed.
            source_param: the current value.
            steps: the number of updates before this one, a multiple of ``interval``, as an
                int64 tensor on the CPU (MMEngine's type).
        """
        averaged_param.lerp_(source_param, self.blending_weight(int(steps)))

    def _average(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        steps = torch.tensor(self._steps, device="cpu")
        for average, weight in zip(averages, weights, strict=True):
            if self._steps == 0:
                average.copy_(weight)
            else:
                self.avg_func(average, weight, steps)


@MODELS.register_module()
class ExponentialMovingAverage(BaseAveragedModel, models.ExponentialMovingAverage):
    """:class:`hooktrain.model.ExponentialMovingAverage` for MMEngine's subclasses."""


@MODELS.register_module()
class StochasticWeightAverage(BaseAveragedModel, models.StochasticWeightAverage):
    """:class:`hooktrain.model.StochasticWeightAverage` for MMEngine's subclasses."""
