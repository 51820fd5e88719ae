"""What trainers take as an optimizer; learning rates are scaled."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from hooktrain.solver import OptimWrapper, OptimWrapperDict, as_optim_wrapper
from hooktrain.solver.build import scale_lr
from scheduler_toys import rates, sgd as groups_of
from toys import LinearLoss, sgd


def test_an_optimizer_is_wrapped_and_a_wrapper_returned() -> None:
    optimizer = sgd(LinearLoss())
    wrapper = as_optim_wrapper(optimizer)
    assert type(wrapper) is OptimWrapper
    assert wrapper.optimizer is optimizer
    assert as_optim_wrapper(wrapper) is wrapper
    several = OptimWrapperDict(a=wrapper)
    assert as_optim_wrapper(several) is several


def test_optimizers_and_wrappers_may_have_names() -> None:
    wrapper, optimizer = OptimWrapper(sgd(LinearLoss())), sgd(LinearLoss())
    wrappers: Any = as_optim_wrapper({"a": wrapper, "b": optimizer})
    assert isinstance(wrappers, OptimWrapperDict)
    assert list(wrappers) == ["a", "b"]
    assert wrappers["a"] is wrapper
    assert wrappers["b"].optimizer is optimizer


@pytest.mark.parametrize(
    "given",
    [
        "SGD",
        {},
        {"a": None},
        {"type": "SGD", "lr": 0.1},
        torch.optim.SGD,
        {"a": OptimWrapperDict(b=OptimWrapper(sgd(LinearLoss())))},
    ],
)
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="OptimWrapper"):
        as_optim_wrapper(given)


def test_learning_rates_are_multiplied() -> None:
    first, second = OptimWrapper(groups_of(0.1, 0.2)), OptimWrapper(groups_of(0.4))
    scale_lr(first, 12, 4)
    assert rates(first) == pytest.approx([0.3, 0.6])
    scale_lr(OptimWrapperDict(first=first, second=second), 1, 2)
    assert rates(first) == pytest.approx([0.15, 0.3])
    assert rates(second) == pytest.approx([0.2])


def test_rates_that_a_scheduler_has_noted_are_not_multiplied() -> None:
    first, noted = OptimWrapper(groups_of(0.1)), OptimWrapper(groups_of(0.4))
    StepLR(noted.optimizer, step_size=1)
    with pytest.raises(RuntimeError, match="scheduler"):
        scale_lr(OptimWrapperDict(first=first, noted=noted), 8, 4)
    with pytest.raises(ValueError, match=r"batch size of the loader .* 0"):
        scale_lr(first, 0, 4)
    with pytest.raises(ValueError, match=r"base_batch_size .* None"):
        scale_lr(first, 4, None)
