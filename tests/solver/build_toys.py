"""Shared by test_build.py and test_build_groups.py."""

from typing import Any

import torch
from torch import nn

from hooktrain.solver.build import (
    get_default_optimizer_params,
)


class Net(nn.Module):
    """Parameters: scale, backbone.{stem,norm,block}.{weight,bias}, head.{weight,bias}."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Sequential()
        self.backbone.add_module("stem", nn.Linear(2, 2))
        self.backbone.add_module("norm", nn.BatchNorm1d(2))
        self.backbone.add_module("block", nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)


NAMES = [name for name, _ in Net().named_parameters()]


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options of each parameter."""
    rest = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
    return {n: o for g, o in zip(groups, rest, strict=True) for n in g["param_names"]}


def options(model: nn.Module, **kwargs: Any) -> dict[str, dict[str, Any]]:
    return by_name(get_default_optimizer_params(model, **kwargs))
