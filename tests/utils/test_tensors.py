"""Shards of tensors, batches on the device of the model, and what is not finite."""

import math
import zlib
from collections import UserDict, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from gloo import run_ranks
from hooktrain.utils.tensors import (
    as_bytes,
    checksum,
    compute_device,
    mover_to,
    non_finite,
    shard_like,
)

there = nn.Linear(2, 2, device="meta")


class Pair(NamedTuple):
    image: Tensor
    name: str


@dataclass(frozen=True)
class Sample:
    image: Tensor
    size: tuple[int, int]
    known: bool = field(init=False, default=True)


class Encoding(UserDict[str, Tensor]):
    """As those of Hugging Face's tokenizers."""

    def to(self, device: torch.device) -> "Encoding":
        return Encoding({key: value.to(device) for key, value in self.items()})


def test_tensors_move_in_containers_which_keep_their_types() -> None:
    here = torch.zeros(2)
    filled = defaultdict(list, image=[here])
    batch = {
        "pair": Pair(here, "a"),
        "sample": Sample(here, (3, 4)),
        "encoding": Encoding(ids=here),
        "nested": [(here, None), filled],
        "text": "cat",
    }
    moved = mover_to(there)(batch)
    assert type(moved) is dict
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["sample"], Sample)
    assert isinstance(moved["encoding"], Encoding)
    assert type(moved["nested"][1]) is defaultdict
    assert (moved["pair"].name, moved["sample"].size, moved["text"]) == (
        "a",
        (3, 4),
        "cat",
    )
    tensors = [
        moved["pair"].image,
        moved["sample"].image,
        moved["encoding"]["ids"],
        moved["nested"][0][0],
        moved["nested"][1]["image"][0],
    ]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 5
    assert filled["image"][0].device.type == "cpu"  # the batch itself is as it was


class Named(list[Tensor]):
    """A list with a constructor of its own."""

    def __init__(self, items: list[Tensor], name: str) -> None:
        super().__init__(items)
        self.name = name


class Swapped(tuple[Tensor, ...]):
    """A tuple whose constructor does not take its items."""

    def __init__(self, *args: Any) -> None:
        raise AssertionError("a copy calls no constructor")


def test_containers_of_any_constructor_move_and_keep_what_else_they_have() -> None:
    here = torch.zeros(2)
    ring = deque([here], maxlen=3)
    swapped = tuple.__new__(Swapped, [here])
    batch = [Named([here], "a"), ring, swapped]
    named, moved_ring, moved_tuple = mover_to(there)(batch)
    assert (type(named), named.name, named[0].is_meta) == (Named, "a", True)
    assert (moved_ring.maxlen, moved_ring[0].is_meta) == (3, True)
    assert (type(moved_tuple), moved_tuple[0].is_meta) == (Swapped, True)
    assert not ring[0].is_meta


class Picky(Encoding):
    """As detectron2's boxes: it takes nothing but the device."""


class Quick(Encoding):
    """As encodings of today, which a batch from pinned memory need not wait for."""

    waited = True

    def to(self, device: torch.device, non_blocking: bool = False) -> "Quick":
        moved = Quick(super().to(device))
        moved.waited = not non_blocking
        return moved


def test_objects_that_can_are_moved_without_waiting() -> None:
    here = torch.zeros(2)
    quick, picky = mover_to(there)([Quick(ids=here), Picky(ids=here)])
    assert not quick.waited
    assert quick["ids"].is_meta
    assert picky["ids"].is_meta


def test_an_offloaded_model_computes_on_the_device_of_its_mesh() -> None:
    model = nn.Linear(2, 2)
    offloaded: Any = model.weight
    offloaded.device_mesh = SimpleNamespace(device_type="meta")
    assert compute_device(model).type == "meta"
    assert mover_to(model)(torch.zeros(2)).is_meta


class Owner(nn.Linear):
    def train_step(self, data: Any, optim_wrapper: Any) -> None: ...


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.ReLU(), Owner(2, 2, device="meta")]
)
def test_on_the_cpu_and_for_models_with_a_step_a_batch_stays_as_it_is(
    model: nn.Module,
) -> None:
    batch = [torch.zeros(2)]
    assert mover_to(model)(batch) is batch


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def test_what_is_not_finite_is_named_whatever_the_dtype() -> None:
    tensors = {
        f"{dtype} {value}": torch.tensor([1, value, 2], dtype=dtype)
        for dtype in DTYPES
        for value in (3, math.nan, math.inf, -math.inf)
    }
    tensors["sparse nan"] = torch.full((2,), math.nan).to_sparse()
    tensors["the largest"] = torch.full(
        (9,), torch.finfo(torch.float64).max, dtype=torch.float64
    )
    bad = [name for name in tensors if name.endswith(("nan", "inf"))]
    assert len(bad) == 16
    assert non_finite(tensors) == {f"{name} is {name[-3:]}" for name in bad}
    inside = {"state": {"moments": [torch.ones(1), torch.tensor(math.nan)]}}
    assert non_finite(inside) == {"state.moments.1 is nan"}


def test_what_has_no_numbers_to_look_at_is_passed_over() -> None:
    others = {
        "an integer": torch.ones(2, dtype=torch.int64),
        "empty": torch.ones(0, 3),
        "without data": torch.ones(2, device="meta"),
        "lazy": nn.UninitializedParameter(),
        "sparse and empty": torch.zeros(2).to_sparse(),
        "one byte": torch.ones(2).to(torch.float8_e4m3fn),
        "no tensor": {"version": 2},
    }
    assert non_finite(others) == set()


def take_shards(path: Path) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ]
    found = []
    for value in torch.load(path, mmap=True):
        for places in placements:
            like = distribute_tensor(torch.zeros(3, 5), mesh, places)
            with CommDebugMode() as traffic:
                taken: Any = shard_like(value, like)
            assert traffic.get_total_counts() == 0
            assert taken.placements == tuple(places)
            assert taken.dtype == value.dtype
            found.append(torch.equal(taken.full_tensor(), value))
    return found


def test_each_rank_takes_its_shard_of_a_mapped_file_and_nothing_travels(
    tmp_path: Path,
) -> None:
    numbers = torch.arange(15)  # three rows, fewer than ranks
    torch.save([numbers.view(3, 5), numbers.float().view(5, 3).t()], tmp_path / "a.pth")
    assert run_ranks(take_shards, 4, tmp_path / "a.pth") == [[True] * 8] * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3)[1:2, 1],  # a single number with the stride 3
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j])
        .conj()
        .imag,  # a view whose numbers are negated when read
    ],
    ids=["single", "turned", "scalar", "bool", "empty", "conjugate", "negative"],
)
def test_the_bytes_of_a_tensor_are_those_of_a_list_of_its_numbers(
    tensor: Tensor,
) -> None:
    expected = np.array(tensor.tolist(), str(tensor.dtype)[6:]).tobytes()
    assert as_bytes(tensor).numpy().tobytes() == expected
    assert checksum(tensor) == zlib.crc32(expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_has_no_checksum(layout: torch.layout) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    assert checksum(torch.nested.nested_tensor(parts, layout=layout)) == 0
