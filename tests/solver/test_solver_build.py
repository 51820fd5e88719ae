"""What trainers take as an optimizer."""

from typing import Any

import pytest
import torch

from hooktrain.solver import OptimWrapper, OptimWrapperDict, as_optim_wrapper
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
    "given", ["SGD", {}, {"a": None}, {"type": "SGD", "lr": 0.1}, torch.optim.SGD]
)
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="OptimWrapper"):
        as_optim_wrapper(given)


def test_optimizers_in_a_list_are_told_to_have_names() -> None:
    optimizers: Any = [sgd(LinearLoss()), sgd(LinearLoss())]
    with pytest.raises(
        TypeError, match=r"\{'generator': \.\.\..*but got \[SGD"
    ) as error:
        as_optim_wrapper(optimizers)
    assert len(str(error.value)) < 200  # not all settings of all groups
