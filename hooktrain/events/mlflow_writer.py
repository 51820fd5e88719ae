"""Metrics, images and the configuration for MLflow."""

import re
import time
from typing import Any

from hooktrain.events.storage import EventStorage, to_pixels
from hooktrain.events.tensorboard_writer import TrackingWriter


class MLflowWriter(TrackingWriter):
    """Writes metrics and images to a run of MLflow, as :class:`TrackingWriter` says.

    It is the active run, if a script has started one. Otherwise it is a new one, or, in a training
    that resumes, that whose id is in the checkpoint. Where runs are kept, and in which experiment,
    MLflow knows from ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME``. It has no histograms,
    and does not change parameters that a run has. What it does not allow in names becomes ``_``.

    Args:
        window_size: the number of iterations to smooth over, at least 1.
        **kwargs: of ``mlflow.start_run``, such as ``run_name`` and ``tags``.

    Raises:
        ImportError: if the package ``mlflow`` is not installed.
    """

    package = "mlflow"

    def send(
        self, storage: EventStorage, scalars: list[tuple[str, float, int]]
    ) -> None:
        """Log to the run."""
        import mlflow
        from mlflow.entities import Metric, Param

        if self.run is None:
            self._not_ours = mlflow.active_run()
            same = {"run_id": storage.written.get("mlflow_run")}
            self.run = self._not_ours or mlflow.start_run(**{**same, **self.arguments})
            storage.written["mlflow_run"] = self.run.info.run_id
        client, run = mlflow.MlflowClient(), self.run.info.run_id
        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), value, now, i) for name, value, i in scalars]
        known = (
            client.get_run(run).data.params if self.config else {}
        )  # they cannot be changed
        params = {_allowed(key): str(value) for key, value in self.config.items()}
        client.log_batch(
            run, metrics, [Param(k, v) for k, v in params.items() if k not in known]
        )
        for name, image, iteration in storage.images():
            client.log_image(run, to_pixels(image), key=_allowed(name), step=iteration)

    def end(self, run: Any, failed: bool) -> None:
        """End the run, unless it is somebody else's."""
        import mlflow

        if run is not self._not_ours:
            mlflow.end_run("FAILED" if failed else "FINISHED")


def _allowed(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)
