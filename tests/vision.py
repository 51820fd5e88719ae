"""Imports torchvision, if it is there, also where it is a build for another torch than this one.

The operators of a build for CUDA are missing beside a torch without. To be imported it needs their
names; no test calls them. torchmetrics imports it too.
"""

import importlib
from contextlib import suppress

import torch

with suppress(ImportError):
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for operator in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)
        importlib.import_module("torchvision")
