"""Everything for Weights & Biases."""

from collections import defaultdict
from typing import Any

import numpy as np

from hooktrain.events.storage import EventStorage, to_pixels
from hooktrain.events.tensorboard_writer import TrackingWriter


class WandbWriter(TrackingWriter):
    """Writes all that is in the storage to a run of W&B, as :class:`TrackingWriter` says.

    The x-axis of all charts is ``iteration``. A training that resumes continues its run, whose id
    is in the checkpoint.

    Args:
        window_size: the number of iterations to smooth over, at least 1.
        **kwargs: of ``wandb.init``, such as ``project``, ``dir`` and ``mode="offline"``.

    Raises:
        ImportError: if the package ``wandb`` is not installed.
    """

    package = "wandb"

    def send(
        self, storage: EventStorage, scalars: list[tuple[str, float, int]]
    ) -> None:
        """Log to the run."""
        import wandb

        if self.run is None:
            same = {"id": storage.written.get("wandb_run"), "resume": "allow"}
            self.run = wandb.init(**{**same, **self.arguments})
            self.run.define_metric("iteration")
            self.run.define_metric("*", step_metric="iteration")
            storage.written["wandb_run"] = self.run.id
        self.run.config.update(self.config, allow_val_change=True)
        rows: dict[int, dict[str, Any]] = defaultdict(dict)
        for name, value, iteration in scalars:
            rows[iteration][name] = value
        for name, image, iteration in storage.images():
            rows[iteration][name] = wandb.Image(to_pixels(image))
        for histogram in storage.histograms():
            bars = wandb.Histogram(np_histogram=_few_bins(histogram))
            rows[histogram["global_step"]][histogram["tag"]] = bars
        for iteration, row in sorted(rows.items()):
            self.run.log({**row, "iteration": iteration})

    def end(self, run: Any, failed: bool) -> None:
        """Finish the run."""
        run.finish(exit_code=int(failed))


def _few_bins(histogram: dict[str, Any]) -> tuple[Any, Any]:
    """The counts and edges of at most 500 bins; W&B takes 512."""
    limits, extremes = histogram["bucket_limits"], (histogram["min"], histogram["max"])
    middles = np.add([histogram["min"], *limits[:-1]], limits) / 2
    counts = histogram["bucket_counts"]
    return np.histogram(middles, min(len(counts), 500), extremes, weights=counts)
