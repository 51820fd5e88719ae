"""How state becomes a durable, verified file, and comes back."""

from hooktrain.checkpoint.checkpointer import Checkpointer
from hooktrain.checkpoint.periodic import PeriodicCheckpointer
from hooktrain.checkpoint.retention import files_to_delete
from hooktrain.checkpoint.storage import (
    CorruptCheckpointError,
    load_file,
    save_file,
    verify_file,
)
from hooktrain.checkpoint.surgery import IncompatibleKeys, load_model_state

__all__ = [
    "Checkpointer",
    "CorruptCheckpointError",
    "IncompatibleKeys",
    "PeriodicCheckpointer",
    "files_to_delete",
    "load_file",
    "load_model_state",
    "save_file",
    "verify_file",
]
