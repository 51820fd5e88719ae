"""How state becomes a durable, verified file, and comes back."""

from hooktrain.checkpoint.checkpointer import Checkpointer as Checkpointer
from hooktrain.checkpoint.files import (
    CorruptCheckpointError as CorruptCheckpointError,
    load_file as load_file,
    save_file as save_file,
    verify_file as verify_file,
)
from hooktrain.checkpoint.loading import (
    IncompatibleKeys as IncompatibleKeys,
    load_checkpoint as load_checkpoint,
    load_model_state as load_model_state,
    revise_names as revise_names,
)
from hooktrain.checkpoint.sources import (
    local_path as local_path,
    register_scheme as register_scheme,
)
