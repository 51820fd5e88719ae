"""Real runs of Weights & Biases without a network, read back from their files."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from hooktrain.utils.events import EventStorage, WandbWriter


def records(path: Path) -> Iterator[Record]:
    """The records of a file: 7 bytes, then LevelDB's log format (checksum, length, kind, data)."""
    data, place, parts, block = path.read_bytes(), 7, b"", 1 << 15
    while place + 7 <= len(data):
        if block - place % block < 7:  # no header fits in
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield Record.FromString(parts)
            parts = b""


def values(items: Any) -> dict[str, Any]:
    found = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
    return {name: value for name, value in found.items() if not name.startswith("_")}


def read(folder: Path) -> dict[str, Any]:
    """The one run in a folder, when the process that writes it has ended."""
    wandb.teardown()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert "wandb-core" not in {
        Path(f"/proc/{child}/comm").read_text() for child in children
    }
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, Any] = {"history": [], "config": {}, "metrics": {}}
    for record in records(path):
        if record.HasField("run"):
            found["id"] = record.run.run_id
        elif record.HasField("config"):
            found["config"] |= values(record.config.update)
        elif record.HasField("history"):
            found["history"].append(values(record.history.item))
        elif record.HasField("metric"):
            metric = record.metric
            found["metrics"][metric.name or metric.glob_name] = metric.step_metric
        elif record.HasField("exit"):
            found["exit"] = record.exit.exit_code
    return found


def test_metrics_images_histograms_and_the_configuration_arrive_and_a_resumed_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))

    def make(folder: str) -> WandbWriter:
        (tmp_path / folder).mkdir()
        return WandbWriter(
            window_size=3, mode="offline", dir=str(tmp_path / folder), project="p"
        )

    writer = make("first")
    writer.add_config({"optimizer": {"lr": 0.1}})
    with EventStorage() as storage:
        writer.rewind(0)
        for storage.iter, value in enumerate((9.0, 1.0, 2.0, float("nan"))):
            storage.put_scalar("train/loss", value)
        storage.put_scalar("late", 5.0, cur_iter=1)
        storage.put_image("photo", torch.zeros(3, 4, 6))
        storage.put_histogram("weight", torch.arange(1.0, 2001.0))
        storage.put_histogram("same", torch.ones(7), bins=3)
        writer.write()
        assert storage.images() == []
        storage.put_scalar("late", 6.0, cur_iter=0)
        writer.write()
        try:
            raise RuntimeError
        except RuntimeError:
            writer.close()
    first = read(tmp_path / "first")
    assert first["config"] == {"optimizer.lr": 0.1}
    assert first["metrics"]["*"] == "iteration"  # the x-axis of all
    assert first["exit"] == 1
    early, row, late = first["history"]
    assert early == {"iteration": 1, "late": 5.0}
    assert late == {"iteration": 0, "late": 6.0}
    assert (row["iteration"], str(row["train/loss"])) == (3, "nan")
    assert (row["photo.width"], row["photo.height"]) == (6, 4)
    assert (tmp_path / "first/wandb/latest-run/files" / row["photo.path"]).is_file()
    assert row["weight.values"] == [4] * 500
    assert (row["weight.bins"][0], row["weight.bins"][-1]) == (1.0, 2000.0)
    assert sum(row["same.values"]) == 7

    loaded = EventStorage()
    loaded.load_state_dict(storage.state_dict())
    writer = make("second")
    with loaded:
        writer.rewind(4)
        loaded.iter = 4
        loaded.put_scalar("train/loss", 3.0)
        writer.write()
    assert writer.run.settings.resume == "allow"  # else a server would begin it anew
    writer.close()
    second = read(tmp_path / "second")
    assert second["id"] == first["id"]
    assert second["exit"] == 0
    assert [set(row) for row in second["history"]] == [{"iteration", "train/loss"}]
