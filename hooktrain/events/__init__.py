"""Metrics: where they are put, kept, and written to."""

from hooktrain.events.csv_writer import CSVWriter as CSVWriter
from hooktrain.events.image_writer import ImageWriter as ImageWriter
from hooktrain.events.json_writer import (
    JSONWriter as JSONWriter,
    load_json_metrics as load_json_metrics,
)
from hooktrain.events.mlflow_writer import MLflowWriter as MLflowWriter
from hooktrain.events.printer import CommonMetricPrinter as CommonMetricPrinter
from hooktrain.events.storage import (
    EventStorage as EventStorage,
    HistoryBuffer as HistoryBuffer,
    get_event_storage as get_event_storage,
    has_event_storage as has_event_storage,
)
from hooktrain.events.tensorboard_writer import TensorboardXWriter as TensorboardXWriter
from hooktrain.events.wandb_writer import WandbWriter as WandbWriter
from hooktrain.events.writer import EventWriter as EventWriter
