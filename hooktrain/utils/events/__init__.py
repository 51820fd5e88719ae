"""Metrics: where they are put, kept, and written to."""

from hooktrain.utils.events.history import HistoryBuffer
from hooktrain.utils.events.json_writer import JSONWriter, load_json_metrics
from hooktrain.utils.events.printer import CommonMetricPrinter
from hooktrain.utils.events.storage import EventStorage, get_event_storage, has_event_storage
from hooktrain.utils.events.tensorboard_writer import TensorboardXWriter
from hooktrain.utils.events.writer import EventWriter

__all__ = [
    "CommonMetricPrinter",
    "EventStorage",
    "EventWriter",
    "HistoryBuffer",
    "JSONWriter",
    "TensorboardXWriter",
    "get_event_storage",
    "has_event_storage",
    "load_json_metrics",
]
