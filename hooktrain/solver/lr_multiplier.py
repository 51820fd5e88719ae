"""A schedule of the learning rate, as a factor over the whole run."""

import logging
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hooktrain.solver.composite import check_is_schedule
from hooktrain.solver.schedule import ParamScheduler

logger = logging.getLogger(__name__)


class LRMultiplier(LRScheduler):
    """Sets the learning rate of each group to ``base_lr * multiplier(step / max_iter)``.

    ``base_lr`` is the group's ``initial_lr``, or its ``lr`` where it has none. The rate of the
    first step is set at once. Steps beyond ``max_iter`` keep the final value.

    It is a torch ``LRScheduler`` that takes a fraction of the time of torch's own, since it leaves
    ``optimizer.step`` as it is and does not watch the order of steps.

    Args:
        optimizer: has its ``param_groups`` written to. A ``lr`` that is a tensor is filled in
            place.
        multiplier: a function of the progress of the run, in [0, 1].
        max_iter: the number of steps of the run, at least 1.
        last_iter: the last finished step of a run to continue; -1 starts a new one.

    Raises:
        TypeError: ``optimizer`` or ``multiplier`` is of another type.
        ValueError: ``max_iter`` or ``last_iter`` is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        multiplier: ParamScheduler,
        max_iter: int,
        last_iter: int = -1,
    ) -> None:
        # The constructor of torch is not called: it would replace optimizer.step by a slower one.
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer: {optimizer!r}")
        check_is_schedule("multiplier", multiplier)
        if max_iter <= 0:
            raise ValueError(f"max_iter must be at least 1: {max_iter!r}")
        if last_iter < -1:
            raise ValueError(f"last_iter must be at least -1: {last_iter!r}")
        self.optimizer = optimizer
        self.last_epoch = last_iter
        self._multiplier = multiplier
        self._max_iter = max_iter
        # Synchronises with the device once, if the rates are tensors there.
        self.base_lrs: list[float | Tensor] = [
            float(group.setdefault("initial_lr", float(group["lr"])))
            for group in optimizer.param_groups
        ]
        self.step()

    def get_lr(self) -> list[float | Tensor]:
        """The rates of step ``last_epoch``, one float a group."""
        factor = self._multiplier(min(self.last_epoch / self._max_iter, 1.0))
        return [base * factor for base in self.base_lrs]

    def get_last_lr(self) -> list[float | Tensor]:
        """The rates set last, one float a group."""
        return self.get_lr()

    def step(self, epoch: int | None = None) -> None:
        """Go on by one step, or to step ``epoch``, and set the rates.

        Raises:
            ValueError: a group was added to the optimizer, for which there is no base rate.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            raise ValueError(
                f"the optimizer now has {len(groups)} parameter groups, and LRMultiplier was made "
                f"for {len(self.base_lrs)}: make a new one after adding groups"
            )
        factor = self._multiplier(min(self.last_epoch / self._max_iter, 1.0))
        for i, base_lr in enumerate(self.base_lrs):
            group = groups[i]
            if isinstance(group["lr"], Tensor):
                # In place, for captured graphs; no synchronisation.
                group["lr"].fill_(base_lr * factor)
            else:
                group["lr"] = base_lr * factor

    def state_dict(self) -> dict[str, Any]:
        """The base rates and the number of the current step; the schedule is not part of it."""
        return {"base_lrs": list(self.base_lrs), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved step, and set the rates at once.

        If the optimizer has another number of groups than then, their ``initial_lr`` counts.

        Raises:
            KeyError: an entry is missing.
        """
        for key in ("base_lrs", "last_epoch"):
            if key not in state_dict:
                raise KeyError(f"the state of LRMultiplier has no {key!r}: {sorted(state_dict)}")
        groups = self.optimizer.param_groups
        base_lrs = [float(lr) for lr in state_dict["base_lrs"]]
        if len(base_lrs) != len(groups):
            logger.warning(
                "The state is of %d parameter groups, and the optimizer has %d: the base rates are "
                "their initial_lr",
                len(base_lrs),
                len(groups),
            )
            base_lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self.base_lrs = list(base_lrs)
        self.step(int(state_dict["last_epoch"]))
