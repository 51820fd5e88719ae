import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hooktrain.model import BaseDataPreprocessor, ImgDataPreprocessor
from hooktrain.utils.registry import MODELS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mmengine.model import (
        BaseDataPreprocessor as TheirBase,
        ImgDataPreprocessor as TheirImages,
    )

SAME_EACH_TIME = settings(
    deadline=None, derandomize=True, database=None, max_examples=60
)

Point = namedtuple("Point", ["x", "y"])


class Boxes:
    """Has `to`, which takes a device and nothing else."""

    def __init__(self, device: Any = "cpu") -> None:
        self.device = torch.device(device)

    def to(self, device: torch.device) -> "Boxes":
        return Boxes(device)


class Settings(dict[str, Any]):
    """Cannot be made from pairs."""

    def __init__(self, *, name: str) -> None:
        super().__init__()
        self.name = name


class Samples(list[Any]):
    """A list with something to it."""

    source = ""


def there(data: Any) -> Any:
    """Cast to a device that is not the CPU."""
    return BaseDataPreprocessor().to("meta").cast_data(data)


def test_tensors_are_moved_wherever_they_are_and_containers_keep_their_types() -> None:
    one = torch.ones(1)
    data = {
        "a": [one, (one, "text"), Boxes()],
        "b": Point(one, 2),
        "c": OrderedDict(d=one),
    }
    moved = there(data)
    assert moved["a"][2].device == torch.device("meta")  # what has `to` is moved by it
    for each, is_meta in ((moved, True), (data, False)):
        tensors = [each["a"][0], each["a"][1][0], each["b"].x, each["c"]["d"]]
        assert [tensor.is_meta for tensor in tensors] == [is_meta] * 4
        assert (type(each["b"]), type(each["c"])) == (Point, OrderedDict)
        assert (each["a"][1][1], each["b"].y) == ("text", 2)


def test_kinds_of_dicts_and_lists_that_cannot_be_made_from_pairs_are_kept_too() -> None:
    one = torch.ones(1)
    groups = defaultdict(list, {"a": [one]})
    moved = there(groups)
    assert moved["a"][0].is_meta
    assert moved["missing"] == []
    assert "missing" not in groups
    options = Settings(name="x")
    options["a"] = one
    moved = there(options)
    assert type(moved) is Settings
    assert moved.name == "x"
    assert moved["a"].is_meta
    assert not options["a"].is_meta
    samples = Samples([one])
    samples.source = "disk"
    moved = there(samples)
    assert type(moved) is Samples
    assert moved.source == "disk"
    assert moved[0].is_meta
    assert there(Counter("aab")) == Counter("aab")
    assert there(UserDict(a=one))["a"].is_meta


def test_kinds_of_tuples_are_kept() -> None:
    assert there(torch.Size([1, 2])) == torch.Size([1, 2])
    assert type(there(torch.Size([1, 2]))) is torch.Size
    largest = torch.ones(2, 3).max(dim=0)
    assert type(there(largest)) is type(largest)
    assert there(largest).indices.is_meta


def test_all_else_is_handed_through_in_new_containers() -> None:
    arrays = [b"bytes", bytearray(b"b"), range(3), np.ones(2)]
    for value in (None, "text", *arrays, 2.5, True, {1, 2}, Boxes, dict):
        assert there(value) is value
        assert there([value])[0] is value
    data = {"a": [torch.ones(1)]}
    moved = BaseDataPreprocessor()(data)
    moved["a"].append(1)
    moved["b"] = 2
    assert list(data) == ["a"]
    assert len(data["a"]) == 1


def test_non_blocking_is_asked_for_when_it_is_wanted() -> None:
    class Recorded:
        def to(self, device: torch.device, **options: Any) -> dict[str, Any]:
            return options

    assert BaseDataPreprocessor().cast_data(Recorded()) == {}
    for kind in ("BaseDataPreprocessor", "ImgDataPreprocessor"):
        built = MODELS.build({"type": kind, "non_blocking": True})
        assert built.cast_data(Recorded()) == {"non_blocking": True}


TENSORS = st.integers(0, 5).map(lambda value: torch.tensor(value))
LEAVES = st.one_of(
    TENSORS, st.none(), st.text(max_size=3), st.binary(max_size=3), st.integers()
)
DATA = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=8,
)


@SAME_EACH_TIME
@given(DATA)
def test_casting_gives_what_mmengine_gives(data: Any) -> None:
    assert BaseDataPreprocessor().cast_data(data) == TheirBase().cast_data(data)
    assert type(there(data)) is type(data)


CHANNELS = st.lists(st.floats(0.5, 200, width=32), min_size=3, max_size=3)


@st.composite
def image_cases(draw: st.DrawFn) -> tuple[dict[str, Any], list[Tensor] | Tensor]:
    options: dict[str, Any] = {
        "pad_size_divisor": draw(st.integers(1, 9)),
        "pad_value": draw(st.sampled_from([0, -1, 0.5])),
    }
    if draw(st.booleans()):
        length = draw(st.sampled_from([1, 3]))
        options |= {"mean": draw(CHANNELS)[:length], "std": draw(CHANNELS)[:length]}
    swap = draw(st.sampled_from(["bgr_to_rgb", "rgb_to_bgr", None]))
    options |= {swap: True} if swap else {}
    channels = (
        3 if swap or len(options.get("mean", [])) == 3 else draw(st.integers(1, 4))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from([torch.uint8, torch.float32, torch.float64]))

    def image(*size: int) -> Tensor:
        return (torch.rand(*size, generator=generator) * 255).to(dtype)

    sizes = draw(
        st.lists(
            st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4
        )
    )
    if draw(st.booleans()):
        return options, image(len(sizes), channels, *sizes[0])
    return options, [image(channels, *size) for size in sizes]


@SAME_EACH_TIME
@given(image_cases())
def test_batches_of_images_are_those_of_mmengine(
    case: tuple[dict[str, Any], Any],
) -> None:
    options, images = case
    data = {"inputs": images, "labels": [1]}
    ours = ImgDataPreprocessor(**options)(data)
    theirs = TheirImages(**options)({"inputs": images, "labels": [1]})
    assert list(ours) == list(theirs) == ["inputs", "labels", "data_samples"]
    assert ours["inputs"].dtype == theirs["inputs"].dtype == torch.float32
    assert torch.equal(ours["inputs"], theirs["inputs"])
    assert ours["data_samples"] is None
    assert ours["labels"] == [1]
    assert data["inputs"] is images
    assert len(data) == 2


def test_a_batch_written_out() -> None:
    preprocessor = ImgDataPreprocessor(
        mean=[1, 2, 3], std=[1, 2, 4], pad_size_divisor=2, pad_value=9, bgr_to_rgb=True
    )
    small = torch.tensor([7, 6, 5], dtype=torch.uint8).view(3, 1, 1)
    data = {"inputs": [small, torch.zeros(3, 2, 3)], "data_samples": ["a", "b"]}
    result = preprocessor(data, training=True)
    assert result["inputs"].shape == (2, 3, 2, 4)
    expected = torch.full((3, 2, 4), 9.0)
    expected[:, 0, 0] = torch.tensor([(5 - 1) / 1, (6 - 2) / 2, (7 - 3) / 4])
    assert torch.equal(result["inputs"][0], expected)
    assert result["data_samples"] == ["a", "b"]


def test_the_mean_keeps_its_digits_in_a_model_of_half_precision() -> None:
    preprocessor = ImgDataPreprocessor(mean=[123.675], std=[58.395]).half()
    assert preprocessor.mean is not None
    assert preprocessor.mean.dtype == torch.float32
    images = torch.full((1, 1, 1, 1), 200.0)
    expected = (torch.tensor(200.0) - torch.tensor(123.675)) / torch.tensor(58.395)
    assert torch.equal(preprocessor({"inputs": images})["inputs"].squeeze(), expected)
    ImgDataPreprocessor()({"inputs": images})["inputs"] += (
        1  # writes to no batch of others
    )
    assert images.item() == 200.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bgr_to_rgb": True, "rgb_to_bgr": True}, "give one of them"),
        ({"mean": [1.0]}, r"belong together, but got \[1.0\] and None"),
        ({"std": [1.0]}, r"belong together, but got None and \[1.0\]"),
        (
            {"mean": [1.0, 2.0], "std": [1.0]},
            r"mean must be a list of 1 or 3 .* \[1.0, 2.0\]",
        ),
        (
            {"mean": [1.0], "std": []},
            r"std must be a list of 1 or 3 numbers, but got \[\]",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ImgDataPreprocessor(**options)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([torch.ones(3, 2, 2)], TypeError, "is not a mapping"),
        ({"image": 1}, KeyError, "inputs"),
        ({"inputs": [np.ones((3, 2, 2))]}, AttributeError, "'numpy.ndarray' object"),
        ({"inputs": None}, TypeError, "'NoneType' object is not iterable"),
        ({"inputs": []}, ValueError, "one or more images"),
        ({"inputs": torch.ones(0, 3, 2, 2)}, ValueError, "one or more images"),
        ({"inputs": torch.ones(3, 2, 2)}, ValueError, r"\(C, H, W\).*\[\(2, 2\), "),
        ({"inputs": [torch.ones(2, 2)]}, ValueError, r"\(C, H, W\).*\[\(2, 2\)\]"),
        (
            {"inputs": [torch.ones(1, 2, 2), torch.ones(3, 2, 2)]},
            ValueError,
            r"1 channels.*\[\(1, 2, 2\), \(3, 2, 2\)\]",
        ),
    ],
)
def test_other_batches_are_refused(
    data: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ImgDataPreprocessor()(data)


@pytest.mark.parametrize(
    "options",
    [
        {"mean": [1, 1, 1], "std": [1, 1, 1]},
        {"mean": [1], "std": [1, 1, 1]},
        {"rgb_to_bgr": True},
    ],
)
def test_images_with_other_than_three_channels_are_refused_where_three_are_needed(
    options: dict[str, Any],
) -> None:
    for images in (torch.ones(2, 1, 2, 2), [torch.ones(4, 2, 2)]):
        with pytest.raises(
            ValueError, match="must have 3 channels, but their shapes are"
        ):
            ImgDataPreprocessor(**options)({"inputs": images})
