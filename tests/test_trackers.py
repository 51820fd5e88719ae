"""The guide's modules for experiment trackers, with the trackers themselves.

W&B writes files, MLflow and trackio a data base, so that none needs a network. They are in the
extra `trackers`, and without them these tests are skipped.
"""

import itertools
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hooktrain.events import load_json_metrics
from test_readme import GUIDE, programs

MODULES = dict(re.findall(r"```py\n# (my_\w+\.py)\n(.*?)```", GUIDE, re.DOTALL))
(SETTINGS,) = re.findall(r"```py\n(once = .*?)```", GUIDE, re.DOTALL)
(ONCE,) = [block for block in programs(GUIDE) if "class Once" in block]
TABLE = ("Wandb", "MLflow")  # the trackers of the guide's table of further functions
ROWS = re.findall(r"^\| .+ \| `(wandb.+?)`.* \| `(mlflow.+?)`.* \|$", GUIDE, re.M)

SCRIPT = """
import argparse, json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from hooktrain.config import ConfigDict, LazyCall as L
from hooktrain.engine import build_trainer, default_setup, hooks, train_settings
from hooktrain.events import FunctionWriter
from hooktrain.solver import get_default_optimizer_params
import {tracker}
from once import Once
from {module} import {name}

{settings}

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

def evaluate():
    return dict(top=dict(accuracy_top1=50.0), classes="cat, dog")

def stop(trainer):
    if trainer.iter == 22 and "kill" in sys.argv:
        os._exit(9)
    if trainer.iter == 22 and "end" in sys.argv:
        signal.raise_signal(signal.SIGTERM)

if __name__ == "__main__":
    cfg = ConfigDict(
        model=L(Net)(in_features=4, out_features=2),
        optimizer=L(torch.optim.SGD)(params=L(get_default_optimizer_params)(), lr=0.1),
        dataloader=dict(train=[torch.ones(2, 4)]),
        train=train_settings(),
        writers=writers,
    )
    cfg.train.update(max_iter=40, log_period=5, device="cpu")
    cfg.train.checkpointer.period = 15
    default_setup(cfg, argparse.Namespace(resume=True))
    trainer = build_trainer(cfg)
    trainer.checkpointer.resume_or_load("")
    further = [hooks.EvalHook(10, evaluate), hooks.CallbackHook(after_step=stop)]
    trainer.register_hooks(further, before=hooks.PeriodicWriter)
    trainer.train(max_iter=cfg.train.max_iter)
    folder = cfg.train.output_dir
    config = json.loads(Path(folder, "config.json").read_text())
    array = torch.zeros(4, 4, 3, dtype=torch.uint8).numpy()
    step = 40
    {rest}
"""


def train(folder: Path, name: str, column: int, stop: str, code: int) -> str:
    """Train, in two starts; the id of the run."""
    module = f"my_{name.lower()}"
    (folder / "once.py").write_text(ONCE.partition("\n\ntracked.")[0])
    (folder / f"{module}.py").write_text(MODULES[f"{module}.py"])
    rest = "\n    ".join(row[1 - column] for row in ROWS) if name in TABLE else ""
    names = {"module": module, "name": name, "tracker": name.lower()}
    settings = SETTINGS.split("# ")[column].replace("MLflow", name)
    script = SCRIPT.format(settings=settings, rest=rest, **names)
    (folder / "train.py").write_text(script)
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    local = {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "DO_NOT_TRACK": "true"}
    local.update(TRACKIO_DIR=str(folder / "trackio"), HF_HUB_OFFLINE="1")
    for argument, expected in ((stop, code), ("", 0)):
        done = subprocess.run(
            [sys.executable, "train.py", argument],
            cwd=folder,
            env={**os.environ, **quiet, **local},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == expected, done.stdout
        assert "NOT WRITTEN" not in done.stdout
    config = json.loads((folder / "output" / "config.json").read_text())
    run_id: str = config["train"]["run_id"]
    return run_id


def steps_in_json(folder: Path, metric: str) -> list[int]:
    rows = load_json_metrics(folder / "output" / "metrics.json")
    return [row["iteration"] for row in rows if metric in row]


def records(file: Path) -> Iterator[bytes]:
    """The records of a file of W&B, which is a log of LevelDB with seven bytes before it."""
    data = file.read_bytes()
    place = 7
    record = b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # no header fits into the rest of a block
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += 7
        record += data[place : place + length]
        place += length
        if kind in (1, 4):  # it is whole, or this was its last part
            yield record
            record = b""


def test_wandb_gets_each_step_once_of_a_run_that_was_stopped_and_resumed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    run_id = train(tmp_path, "Wandb", 1, "end", 143)
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2
    rows = []
    for data in itertools.chain(*map(records, files)):
        items = Record.FromString(data).history.item
        rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    for metric in ("total_loss", "top/accuracy_top1"):
        steps = [row["_step"] for row in rows if metric in row]
        assert steps == steps_in_json(tmp_path, metric)
    assert any("sample" in row for row in rows)
    assert (files[-1].parent / "files" / "model_final.pth").exists()


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_gets_each_step_once_of_a_run_that_was_killed_and_resumed(
    tmp_path: Path,
) -> None:
    mlflow = pytest.importorskip("mlflow")
    run_id = train(tmp_path, "MLflow", 0, "kill", 9)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs(["0"])
    assert run.info.run_name == run_id
    for metric in ("total_loss", "top/accuracy_top1"):
        history = client.get_metric_history(run.info.run_id, metric)
        assert [m.step for m in history] == steps_in_json(tmp_path, metric)
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "images", "model_final.pth"} <= artifacts


def test_trackio_gets_each_step_once_of_a_run_that_was_stopped_and_resumed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("trackio")
    run_id = train(tmp_path, "Trackio", 0, "end", 143)
    with sqlite3.connect(tmp_path / "trackio" / "digits.db") as base:
        rows = base.execute(
            "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", [run_id]
        ).fetchall()
    base.close()
    for metric in ("total_loss", "top/accuracy_top1"):
        steps = [step for step, metrics in rows if metric in json.loads(metrics)]
        assert steps == steps_in_json(tmp_path, metric)
