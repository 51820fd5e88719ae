"""Metrics: their storage, and the writers that write them to files and to the console."""

from hooktrain.events.history import HistoryBuffer as HistoryBuffer
from hooktrain.events.json_writer import (
    JSONWriter as JSONWriter,
    load_json_metrics as load_json_metrics,
)
from hooktrain.events.printer import CommonMetricPrinter as CommonMetricPrinter
from hooktrain.events.storage import (
    EventStorage as EventStorage,
    get_event_storage as get_event_storage,
    has_event_storage as has_event_storage,
)
from hooktrain.events.tensorboard_writer import TensorboardXWriter as TensorboardXWriter
from hooktrain.events.writer import (
    EventWriter as EventWriter,
    FunctionWriter as FunctionWriter,
)
