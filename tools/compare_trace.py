"""Writes hashes of everything that the iterations of a run compute; see compare.py."""

import argparse
import hashlib
import json
import runpy
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooktrain.config import LazyConfig
from hooktrain.engine import HookBase, TrainerBase, build_trainer, default_setup
from hooktrain.model import unwrap_model
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.utils import comm
from hooktrain.utils.names import dotted
from hooktrain.utils.tensors import full_tensor, map_leaves

Values = dict[str, Any]  # tensors and plain values by name, in the order of computation


class EndOfTraceError(Exception):
    """Ends a run after the last iteration to trace."""


class Trace(HookBase):
    """Writes a hash of everything that an iteration computes, and the values of some iterations.

    It writes ``hashes-RANK.jsonl``, with a list of names and hashes per iteration, and
    ``values-ITERATION-RANK.pt`` to the folder. Hashing a tensor is a host-device synchronisation.

    Args:
        folder: an existing folder.
        end: the iteration after which the run ends, by an error.
        values_from: the first iteration whose values are written; None writes none.
    """

    phase = "end"

    def __init__(self, folder: Path, end: int, values_from: int | None) -> None:
        self.folder = folder
        self.end = end
        self.values_from = values_from
        self.values: Values = {}
        self.passes: Counter[str] = Counter()

    def before_train(self) -> None:
        """Hash the weights, and register hooks for the outputs of all modules."""
        self.hashes = self.folder / f"hashes-{comm.get_rank()}.jsonl"
        if self.hashes.exists():
            raise FileExistsError(f"{self.hashes} already exists: use a new folder")
        self.model = unwrap_model(self.trainer.model)
        self.handles = [
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        ]
        for name, module in self.model.named_modules():
            if is_inside_compiled(self.model, name):
                continue
            title = f"{name or 'the model'} ({type(module).__name__})"
            self.handles.append(
                module.register_forward_hook(self._after_forward(f"output of {title}"))
            )
        for name, weight in self.model.state_dict().items():
            self.look(f"{name} at the start", weight)

    def before_step(self) -> None:
        """Hash the settings of the optimizers."""
        self.passes.clear()
        for key, wrapper in by_name(self.trainer.optim_wrapper).items():
            for i, group in enumerate(wrapper.param_groups):
                for name, value in group.items():
                    if name not in ("params", "param_names"):
                        where = f"group {i} of the optimizer {key}".rstrip()
                        self.look(f"setting {name} of {where}", value)

    def _before_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        self._look_into("input of the model", (args, kwargs))

    def _after_forward(self, title: str) -> Any:
        def look(_module: Any, _args: Any, output: Any) -> None:
            self._look_into(title, output)

        return look

    def _look_into(self, title: str, data: Any) -> None:
        if not self.model.training:  # an evaluation
            return

        def look(path: tuple[Any, ...], leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                self.look(f"{title}: {dotted(path)}" if path else title, leaf)
            return leaf

        map_leaves(look, data)

    def look(self, name: str, value: Any) -> None:
        """Record a value of this iteration. Several passes may have the same name."""
        self.passes[name] += 1
        if self.passes[name] > 1:
            name += f", pass {self.passes[name]}"
        if isinstance(value, Tensor):
            value = full_tensor(value.detach()).cpu().clone()
        self.values[name] = value

    def after_backward(self) -> None:
        """Hash the losses and the gradients, those of the last layers first."""
        for name, loss in getattr(self.trainer, "losses", {}).items():
            self.look(f"loss {name}", loss)
        for name, weight in reversed([*self.model.named_parameters()]):
            if weight.grad is not None:
                self.look(f"gradient of {name}", weight.grad)

    def after_step(self) -> None:
        """Hash the weights, and write the hashes of the iteration."""
        buffers = dict(self.model.named_buffers())
        for name, weight in self.model.state_dict().items():
            kind = "buffer" if name in buffers else "weight"
            self.look(f"{kind} {name} after the update", weight)
        iteration = self.trainer.iter
        line = [
            iteration,
            [(name, digest(value)) for name, value in self.values.items()],
        ]
        with open(self.hashes, "a") as file:
            file.write(json.dumps(line) + "\n")
        if self.values_from is not None and iteration >= self.values_from:
            file = values_file(iteration, comm.get_rank())
            torch.save(self.values, self.folder / file)
        self.values = {}
        if iteration == self.end:
            raise EndOfTraceError

    def after_train(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self.handles:
            handle.remove()


def values_file(iteration: int, rank: int) -> str:
    """The name of the file with the values of an iteration."""
    return f"values-{iteration}-{rank}.pt"


def is_inside_compiled(model: torch.nn.Module, name: str) -> bool:
    """Whether a module is part of a compiled module, or compiled itself."""
    parts = name.split(".") if name else []
    parents = [".".join(parts[:i]) for i in range(len(parts))]
    return any(
        model.get_submodule(parent)._compiled_call_impl is not None
        for parent in parents
    )


def digest(value: Any) -> str:
    """A hash of a tensor's bits, type and shape, or of the text of another value."""
    if not isinstance(value, Tensor):
        return repr(value)
    found = hashlib.blake2b(
        f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=8
    )
    if value.is_sparse:
        value = value.to_dense()
    found.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trace_side(side: dict[str, Any]) -> None:
    """Compute the iterations of one side in this process."""
    cfg = LazyConfig.load(side["config"])
    cfg = LazyConfig.apply_overrides(cfg, side["overrides"])
    folder = Path(side["folder"])
    cfg.train.output_dir = str(folder / "run")
    cfg.train.store = ""
    cfg.train.checkpointer.period = 10**9
    cfg.writers = []
    default_setup(cfg, argparse.Namespace())
    trainer = build_trainer(cfg)
    trainer.register_hooks([Trace(folder, side["end"], side["values_from"])])
    if side["checkpoint"]:
        trainer.checkpointer.load(side["checkpoint"])
    else:
        trainer.checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=False)
    with suppress(EndOfTraceError):
        trainer.train(max_iter=cfg.train.max_iter)


def trace_script(
    command: list[str], folder: Path, until: int, values_from: int | None
) -> None:
    """Run a script in this process, with the hook :class:`Trace` in its trainer.

    Args:
        command: the script and its arguments.
        folder: see :class:`Trace`; it is created.
        until: the iteration after which the process ends.
        values_from: see :class:`Trace`.
    """
    train = TrainerBase.train

    def traced(trainer: TrainerBase, *args: Any, **kwargs: Any) -> None:
        trainer.register_hooks([Trace(folder, until, values_from)])
        try:
            train(trainer, *args, **kwargs)
        except EndOfTraceError:
            sys.exit(0)

    folder.mkdir(parents=True, exist_ok=True)
    TrainerBase.train = traced  # type: ignore[method-assign]
    sys.argv[:] = command
    sys.path[0] = str(Path(command[0]).resolve().parent)  # as for python SCRIPT
    runpy.run_path(command[0], run_name="__main__")
    if not any(folder.iterdir()):
        raise RuntimeError(
            f"{command[0]} has not trained in this process: start its ranks by torchrun, not by "
            "the script itself"
        )
