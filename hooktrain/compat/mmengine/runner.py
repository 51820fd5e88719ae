"""MMEngine's runner and message hub, for hooks and models, and MMCV's runner."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from hooktrain import engine
from hooktrain.checkpoint.files import storable
from hooktrain.compat.mmengine.optim_wrapper import as_mmengine
from hooktrain.events import get_event_storage, has_event_storage
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm


class StepTrainer(engine.StepTrainer):
    """A :class:`hooktrain.engine.StepTrainer` that also supports models for MMCV's runner.

    If a model returns ``loss`` and ``log_vars``, the trainer makes the update, and records only the
    ``log_vars``.
    """

    def _call_step(self, data: Any) -> Mapping[str, Any]:
        outputs = super()._call_step(data)
        if "log_vars" not in outputs:
            return outputs
        log_vars = dict(outputs["log_vars"])
        if "loss" in outputs:
            self.optim_wrapper.update_params(outputs["loss"])
            log_vars.setdefault("loss", outputs["loss"])
        return log_vars


# The trainer's names of attributes of a runner and its loop.
_OURS = {
    "max_iters": "max_iter",
    "train_dataloader": "data_loader",
    "dataloader": "data_loader",
    "hooks": "_hooks",
}


def _find_in_hooks(trainer: Any, name: str) -> Any:
    for hook in trainer._hooks:
        if hasattr(hook, name):
            return getattr(hook, name)
    raise AttributeError(f"no hook of the trainer has a {name}")


def _folder(trainer: Any) -> Any:
    return os.path.abspath(_find_in_hooks(trainer, "checkpointer").save_dir)


# Further attributes of a runner. An attribute of that name of the trainer takes precedence.
_MORE: dict[str, Callable[[Any], Any]] = {
    "work_dir": _folder,
    "log_dir": _folder,
    "param_schedulers": lambda trainer: _find_in_hooks(trainer, "scheduler"),
    "message_hub": lambda trainer: MessageHub.get_instance(),
    "logger": lambda trainer: logging.getLogger("hooktrain"),
    "rank": lambda trainer: comm.get_rank(),
    "world_size": lambda trainer: comm.get_world_size(),
    "distributed": lambda trainer: unwrap_model(trainer.model) is not trainer.model,
    "val_dataloader": lambda trainer: None,
    "val_loop": lambda trainer: None,
}


class Runner:
    """A view of a trainer with the attributes of a runner and its loop.

    It also has the trainer's attributes. Setting an attribute sets it on the trainer.

    Args:
        trainer: the trainer.
        ahead: 1 if the current iteration counts as finished, as in a validation.
        epoch_ahead: 1 if the epoch that this iteration ends counts as finished too.
    """

    def __init__(self, trainer: Any, ahead: int = 0, epoch_ahead: int = 0) -> None:
        vars(self).update(trainer=trainer, ahead=ahead, epoch_ahead=epoch_ahead)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Hooks also read MMEngine's private names.
            return getattr(self, name[1:])
        ours = _OURS.get(name, name)
        if name == "optim_wrapper":
            return as_mmengine(self.trainer.optim_wrapper)
        if hasattr(self.trainer, ours):
            return getattr(self.trainer, ours)
        if name in _MORE:
            return _MORE[name](self.trainer)
        raise AttributeError(
            f"there is no runner.{name} here; if a hook needs it, set trainer.{name}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stop_training" and value:
            self.trainer.request_stop("a hook has set stop_training")
        else:
            setattr(self.trainer, _OURS.get(name, name), value)

    @property
    def iter(self) -> int:
        """The current iteration, or the number of finished ones."""
        return self.finished(self.ahead)

    @property
    def epoch(self) -> int:
        """The current epoch, or the number of finished ones."""
        return self.finished(self.epoch_ahead) // self.epoch_length

    def finished(self, ahead: int) -> int:
        """The number of finished iterations; at the end of the run, all of them."""
        return int(min(self.trainer.iter + ahead, self.trainer.max_iter))

    @property
    def max_epochs(self) -> int:
        """The number of epochs of the run, of which the last may be incomplete."""
        return math.ceil(int(self.trainer.max_iter) / self.epoch_length)

    @property
    def epoch_length(self) -> int:
        """The number of iterations of an epoch, or else of the run."""
        return int(self.trainer.epoch_length or self.trainer.max_iter or 1)

    @property
    def train_loop(self) -> "Runner":
        """The loop, which is this object."""
        return self


class MessageHub:
    """Values that models and hooks share during a run.

    There is a single hub, whatever its name. It has ``iter``, ``epoch``, ``max_iters``,
    ``max_epochs`` and ``eta`` of the running trainer. Its scalars are the metrics in the
    trainer's storage: ``train/loss`` is ``loss``.
    """

    def __init__(self) -> None:
        self._unsaved: dict[str, Any] = {}

    @staticmethod
    def get_instance(name: str = "", **ignored: Any) -> "MessageHub":
        """The hub."""
        return _HUB

    get_current_instance = get_instance

    def get_info(self, key: str, default: Any = None) -> Any:
        """The value of a key, or ``default``."""
        if has_event_storage():
            storage = get_event_storage()
            if key in ("iter", "epoch", "max_iters", "max_epochs"):
                return getattr(Runner(storage), key)
            if key == "eta":  # The printer records it.
                default, _ = storage.latest().get("eta_seconds", (default, 0))
            default = storage.info.get(key, default)
        return self._unsaved.get(key, default)

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set the value of a key.

        Args:
            key: the name.
            value: the value, of any type; if it is saved, tensors and plain types only.
            resumed: whether a value that is set during a run is saved with the run.

        Raises:
            TypeError: if a value to be saved has other types.
        """
        if resumed and has_event_storage():
            self._unsaved.pop(key, None)
            get_event_storage().info |= storable({key: value})
        else:
            self._unsaved[key] = value

    def update_scalar(
        self, key: str, value: Any, count: int = 1, resumed: bool = True
    ) -> None:
        """Record a metric: the mean of ``count`` values whose sum is ``value``."""
        get_event_storage().put_scalar(_metric(key), value / count)

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Record several metrics."""
        for key, value in log_dict.items():
            self.update_scalar(key, value)

    def get_scalar(self, key: str) -> Any:
        """Copy a metric's values into MMEngine's ``HistoryBuffer``."""
        from mmengine.logging import HistoryBuffer  # type: ignore[import-untyped]

        history = get_event_storage().history(_metric(key))
        values = [value for value, _ in history.values()]
        return HistoryBuffer(values, [1] * len(values))


_HUB = MessageHub()


def _metric(key: str) -> str:
    return key.removeprefix("train/")
