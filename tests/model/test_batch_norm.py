import copy
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.model import get_bn_modules, update_bn_stats


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(
        torch.equal(buffer, before[name]) for name, buffer in model.named_buffers()
    )
    assert_no_hooks(model)


def assert_no_hooks(model: nn.Module) -> None:
    assert all(not module._forward_pre_hooks for module in model.modules())


def assert_statistics(layer: Any, values: Tensor, rtol: float = 1e-5) -> None:
    """Compare with mean and biased variance of each channel, in float64."""
    channels = values.double().transpose(0, 1).flatten(1)
    var, mean = torch.var_mean(channels, 1, correction=0)
    torch.testing.assert_close(layer.running_mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var.double(), var, rtol=rtol, atol=1e-7)


def batches(
    *sizes: int, channels: int = 3, shape: tuple[int, ...] = ()
) -> list[Tensor]:
    return [torch.randn(n, channels, *shape) * 2 + k for k, n in enumerate(sizes)]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), ()),
        (nn.BatchNorm1d(3), (5,)),
        (nn.BatchNorm2d(3), (4, 5)),
        (nn.BatchNorm3d(3), (2, 4, 5)),
        (nn.BatchNorm2d(3, momentum=None), (2, 2)),
        (nn.BatchNorm2d(3, affine=False), (2, 2)),
    ],
)
def test_statistics_are_those_of_all_batches_put_together(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    data = batches(2, 7, 4, shape=shape)
    update_bn_stats(layer, data, num_iters=3)
    assert_statistics(layer, torch.cat(data))


def test_the_batches_of_each_layer_are_counted_as_in_training() -> None:
    class Seldom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.seldom, self.never = (nn.BatchNorm1d(3) for _ in "123")
            self.frozen = nn.BatchNorm1d(3).eval()

        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) > 4:
                inputs = self.seldom(inputs)
            return self.frozen(self.always(self.always(inputs)))

    model = Seldom()
    trained = copy.deepcopy(model)
    data = batches(2, 7, 4)
    update_bn_stats(model, data, num_iters=3)
    for batch in data:
        trained(batch)
    counts = [
        {name: int(norm.num_batches_tracked) for name, norm in each.named_children()}
        for each in (model, trained)
    ]
    assert counts == [{"always": 6, "seldom": 1, "never": 0, "frozen": 0}] * 2


def test_a_large_mean_costs_no_digits_of_the_variance() -> None:
    large = [torch.randn(64, 2) * 0.1 + 3000 for _ in range(20)]
    half = [(torch.randn(32, 2) + 10).bfloat16() for _ in range(4)]
    for data, rtol in ((large, 1e-4), (half, 1e-5)):
        layer = nn.BatchNorm1d(2)
        update_bn_stats(layer, data, num_iters=len(data))
        assert_statistics(layer, torch.cat(data), rtol)


class Branches(nn.Module):
    """The second layer sees only batches with positive sums, the third none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.BatchNorm1d(2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return self.sometimes(x) if x.sum() > 0 else y


def test_batches_that_pass_a_layer_by_do_not_count_for_it() -> None:
    model = Branches()
    nn.init.constant_(model.never.running_mean, 7.0)  # type: ignore[arg-type]
    before = buffers(model.never)
    data = [torch.rand(4, 2) + 1, -torch.rand(6, 2), torch.rand(3, 2)]
    update_bn_stats(model, data, num_iters=3)
    assert_statistics(model.always, torch.cat(data))
    assert_statistics(model.sometimes, torch.cat([data[0], data[2]]))
    assert_unchanged(model.never, before)


def test_only_training_layers_that_keep_statistics_are_concerned() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3).eval(),
        nn.BatchNorm1d(3, track_running_stats=False),
    )
    model.append(nn.InstanceNorm1d(3, track_running_stats=True))
    assert get_bn_modules(model) == [model[0]]
    synchronised = nn.SyncBatchNorm(3)
    assert get_bn_modules(synchronised) == [synchronised]
    before = buffers(model[1])
    update_bn_stats(model[:3], batches(4, 4), num_iters=2)
    assert_unchanged(model[1], before)
    assert [layer.training for layer in model] == [True, False, True, True]
    assert get_bn_modules(model.eval()) == []


def test_too_few_batches_are_refused() -> None:
    model, drawn = nn.Sequential(nn.BatchNorm1d(3)), iter(range(10))
    before = buffers(model)
    update_bn_stats(model, [], num_iters=0)
    assert_unchanged(model, before)
    with pytest.raises(ValueError, match="num_iters=5"):
        update_bn_stats(model, batches(4, 4, 4), num_iters=5)
    assert_no_hooks(model)
    update_bn_stats(model, (torch.randn(2, 3) for _ in drawn), num_iters=4)
    assert list(drawn) == [4, 5, 6, 7, 8, 9]


def test_a_layer_used_twice_has_the_statistics_of_both_uses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = nn.Sequential(nn.BatchNorm1d(3))

        def forward(self, x: Tensor) -> Any:
            self.stage(x)
            return self.stage(x + 4)

    model, data = Twice(), batches(4, 4)
    update_bn_stats(model, data, num_iters=2)
    assert_statistics(model.stage[0], torch.cat([*data, *(x + 4 for x in data)]))


def all_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = [3, 8, 5, 2, 6, 4]
    return [torch.randn(n, 2, generator=generator) + k - 2 for k, n in enumerate(sizes)]


def on_a_rank() -> dict[str, Any]:
    model = Branches()
    data = list(islice(all_batches(), dist.get_rank(), None, 2))
    update_bn_stats(model, data, num_iters=3)
    return {"buffers": buffers(model), "error": too_short()}


def too_short() -> str:
    layer = nn.BatchNorm1d(2)
    data = all_batches()[: 5 - 2 * dist.get_rank()]
    with pytest.raises(ValueError, match="too short") as error:
        update_bn_stats(layer, data, num_iters=5)
    return str(error.value)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(on_a_rank, 2)


def test_a_short_loader_on_one_rank_is_an_error_on_all(ranks: list[Any]) -> None:
    for rank, given in zip(ranks, (5, 3), strict=True):
        assert f"{given} of num_iters=5" in rank["error"]


def test_statistics_are_those_of_all_ranks(ranks: list[Any]) -> None:
    first, second = (rank["buffers"] for rank in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = Branches()
    model.load_state_dict(first, strict=False)
    data = all_batches()
    assert_statistics(model.always, torch.cat(data))
    assert_statistics(model.sometimes, torch.cat([x for x in data if x.sum() > 0]))
    assert torch.equal(first["never.running_var"], torch.ones(2))
