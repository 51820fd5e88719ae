"""From the data loader to the model: batches on the device, images of one size and scale."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.utils.registry import MODELS
from hooktrain.utils.to_device import can_move, map_items


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
            raise ValueError("bgr_to_rgb and rgb_to_bgr reverse the channels; give one of them")
        given = {"mean": mean, "std": std}
        self._given = {name: values for name, values in given.items() if values is not None}
        if len(self._given) == 1:
            raise ValueError(f"mean and std belong together, but got {mean!r} and {std!r}")
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value
        self._reverse = bgr_to_rgb or rgb_to_bgr
        for name, values in self._given.items():
            if len(values) not in (1, 3):
                raise ValueError(f"{name} must be a list of 1 or 3 numbers, but got {values!r}")
        self._place_statistics()

    def forward(self, data: Mapping[str, Any], training: bool = False) -> dict[str, Any]:
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
        batch = torch.full(size, self.pad_value, dtype=torch.float32, device=images[0].device)
        # One tensor is copied at once, a list image by image.
        pairs = [(batch, images)] if isinstance(images, Tensor) else zip(batch, images, strict=True)
        for place, image in pairs:
            place[..., : image.shape[-2], : image.shape[-1]] = self._normalized(image)
        return batch

    def _checked_shapes(self, images: Any) -> list[tuple[int, ...]]:
        """The shapes of the single images."""
        shapes = [tuple(image.shape) for image in images]
        if {len(shape) for shape in shapes} != {3}:
            raise ValueError(f"inputs must be one or more images of shape (C, H, W), not {shapes}")
        needed = 3 if self._reverse or 3 in map(len, self._given.values()) else shapes[0][0]
        if {shape[0] for shape in shapes} != {needed}:
            raise ValueError(f"images must have {needed} channels, but their shapes are {shapes}")
        return shapes

    def _normalized(self, images: Tensor) -> Tensor:
        images = (images.flip(-3) if self._reverse else images).float()
        return images if self.mean is None or self.std is None else (images - self.mean) / self.std

    def _place_statistics(self) -> None:
        # Not buffers: those lose digits where a model is cast to half precision.
        for name, values in self._given.items():
            placed = torch.tensor(values, dtype=torch.float32, device=self.device)
            setattr(self, name, placed.view(-1, 1, 1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._place_statistics()
        return self
