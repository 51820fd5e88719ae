import math

import torch
from torch import nn

from hooktrain.utils.tensors import non_finite

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
    bad = {name for name in tensors if name.endswith(("nan", "inf"))}
    assert len(bad) == 16
    assert non_finite(tensors) == bad


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
