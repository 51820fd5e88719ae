"""Computes one iteration under a magnifying glass."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from hooktrain.engine.train_loop import HookBase
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils.tensors import local_tensor

logger = logging.getLogger(__name__)


class Replay(HookBase):
    """Shows all layers in one iteration, then ends the process: where does the NaN come from?

    In that iteration autograd's anomaly detection is on, which names the operation whose gradient
    is NaN. Then a table is logged: each parameter and buffer before the step, each layer's output
    in the order of computation, each gradient. Of a sharded model it shows this rank's shards.
    :meth:`DefaultTrainer.replay` (``--replay`` in ``tools/train_net.py``) computes any past
    iteration again from the checkpoint before it.

    Args:
        iteration: the iteration.
    """

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._rows: list[list[Any]] = []
        self._undo = ExitStack()

    def before_step(self) -> None:
        """Begin to look, in that iteration."""
        if self.trainer.iter != self._iteration:
            return
        model: nn.Module = unwrap_model(self.trainer.model)
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            self._note(name, "before", tensor)
        for name, module in model.named_modules():
            handle = module.register_forward_hook(partial(self._note_output, name))
            self._undo.callback(handle.remove)
        self._undo.enter_context(torch.autograd.set_detect_anomaly(True))

    def after_backward(self) -> None:
        """Look at the gradients."""
        if self.trainer.iter == self._iteration:
            for name, parameter in unwrap_model(self.trainer.model).named_parameters():
                if parameter.grad is not None:
                    self._note(name, "gradient", parameter.grad)

    def after_step(self) -> None:
        """End the process with exit code 0."""
        if self.trainer.iter == self._iteration:
            raise SystemExit(0)

    def after_train(self) -> None:
        """Log the table, also if the iteration failed."""
        self._undo.close()
        headers = ["tensor", "when", "not finite", "mean", "rms", "largest"]
        table = tabulate(self._rows, headers=headers, tablefmt="pipe", floatfmt=".4g")
        logger.info("Iteration %d, layer by layer:\n%s", self._iteration, table)
        broken = [f"{name} ({kind})" for name, kind, count, *_ in self._rows if count]
        logger.info(
            "Not finite, the first one first: %s", ", ".join(broken) or "nothing"
        )

    def _note_output(
        self, name: str, module: nn.Module, args: Any, output: Any
    ) -> None:
        if isinstance(output, Mapping):
            output = list(output.values())
        for value in output if isinstance(output, Sequence) else [output]:
            if isinstance(value, Tensor):
                self._note(name or type(module).__name__, "output", value)

    def _note(self, name: str, kind: str, tensor: Tensor) -> None:
        values = local_tensor(tensor.detach()).double()
        finite = values[values.isfinite()]
        count = values.numel() - finite.numel()
        mean, rms = (
            finite.mean(),
            finite.square().mean().sqrt(),
        )  # NaN if nothing is finite
        largest = finite.abs().max() if finite.numel() else mean
        # Host-device synchronisation, for each tensor.
        self._rows.append([name, kind, count, mean.item(), rms.item(), largest.item()])
