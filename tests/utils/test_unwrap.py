import torch
from torch import nn

from hooktrain.utils.unwrap import unwrap_model


def test_the_model_inside_of_any_wrappers_is_found() -> None:
    model = nn.Linear(1, 1)
    assert unwrap_model(model) is model
    assert unwrap_model(nn.DataParallel(model)) is model
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    assert unwrap_model(nn.DataParallel(compiled)) is model


def test_a_part_of_a_model_that_is_called_module_is_no_wrapper() -> None:
    outer = nn.Sequential()
    outer.module = nn.Linear(1, 1)
    assert unwrap_model(outer) is outer
