"""A single device, or data parallelism: the whole model on each rank, with averaged gradients."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hooktrain.config import instantiate
from hooktrain.model import (
    BaseModel,
    NamingDistributedDataParallel,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    init_weights_once,
    is_model_wrapper,
)
from hooktrain.strategy.base import BaseStrategy
from hooktrain.strategy.environment import count_processes
from hooktrain.utils import comm
from hooktrain.utils.names import locate
from hooktrain.utils.tensors import compute_device


class SingleDeviceStrategy(BaseStrategy):
    """One process on an accelerator, or on the CPU if there is none. The model is not wrapped.

    The process joins no others. If a launcher has started several, each trains its own model, and
    a warning says so.

    The arguments are those of :class:`BaseStrategy`.
    """

    def _join_processes(self) -> None:
        self.launcher = "none"


def create_ddp_model(
    model: nn.Module,
    *,
    fp16_compression: bool = False,
    wrapper: type[nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """Wrap a model in DistributedDataParallel if there are several ranks. A collective.

    Args:
        model: the model, on its device.
        fp16_compression: whether the ranks exchange gradients in float16; not for a
            ``SeparateDistributedDataParallel``.
        wrapper: the class of the wrapper. None is ``NamingDistributedDataParallel`` for a model
            without a ``train_step``, ``StepDistributedDataParallel`` for one that inherits that of
            :class:`hooktrain.model.BaseModel`, and else ``SeparateDistributedDataParallel``.
        options: the wrapper's options; see :class:`torch.nn.parallel.DistributedDataParallel`.

    Returns:
        The wrapped model; in a single process, or if it is wrapped already, the model itself.
    """
    # Before DDP broadcasts the first rank's weights.
    init_weights_once(model)
    if comm.get_world_size() == 1 or is_model_wrapper(model):
        return model
    device = compute_device(model)
    if device.type != "cpu":
        options.setdefault("device_ids", [device.index])
    step = getattr(type(model), "train_step", None)
    fitting = {
        None: NamingDistributedDataParallel,
        BaseModel.train_step: StepDistributedDataParallel,
    }
    kind: Any = wrapper or fitting.get(step, SeparateDistributedDataParallel)
    ddp = kind(model, **options)
    if fp16_compression:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
            fp16_compress_hook,
        )

        ddp.register_comm_hook(state=None, hook=fp16_compress_hook)
    return ddp  # type: ignore[no-any-return]


def refuse_unexchanged(model: nn.Module) -> None:
    """Refuse trainable parameters that were not trainable when DDP wrapped the model.

    The ranks would not exchange their gradients, so the ranks' weights would drift apart.

    Args:
        model: the model. If torch's own DistributedDataParallel wraps it or a child, only the
            number of exchanged parameters is known.

    Raises:
        ValueError: if there are such parameters.
    """
    wrappers: list[Any] = [
        each for each in model.modules() if isinstance(each, DistributedDataParallel)
    ]
    for ddp in wrappers:
        trained = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}
        if hasattr(ddp, "exchanged"):
            exchanged = set(ddp.exchanged)
            left = [n for n, p in trained.items() if p not in exchanged]
        else:
            names = trained.keys() - ddp.parameters_to_ignore
            known = ddp._get_ddp_logging_data()["num_parameter_tensors"]
            left = sorted(names) if len(names) > known else []
        if left:
            raise ValueError(
                "the ranks do not exchange the gradients of parameters that were frozen or "
                f"missing when DistributedDataParallel wrapped the model: {left[:5]}. Freeze "
                "layers that are trained later only after "
                "create_ddp_model(model, find_unused_parameters=True)"
            )


class DDPStrategy(BaseStrategy):
    """DistributedDataParallel over the processes of a launcher, also on the CPU.

    The process joins the others, unless it already has, as in :func:`hooktrain.engine.launch`.
    With a single process the model is not wrapped.

    The arguments are those of :class:`BaseStrategy`.
    """

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Move the model to its device and wrap it."""
        options = {"broadcast_buffers": False, **self.ddp}
        return create_ddp_model(super().wrap_model(model), **options)


def build_strategy(
    strategy: str | Mapping[str, Any] = "auto", **defaults: Any
) -> BaseStrategy:
    """Build a strategy.

    Example::

        build_strategy("auto", seed=0)
        build_strategy(LazyCall(FSDPStrategy)(wrap=["Block"]), device="cpu")

    Args:
        strategy: ``"auto"``, which is :class:`SingleDeviceStrategy` for a single process and
            :class:`DDPStrategy` for several; the name of a class of this package, or the dotted
            name of another class; or a ``LazyCall``.
        defaults: default arguments, which those of a ``LazyCall`` override.

    Raises:
        ImportError: if the name is unknown.
        TypeError: for any other object, such as a built strategy, or for an unknown argument.
    """
    if strategy == "auto":
        # So one configuration serves any number of processes.
        single = count_processes() == 1
        strategy = "SingleDeviceStrategy" if single else "DDPStrategy"
    if isinstance(strategy, str):
        name = strategy if "." in strategy else f"hooktrain.strategy.{strategy}"
        kind = locate(name)
        if callable(kind):  # not a module of this package
            strategy = {"_target_": kind}
    if not isinstance(strategy, Mapping) or "_target_" not in strategy:
        raise TypeError(
            "strategy must be the name of a class like DDPStrategy, or a LazyCall, but got "
            f"{strategy!r}"
        )
    return instantiate({**defaults, **strategy})  # type: ignore[no-any-return]
