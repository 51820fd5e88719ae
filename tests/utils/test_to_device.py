"""Batches of any structure come to the device of the model; a device without data stands for it."""

from collections import UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hooktrain.utils.tensors import mover_to

there = nn.Linear(2, 2, device="meta")


class Pair(NamedTuple):
    image: Tensor
    name: str


@dataclass(frozen=True)
class Sample:
    image: Tensor
    size: tuple[int, int]


class Encoding(UserDict[str, Tensor]):
    """As those of Hugging Face's tokenizers."""

    def to(self, device: torch.device) -> "Encoding":
        return Encoding({key: value.to(device) for key, value in self.items()})


def test_tensors_move_in_containers_of_every_kind_which_keep_their_types() -> None:
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_computes_with_what_was_copied_beside_the_computation() -> None:
    move = mover_to(nn.Linear(1, 1, device="cuda"))
    batches = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(50)]
    sums = [(move(batch) * 2).sum() for batch in batches]
    assert [value.item() for value in sums] == [float(2 * i << 20) for i in range(50)]
