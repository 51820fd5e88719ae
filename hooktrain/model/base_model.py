"""The base of models that own their training step, and that step."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hooktrain.utils.registry import MODELS
from hooktrain.utils.tensors import can_move, map_items


@MODELS.register_module()
class BaseDataPreprocessor(nn.Module):
    """Moves a batch to the device where the preprocessor is.

    It moves with the model that it is a part of, by ``to``, ``cuda``, ``cpu`` and so on. It has no
    state. Override :meth:`forward` to do more.

    Args:
        non_blocking: copy from pinned memory without waiting.

    Attributes:
        device: where batches are moved to.
    """

    def __init__(self, non_blocking: bool = False) -> None:
        super().__init__()
        self.non_blocking = non_blocking
        self.device = torch.get_default_device()

    def cast_data(self, data: Any) -> Any:
        """Move tensors in dicts, lists, tuples and dataclasses, and other objects with ``to``.

        Containers are copied and keep their types. Everything else, such as strings and None, is
        returned as it is.
        """
        if can_move(data):
            options = {"non_blocking": True} if self.non_blocking else {}
            return data.to(self.device, **options)
        return map_items(lambda _, item: self.cast_data(item), data)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Turn a batch into the arguments of the model's forward.

        Args:
            data: the batch.
            training: whether it is for training. Subclasses may care.

        Returns:
            A dict of arguments by name, or a list or tuple of arguments. Here it is the batch, on
            the device.
        """
        return self.cast_data(data)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Everything that moves a module calls this. A buffer would know its device too, but
        # DistributedDataParallel would broadcast it in every step.
        self.device = fn(torch.empty(0, device=self.device)).device
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Makes one normalised batch of images, which may have different sizes.

    In this order: reverse the channels, convert to float32, subtract the mean and divide by the
    standard deviation, pad at the right and the bottom, stack.

    Args:
        mean: of the channels, 3 or 1 for all, in the order of channels after reversing. Given
            with ``std``, or both None for no normalisation.
        std: standard deviations of the channels, 3 or 1 for all.
        pad_size_divisor: height and width are padded to the largest of the batch, rounded up to a
            multiple of this. At least 1.
        pad_value: what is padded with, after normalisation.
        bgr_to_rgb: reverse the order of the channels.
        rgb_to_bgr: the same; not both.
        non_blocking: see :class:`BaseDataPreprocessor`.

    Attributes:
        mean: float32 of shape (3, 1, 1) or (1, 1, 1), whatever the model is cast to; or None.
        std: the same.

    Raises:
        ValueError: for an argument out of range.
    """

    mean: Tensor | None = None
    std: Tensor | None = None

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
        if bgr_to_rgb and rgb_to_bgr:
            raise ValueError(
                "bgr_to_rgb and rgb_to_bgr reverse the channels; give one of them"
            )
        given = {"mean": mean, "std": std}
        self._given = {
            name: values for name, values in given.items() if values is not None
        }
        if len(self._given) == 1:
            raise ValueError(
                f"mean and std belong together, but got {mean!r} and {std!r}"
            )
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value
        self._reverse = bgr_to_rgb or rgb_to_bgr
        for name, values in self._given.items():
            if len(values) not in (1, 3):
                raise ValueError(
                    f"{name} must be a list of 1 or 3 numbers, but got {values!r}"
                )
        self._place_statistics()

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
            ValueError: if the shapes of the images are others.
        """
        moved = {**self.cast_data(data)}
        moved["inputs"] = self._batch(moved["inputs"])
        moved.setdefault("data_samples", None)
        return moved

    def _batch(self, images: Any) -> Tensor:
        channels, *sizes = zip(*self._checked_shapes(images), strict=True)
        divisor = self.pad_size_divisor
        padded = [math.ceil(max(lengths) / divisor) * divisor for lengths in sizes]
        size = (len(images), channels[0], *padded)
        batch = torch.full(
            size, self.pad_value, dtype=torch.float32, device=images[0].device
        )
        # One tensor is copied at once, a list image by image.
        pairs = (
            [(batch, images)]
            if isinstance(images, Tensor)
            else zip(batch, images, strict=True)
        )
        for place, image in pairs:
            place[..., : image.shape[-2], : image.shape[-1]] = self._normalized(image)
        return batch

    def _checked_shapes(self, images: Any) -> list[tuple[int, ...]]:
        """The shapes of the single images."""
        shapes = [tuple(image.shape) for image in images]
        if {len(shape) for shape in shapes} != {3}:
            raise ValueError(
                f"inputs must be one or more images of shape (C, H, W), not {shapes}"
            )
        needed = (
            3 if self._reverse or 3 in map(len, self._given.values()) else shapes[0][0]
        )
        if {shape[0] for shape in shapes} != {needed}:
            raise ValueError(
                f"images must have {needed} channels, but their shapes are {shapes}"
            )
        return shapes

    def _normalized(self, images: Tensor) -> Tensor:
        images = (images.flip(-3) if self._reverse else images).float()
        return (
            images
            if self.mean is None or self.std is None
            else (images - self.mean) / self.std
        )

    def _place_statistics(self) -> None:
        # Not buffers: those lose digits where a model is cast to half precision.
        for name, values in self._given.items():
            placed = torch.tensor(values, dtype=torch.float32, device=self.device)
            setattr(self, name, placed.view(-1, 1, 1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._place_statistics()
        return self


logger = logging.getLogger(__name__)


class BaseModel(nn.Module, ABC):
    """A model with steps for training, validation and test; a subclass writes the forward.

    Example::

        class Classifier(BaseModel):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(64, 10)

            def forward(self, inputs, data_samples=None, mode="tensor"):
                scores = self.linear(inputs)
                if mode == "loss":
                    return {"loss": F.cross_entropy(scores, data_samples)}
                if mode == "predict":
                    return scores.argmax(1)
                return scores

    Each method may be overridden. A model with its own :meth:`train_step` needs
    :class:`~hooktrain.model.SeparateDistributedDataParallel` on several ranks, or a subclass of
    :class:`~hooktrain.model.StepDistributedDataParallel` that has this step too.

    Args:
        data_preprocessor: turns a batch into the arguments of :meth:`forward`: a module called with
            the batch and whether it is for training; or a dict to build one from, with its
            ``type`` in ``MODELS`` and its arguments. None is :class:`BaseDataPreprocessor`.

    Attributes:
        data_preprocessor: the module.

    Raises:
        TypeError: if ``data_preprocessor`` is something else.
    """

    def __init__(
        self, data_preprocessor: nn.Module | Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if data_preprocessor is None:
            data_preprocessor = BaseDataPreprocessor()
        elif isinstance(data_preprocessor, Mapping):
            data_preprocessor = MODELS.build(data_preprocessor)
        if not isinstance(data_preprocessor, nn.Module):
            raise TypeError(
                f"data_preprocessor must be a module or a dict: {data_preprocessor!r}"
            )
        self.data_preprocessor = data_preprocessor

    @abstractmethod
    def forward(
        self, inputs: Any, data_samples: Any = None, mode: str = "tensor"
    ) -> Any:
        """Compute losses, predictions or raw outputs.

        The arguments before ``mode`` are what the data preprocessor returns, and may be others.

        Args:
            inputs: the inputs of a batch.
            data_samples: what belongs to them, such as labels.
            mode: ``"loss"`` returns a dict as :meth:`parse_losses` takes it; ``"predict"`` returns
                what the evaluator takes; ``"tensor"`` returns whatever is useful.
        """

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on one batch; see :func:`hooktrain.model.base_model.train_step`.

        Returns:
            The values to log.
        """
        return train_step(self, data, optim_wrapper)

    def val_step(self, data: Any) -> Any:
        """Preprocess one batch and predict.

        It neither changes the model's mode nor turns gradients off: the evaluation around it does.

        Returns:
            What the forward returns.
        """
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def test_step(self, data: Any) -> Any:
        """The same as :meth:`val_step`."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def _run_forward(
        self, data: Any, mode: str
    ) -> Any:  # MMEngine's name: models override it
        if isinstance(data, Mapping):
            return self(**data, mode=mode)
        if isinstance(data, list | tuple):
            return self(*data, mode=mode)
        raise TypeError(
            f"data_preprocessor must return a dict, list or tuple, not {type(data)}"
        )

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses, and the values to log.

        Every entry that has "loss" anywhere in its name is added up; the others, such as an
        accuracy, are only logged.

        Args:
            losses: by name a tensor, of which the mean is taken, or a list or tuple of tensors, of
                which the means are added up.

        Returns:
            The sum, and all values by name without gradient. The sum is first, as ``loss``; if
            the model has an entry of that name beside other losses, it is ``total_loss``.

        Raises:
            TypeError: if a value is something else, or there is no dict.
            ValueError: if no name has "loss" in it, or there is no name left for the sum.
        """
        if not isinstance(losses, Mapping):
            raise TypeError(
                f"mode='loss' must return a dict of losses, not a {type(losses)}"
            )
        values = {name: _mean(name, value) for name, value in losses.items()}
        terms = [value for name, value in values.items() if "loss" in name]
        if not terms:
            raise ValueError(
                f"no loss has 'loss' in its name, such as 'loss_cls': {list(losses)}"
            )
        total_name = "total_loss" if "loss" in values and len(terms) > 1 else "loss"
        if total_name in values and len(terms) > 1:
            raise ValueError(
                f"'total_loss' is the name of the sum, leave it out: {list(losses)}"
            )
        total = sum(terms[1:], start=terms[0])
        detached = {name: value.detach() for name, value in values.items()}
        return total, {total_name: total.detach(), **detached}


def train_step(
    model: Any,
    data: Any,
    optim_wrapper: Any,
    ddp: nn.Module | None = None,
    check: bool = False,
) -> dict[str, Tensor]:
    """One batch: preprocess it, compute the losses, and give their sum to the optimizer.

    Preprocessing and forward are inside the context that decides on the precision, and if ranks
    communicate in the backward pass that follows.

    Args:
        model: the model. Its ``data_preprocessor(data, True)`` gives the arguments of its
            forward with ``mode="loss"``, and its ``parse_losses`` takes what that returns.
        data: a batch, as the data loader gives it.
        optim_wrapper: the :class:`~hooktrain.solver.OptimWrapper`.
        ddp: the DistributedDataParallel around the model, which is called instead of the model and
            communicates; None if there is none.
        check: log the parameters that the loss does not depend on, see
            :func:`detect_anomalous_params`.

    Returns:
        The values to log, without gradient and on the device.

    Raises:
        TypeError: if the preprocessor returns neither dict, list nor tuple.
    """
    forward = model if ddp is None else ddp
    log_vars: dict[str, Tensor]
    with optim_wrapper.optim_context(forward):
        losses = compute_losses(model, data, forward)
    loss, log_vars = model.parse_losses(losses)
    if check:
        detect_anomalous_params(loss, model)
    optim_wrapper.update_params(loss)
    return log_vars


def compute_losses(model: Any, data: Any, forward: Any) -> Any:
    """The losses of one batch in training, as the model returns them.

    Args:
        model: see :func:`train_step`.
        data: a batch, as the data loader gives it.
        forward: what is called: the model, or a
            :class:`~hooktrain.model.StepDistributedDataParallel` around it.
    """
    return forward._run_forward(model.data_preprocessor(data, True), mode="loss")


def init_weights_once(model: nn.Module) -> nn.Module:
    """Call ``init_weights`` of a model whose ``is_init`` says that this was not done yet."""
    if getattr(model, "is_init", True) is False:
        logger.info("%s initialises its weights", type(model).__name__)
        model.init_weights()  # type: ignore[operator]
        model.is_init = True  # type: ignore[assignment]
    return model


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
    reached = {id(tensor) for tensor in tensors}
    # Not recursive: a graph may be deeper than Python's stack.
    pending: list[Any] = [
        tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None
    ]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(
            node, "variable"
        ):  # the node that accumulates the gradient of a leaf
            reached.add(id(node.variable))
        parents = {
            parent for parent, _ in node.next_functions if parent is not None
        } - seen
        seen |= parents
        pending += parents
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missed = {name: p.size() for name, p in trained.items() if id(p) not in reached}
    for name, size in missed.items():
        logger.error("%s with shape %s is not in the computational graph", name, size)
    return list(missed)


def _mean(name: str, value: Any) -> Tensor:
    parts = value if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(
            f"the loss {name!r} must be a tensor or a list of tensors: {value!r}"
        )
    # What is only counted, such as correct answers, may be whole numbers or booleans.
    means = [
        (part if part.is_floating_point() else part.float()).mean() for part in parts
    ]
    total: Tensor = sum(means[1:], start=means[0])
    return total
