"""Shared by test_train_loop.py and test_hooks_of_a_trainer.py."""

from hooktrain.engine import HookBase, TrainerBase


class Recorder(HookBase):
    """Writes down each event as "name event iteration"."""

    def __init__(self, log: list[str], name: str = "hook", fail_at: str = "") -> None:
        self.log, self.name, self.fail_at = log, name, fail_at

    def note(self, event: str) -> None:
        entry = f"{self.name} {event} {self.trainer.iter}"
        self.log.append(entry)
        if entry == self.fail_at:
            raise OSError(entry)

    def before_train(self) -> None:
        self.note("before_train")

    def after_train(self) -> None:
        self.note("after_train")

    def before_step(self) -> None:
        self.note("before_step")

    def after_backward(self) -> None:
        self.note("after_backward")

    def after_step(self) -> None:
        self.note("after_step")


class Trainer(TrainerBase):
    """Notes each step; raises in the iteration `fail_at`."""

    def __init__(self, log: list[str] | None = None, fail_at: int = -1) -> None:
        super().__init__()
        self.log = [] if log is None else log
        self.fail_at = fail_at

    def run_step(self) -> None:
        self.log.append(f"step {self.iter}")
        if self.iter == self.fail_at:
            raise ValueError(f"broken at {self.iter}")
        self.after_backward()
