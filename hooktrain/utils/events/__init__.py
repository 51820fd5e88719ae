"""Metrics: where they are put, kept, and written to."""

from hooktrain.utils.events.csv_writer import CSVWriter as CSVWriter
from hooktrain.utils.events.history import HistoryBuffer as HistoryBuffer
from hooktrain.utils.events.image_writer import ImageWriter as ImageWriter
from hooktrain.utils.events.json_writer import (
    JSONWriter as JSONWriter,
    load_json_metrics as load_json_metrics,
)
from hooktrain.utils.events.mlflow_writer import MLflowWriter as MLflowWriter
from hooktrain.utils.events.printer import CommonMetricPrinter as CommonMetricPrinter
from hooktrain.utils.events.storage import (
    EventStorage as EventStorage,
    get_event_storage as get_event_storage,
    has_event_storage as has_event_storage,
)
from hooktrain.utils.events.tensorboard_writer import TensorboardXWriter as TensorboardXWriter
from hooktrain.utils.events.wandb_writer import WandbWriter as WandbWriter
from hooktrain.utils.events.writer import EventWriter as EventWriter
