from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.model import (
    BatchNormXd,
    convert_sync_batchnorm,
    get_bn_modules,
    revert_sync_batchnorm,
)


@pytest.fixture
def model() -> nn.Module:
    """Batch norms at several depths, one with statistics and weights of its own."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1),
        nn.BatchNorm2d(3, eps=1e-3, momentum=0.3),
        nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm3d(2, momentum=None)),
        nn.BatchNorm2d(3, track_running_stats=False),
    )
    norm = model[1]
    nn.init.normal_(norm.weight)
    norm(torch.randn(4, 3, 2, 2))
    norm.eval()
    norm.weight.requires_grad_(False)
    return model


def facts(module: nn.Module) -> list[Any]:
    return [
        (n.num_features, n.eps, n.momentum, n.affine, n.track_running_stats, n.training)
        for n in module.modules()
        if isinstance(n, nn.modules.batchnorm._BatchNorm)
    ]


def test_there_and_back_everything_but_the_type_stays(model: nn.Module) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before, keys = facts(model), list(model.state_dict())
    for change, kind in [
        (convert_sync_batchnorm, nn.SyncBatchNorm),
        (revert_sync_batchnorm, BatchNormXd),
    ]:
        assert change(model) is model
        assert [type(model[1]), type(model[2][0]), type(model[2][1]), type(model[3])] == [kind] * 4
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert after.keys() == tensors.keys()
        assert all(after[name] is tensor for name, tensor in tensors.items())
        assert facts(model) == before
        assert list(model.state_dict()) == keys
    assert not model[1].weight.requires_grad


def test_reverted_it_computes_what_it_computed_before(model: nn.Module) -> None:
    images = torch.randn(2, 2, 3, 3)
    expected = model[1](model[0](images))
    reverted = revert_sync_batchnorm(convert_sync_batchnorm(model))
    assert torch.equal(reverted[1](reverted[0](images)), expected)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_a_reverted_norm_takes_any_number_of_dimensions(
    shape: tuple[int, ...], training: bool
) -> None:
    reverted = revert_sync_batchnorm(nn.SyncBatchNorm(3)).train(training)
    reference = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 2](3)
    x = torch.randn(shape)
    assert torch.equal(reverted(x), reference.train(training)(x))
    assert torch.equal(reverted.running_var, reference.running_var)


def test_without_channels_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(N, C, ...\), but got torch.Size\(\[3\]\)"):
        BatchNormXd(3)(torch.ones(3))


def test_a_norm_that_is_the_whole_model_is_returned_anew() -> None:
    norm = nn.BatchNorm1d(2)
    converted = convert_sync_batchnorm(norm)
    assert type(converted) is nn.SyncBatchNorm
    assert converted.weight is norm.weight
    assert type(revert_sync_batchnorm(converted)) is BatchNormXd


@pytest.mark.parametrize("change", [convert_sync_batchnorm, revert_sync_batchnorm])
def test_a_norm_at_several_places_stays_one(change: Any) -> None:
    norm = nn.BatchNorm1d(2) if change is convert_sync_batchnorm else nn.SyncBatchNorm(2)
    model = nn.Sequential(norm, nn.Sequential(norm), norm)
    change(model)
    assert model[0] is model[1][0] is model[2] is not norm


def test_what_is_not_to_be_changed_stays_the_same_object() -> None:
    sync, instance = nn.SyncBatchNorm(2), nn.InstanceNorm1d(2)
    model = nn.Sequential(sync, instance)
    convert_sync_batchnorm(model)
    assert (model[0], model[1]) == (sync, instance)
    plain = nn.Sequential(nn.BatchNorm1d(2))
    norm = plain[0]
    revert_sync_batchnorm(plain)
    assert plain[0] is norm


def test_a_reverted_norm_is_found_as_a_batch_norm() -> None:
    model = revert_sync_batchnorm(nn.Sequential(nn.SyncBatchNorm(2)))
    assert get_bn_modules(model) == [model[0]]


def test_another_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="implementation must be 'torch' or 'cpu', but got 'mmcv'"):
        convert_sync_batchnorm(nn.BatchNorm1d(2), "mmcv")
