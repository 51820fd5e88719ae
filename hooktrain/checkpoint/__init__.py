"""How state becomes a durable, verified file, and comes back."""

from hooktrain.checkpoint.checkpointer import Checkpointer
from hooktrain.checkpoint.files import (
    CorruptCheckpointError,
    load_file,
    save_file,
    verify_file,
)
from hooktrain.checkpoint.periodic import PeriodicCheckpointer
from hooktrain.checkpoint.resume import files_to_delete
from hooktrain.checkpoint.sources import local_path, register_scheme
from hooktrain.checkpoint.surgery import (
    IncompatibleKeys,
    load_checkpoint,
    load_model_state,
    revise_names,
    take_prefix,
)

__all__ = [
    "Checkpointer",
    "CorruptCheckpointError",
    "IncompatibleKeys",
    "PeriodicCheckpointer",
    "files_to_delete",
    "load_checkpoint",
    "load_file",
    "load_model_state",
    "local_path",
    "register_scheme",
    "revise_names",
    "save_file",
    "take_prefix",
    "verify_file",
]
