"""tools/estimate_watch.py counts the storages of fakes as torch's kernels allocate real ones."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from loading import load_tool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

tool = load_tool("estimate_watch")


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.binary_cross_entropy,
        F.l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
    ],
)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_loss_takes_as_much_as_torch_allocates(
    loss: Callable[..., Tensor], reduction: str
) -> None:
    a, b = torch.rand(8, 16), torch.rand(8, 1).expand(8, 16)
    real = loss(a, b, reduction=reduction)
    fakes = FakeTensorMode()
    x, y = fakes.from_tensor(a), fakes.from_tensor(b)
    watch = tool.Watch(fakes, "cpu")
    with fakes, watch:
        result = loss(x, y, reduction=reduction)
    assert watch.now == real.untyped_storage().nbytes()
    del result
    assert watch.now == 0
