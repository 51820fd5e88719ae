"""What the writers to tracking services have in common."""

import importlib.util
from collections import OrderedDict
from typing import Any

import pytest
import torch

from hooktrain.events.tensorboard_writer import TrackingWriter, flatten
from hooktrain.utils import comm
from hooktrain.utils.events import (
    EventStorage,
    MLflowWriter,
    TensorboardXWriter,
    WandbWriter,
)


class Tool(TrackingWriter):
    """Its package is one that is there."""

    package = "json"

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def send(
        self, storage: EventStorage, scalars: list[tuple[str, float, int]]
    ) -> None:
        self.run = self.run or "run"
        self.log.append(
            (scalars, [name for name, _, _ in storage.images()], dict(self.config))
        )

    def end(self, run: Any, failed: bool) -> None:
        self.log.append((run, failed))


def test_a_configuration_becomes_one_dict_of_plain_values_with_dotted_keys() -> None:
    layers = [{"size": 3}, OrderedDict(act=torch.nn.ReLU)]
    config = {
        "a": {"b": 1, "lr": 0.5},
        "on": True,
        "no": None,
        "layers": layers,
        "end": [1, 2],
    }
    assert flatten({**config, "device": torch.device("cpu"), 3: {}}) == {
        "a.b": 1,
        "a.lr": 0.5,
        "on": True,
        "no": None,
        "layers.0.size": 3,
        "layers.1.act": "ReLU",
        "end": "[1, 2]",
        "device": "cpu",
    }


def test_nothing_begins_before_there_is_something_and_the_configuration_goes_with_it() -> (
    None
):
    writer = Tool()
    with EventStorage(4) as storage:
        writer.add_config({"train": {"seed": 1, "lr": 0.1}})
        writer.add_config({"train": {"lr": 0.2}})
        writer.rewind(4)
        writer.write()
        writer.close()
        assert writer.log == []
        storage.put_scalar("loss", 1.0)
        writer.write()
        storage.iter = 5
        storage.put_image("photo", torch.zeros(1, 2, 2))
        writer.write()
        writer.close()
        writer.close()
    config = {"train.seed": 1, "train.lr": 0.2}
    assert writer.log == [
        ([("loss", 1.0, 4)], [], config),
        ([], ["photo"], {}),
        ("run", False),
    ]


def test_a_run_that_is_closed_while_an_error_goes_through_has_failed() -> None:
    writer = Tool()
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        writer.write()
    try:
        raise ValueError
    except ValueError:
        writer.close()
    assert writer.log[-1] == ("run", True)


def test_a_resumed_run_writes_what_came_after_the_last_write_before_its_checkpoint() -> (
    None
):
    with EventStorage() as storage:
        for storage.iter in (0, 2, 4):
            storage.put_scalar("accuracy", storage.iter, smoothing_hint=False)
            if storage.iter == 2:
                Tool().write()
    loaded = EventStorage()
    loaded.load_state_dict(storage.state_dict())
    writer = Tool()
    with loaded:
        writer.rewind(6)
        writer.write()
    assert writer.log[0][0] == [("accuracy", 4.0, 4)]


def test_only_the_main_process_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    writer = Tool()
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        storage.put_image("photo", torch.zeros(1, 2, 2))
        writer.write()
        assert storage.images() == []
        assert storage.written == {}
    assert writer.log == []


@pytest.mark.parametrize(
    ("make", "extra"),
    [
        (lambda: TensorboardXWriter("output"), "tensorboard"),
        (WandbWriter, "wandb"),
        (MLflowWriter, "mlflow"),
    ],
)
def test_without_the_package_the_error_names_the_extra(
    make: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install 'hooktrain\[{extra}\]'"):
        make()
