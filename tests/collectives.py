"""Sees the collectives of a test."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Notes the names of all collectives, whoever begins them and by whichever function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))
