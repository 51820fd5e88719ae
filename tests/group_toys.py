"""Models with many kinds of parameters, for the tests of parameter groups."""

import torch
from torch import nn


class Net(nn.Module):
    """The parameters are, in this order,

    bias, scale, backbone.{stem,norm,depthwise,group_norm,instance_norm}.{weight,bias},
    backbone.pointwise.weight, head.{weight,bias}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, 2))
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Module()
        self.backbone.stem = nn.Conv2d(1, 4, 3)  # one channel: it is depthwise too
        self.backbone.norm = nn.BatchNorm2d(4)
        self.backbone.depthwise = nn.Conv2d(4, 8, 3, groups=4)
        self.backbone.group_norm = nn.GroupNorm(2, 4)
        self.backbone.instance_norm = nn.InstanceNorm2d(4, affine=True)
        self.backbone.pointwise = nn.Conv2d(8, 4, 1, bias=False)
        self.head = nn.Linear(4, 4)


def half_frozen() -> Net:
    model = Net()
    model.head.requires_grad_(False)
    return model


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


NAMES = [name for name, _ in Net().named_parameters()]
