"""Real runs of MLflow in a local folder, read back by its client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hooktrain.utils.events import EventStorage, MLflowWriter

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # it is looked at here
    import mlflow


@pytest.fixture(autouse=True)
def client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mlflow.MlflowClient]:
    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # a database takes seconds to make
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    yield mlflow.MlflowClient()
    mlflow.end_run()


def points(client: mlflow.MlflowClient, run: str, name: str) -> list[tuple[int, float]]:
    return [
        (metric.step, metric.value) for metric in client.get_metric_history(run, name)
    ]


def test_metrics_images_and_the_configuration_arrive_and_a_resumed_training_goes_on_in_its_run(
    client: mlflow.MlflowClient,
) -> None:
    writer = MLflowWriter(window_size=3, run_name="mine")
    writer.add_config(
        {"optimizer": {"lr": 0.1}, "train": {str(i): i for i in range(120)}}
    )
    with EventStorage() as storage:
        writer.rewind(0)
        for storage.iter, value in enumerate((9.0, 1.0, 2.0)):
            storage.put_scalar("loss", value)
        storage.put_scalar("acc@1", 5.0, cur_iter=1)
        storage.put_image("stage[0]/photo", torch.zeros(1, 4, 6))
        writer.write()
        storage.put_scalar("acc@1", float("nan"), cur_iter=0)
        writer.write()
        try:
            raise RuntimeError
        except RuntimeError:
            writer.close()
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("mine", "FAILED")
    assert run.data.params["optimizer.lr"] == "0.1"
    assert len(run.data.params) == 121
    assert points(client, run.info.run_id, "loss") == [(2, 2.0)]
    assert str(points(client, run.info.run_id, "acc_1")) == "[(1, 5.0), (0, nan)]"
    images = [file.path for file in client.list_artifacts(run.info.run_id, "images")]
    (image,) = [path for path in images if path.endswith(".png")]
    assert image.startswith("images/stage_0_")

    loaded = EventStorage()
    loaded.load_state_dict(storage.state_dict())
    writer = MLflowWriter()
    writer.add_config({"optimizer": {"lr": 0.2}, "new": 1})
    with loaded:
        writer.rewind(3)
        loaded.iter = 3
        loaded.put_scalar("loss", 3.0)
        writer.write()
    writer.close()
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert points(client, run.info.run_id, "loss")[1][0] == 3
    assert (run.data.params["optimizer.lr"], run.data.params["new"]) == ("0.1", "1")


def test_the_run_of_a_script_takes_the_metrics_and_stays_open(
    client: mlflow.MlflowClient,
) -> None:
    writer = MLflowWriter()
    with mlflow.start_run() as own, EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        writer.write()
        writer.close()
        mlflow.log_metric("test", 2.0)
    (run,) = client.search_runs(["0"])
    assert run.info.run_id == own.info.run_id
    assert run.data.metrics == {"loss": 1.0, "test": 2.0}
