"""A model with every kind of layer that rules for parameters know, and what they make of it."""

from typing import Any

import torch
from torch import nn

from hooktrain.solver.optim_wrapper_constructor import DefaultOptimWrapperConstructor

Settings = dict[str, tuple[float, float]]


class DeformConv2d(nn.Conv2d):
    """As mmcv's: its class is known by name, and it has a convolution of its own for offsets."""

    def __init__(self) -> None:
        super().__init__(2, 2, 1)
        self.conv_offset = nn.Conv2d(2, 2, 1)
        self.other = nn.Conv2d(2, 2, 1)
        self.conv_offset_norm = nn.BatchNorm2d(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4)
        self.pointwise = nn.Conv2d(8, 4, 1, bias=False)
        self.group_norm = nn.GroupNorm(2, 4)
        self.instance_norm = nn.InstanceNorm2d(4, affine=True)


class Net(nn.Module):
    """The parameters are, in this order,

    bias, scale,
    backbone.stem.{weight,bias}, backbone.norm.{weight,bias},
    backbone.block.depthwise.{weight,bias}, backbone.block.pointwise.weight,
    backbone.block.group_norm.{weight,bias}, backbone.block.instance_norm.{weight,bias},
    deform.{weight,bias}, deform.conv_offset.{weight,bias}, deform.other.{weight,bias},
    deform.conv_offset_norm.{weight,bias},
    head.0.{weight,bias}, head.1.{weight,bias}, frozen.{weight,bias}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, 2))
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Module()
        self.backbone.stem = nn.Conv2d(1, 4, 3)  # one channel: it is depthwise too
        self.backbone.norm = nn.BatchNorm2d(4)
        self.backbone.block = Block()
        self.deform = DeformConv2d()
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.frozen = nn.Linear(1, 1).requires_grad_(False)


class Tied(nn.Module):
    """``embed.weight`` is also ``head.weight``, and the module ``norm`` is also ``branch.norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)
        self.branch = nn.Module()
        self.branch.norm = self.norm
        self.branch.conv = nn.Conv2d(3, 3, 1, groups=3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embed.weight


def settings(model: nn.Module, groups: list[dict[str, Any]]) -> Settings:
    """``(lr, weight_decay)`` of each parameter that is in the groups, by its first name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def ours(model: nn.Module, paramwise_cfg: Any, **options: Any) -> Settings:
    """The settings with SGD's learning rate 1 and weight decay 10, unless told otherwise."""
    cfg = {"optimizer": {"type": "SGD", "lr": 1.0, "weight_decay": 10.0, **options}}
    wrapper = DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model)
    return settings(model, wrapper.optimizer.param_groups)
