"""Models that are built without memory, on the meta device, and get their weights later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hooktrain.model.sharding import tied_parameters
from hooktrain.utils import comm
from hooktrain.utils.dtensor import full_tensor, local_tensor, shard_like
from hooktrain.utils.env import get_rng_state, set_rng_state

__all__ = ["init_deferred"]


@torch.no_grad()
def init_deferred(model: nn.Module, device: torch.device | str) -> None:
    """Give memory and values to a model that was built on the meta device.

    So a model that is too large for one process is built, sharded, and only then initialised::

        with torch.device("meta"):
            model = TextGPT(vocab_size=256, block_size=1024, size="large")
        shard_model(model, wrap={Block})
        init_deferred(model, "cuda")

    As when a model is constructed, each module's ``reset_parameters`` is called, children before
    their parent and in the order in which they are registered; then ``init_weights`` of the
    outermost modules that have it. Random numbers are drawn for a whole tensor at a time, of which
    each rank keeps its shard; a module whose method writes into parts of its weights is in memory
    as a whole for that long. So the values depend on the seed, the device and the model, and not
    on the number of ranks; the main process's count. A single process that constructs the model on
    that device after the same seed gets the same ones, if constructors draw in the order above.

    Args:
        model: all of it on the meta device; sharded or not.
        device: for its memory; that of the ranks' mesh, or the CPU for a model that is offloaded.

    Raises:
        ValueError: if a part of the model is not on the meta device, a parameter or buffer is given
            no value by these methods, or shared parameters would come apart.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if real := sorted(name for name, tensor in tensors.items() if not tensor.is_meta):
        raise ValueError(f"the model must be built on the meta device, but not so: {real}")
    tied = tied_parameters(model)
    model.to_empty(device=device)
    if torn := tied - tied_parameters(model):
        raise ValueError(
            "parameters that are shared would come apart: shard the model first, or build it on "
            f"its device: {sorted(map(sorted, torn))}"
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in tensors.values():
        local_tensor(tensor).fill_(float("nan") if tensor.is_floating_point() else 0)
    model.apply(_reset)
    _init_outermost(model)
    unset = comm.all_gather([name for name, tensor in tensors.items() if _has_nan(tensor)])
    if any(unset):
        raise ValueError(
            f"neither reset_parameters() nor init_weights() of any module gives a value to "
            f"{sorted(set().union(*unset))}"
        )


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):  # the latter in torch's attention
        if callable(method := getattr(module, name, None)):
            _call(method, module)
            return


def _init_outermost(module: nn.Module) -> None:
    if callable(method := getattr(module, "init_weights", None)):
        _call(method, module)
        return
    for child in module.children():
        _init_outermost(child)


def _call(method: Callable[[], Any], module: nn.Module) -> None:
    """Call an initialising method, tensor by tensor where its code allows."""
    before = get_rng_state()
    try:
        with _DrawWhole():  # type: ignore[no-untyped-call]
            method()
    except Exception:
        # It does more than shards can do, or it is wrong, which will show again. For as long as it
        # takes, each rank has the whole module in its memory.
        set_rng_state(before)
        with _whole(module):
            method()


@contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    """Inside, a module has whole parameters; at the end, the ranks' shards of these."""
    places: list[tuple[dict[str, Any], str, Any]] = [
        (inner._parameters, name, parameter)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    wholes = {p: nn.Parameter(full_tensor(p), p.requires_grad) for _, _, p in places}
    for parameters, name, parameter in places:
        parameters[name] = wholes[parameter]
    try:
        yield
        for parameters, name, parameter in places:
            shard = shard_like(parameters[name], parameter)
            local_tensor(parameter).copy_(local_tensor(shard))
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def _has_nan(tensor: Tensor) -> bool:
    # A host-device synchronisation for each tensor, once in a run.
    return bool(local_tensor(tensor).isnan().any())


class _DrawWhole(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what is drawn for a sharded tensor is what would be drawn for the whole one.

    Parts of sharded tensors are refused: what is written into one does not reach the tensor.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if not isinstance(target, DTensor):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            if _is_view(func) and func not in _WHOLE_VIEWS:
                raise NotImplementedError(f"{func} of a sharded tensor")
            return func(*args, **kwargs)
        drawn = shard_like(func(full_tensor(target), *args[1:], **kwargs), target)
        if not func._schema.is_mutable:
            return drawn
        local_tensor(target).copy_(local_tensor(drawn))
        return target


_WHOLE_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _is_view(func: Any) -> bool:
    results = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in results)
