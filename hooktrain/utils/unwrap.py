"""The model inside of what is wrapped around it."""

from torch import nn

__all__ = ["unwrap_model"]


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside of data parallel wrappers and ``torch.compile``, in any order."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # importing the class of torch.compile takes seconds
            model = model.get_submodule("_orig_mod")
        else:
            return model
