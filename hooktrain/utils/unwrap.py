"""The model inside of what is wrapped around it."""

from torch import nn

from hooktrain.utils.registries import MODEL_WRAPPERS

__all__ = ["unwrap_model"]


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside of all wrappers, in any order.

    These are data parallel ones, those in ``MODEL_WRAPPERS``, which have it as ``module``, and
    ``torch.compile``.
    """
    registered = [wrapper for _, wrapper in MODEL_WRAPPERS if isinstance(wrapper, type)]
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, *registered)
    while True:
        if isinstance(model, wrappers):
            model = model.get_submodule("module")
        elif "_orig_mod" in model._modules:  # importing the class of torch.compile takes seconds
            model = model.get_submodule("_orig_mod")
        else:
            return model
