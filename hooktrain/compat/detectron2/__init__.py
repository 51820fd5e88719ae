"""The names that training scripts import from detectron2, fvcore.common and iopath.

``tools/from_detectron2.sed`` turns ``from detectron2.engine.defaults import DefaultTrainer`` into
``from hooktrain.compat.detectron2 import DefaultTrainer``. Names that belong to detection are
imported from detectron2 itself, if it is installed.
"""

import sys
from typing import Any

from torch._C import _log_api_usage_once as _log_api_usage  # noqa: F401
from torch.nn.modules.utils import (
    consume_prefix_in_state_dict_if_present as _strip_prefix_if_present,  # noqa: F401
)

from hooktrain.checkpoint import *
from hooktrain.checkpoint.loading import IncompatibleKeys as _IncompatibleKeys  # noqa: F401
from hooktrain.compat.registry import Registry as Registry
from hooktrain.config import *
from hooktrain.data import *
from hooktrain.engine import *
from hooktrain.engine.hooks import *
from hooktrain.evaluation import *
from hooktrain.events import *
from hooktrain.model import (
    get_bn_modules as get_bn_modules,
    update_bn_stats as update_bn_stats,
)
from hooktrain.solver import *
from hooktrain.utils.collect_env import collect_env_info as collect_env_info
from hooktrain.utils.comm import *
from hooktrain.utils.logger import *
from hooktrain.utils.names import locate as locate

# isort: split
# Last, since these replace objects of the same names above.
from hooktrain.compat.detectron2 import model_zoo as model_zoo
from hooktrain.compat.detectron2.checkpoint import (
    Checkpointer as Checkpointer,
    DetectionCheckpointer as DetectionCheckpointer,
    PeriodicCheckpointer as PeriodicCheckpointer,
)
from hooktrain.compat.detectron2.collectives import (
    gather as gather,
    reduce_dict as reduce_dict,
)
from hooktrain.compat.detectron2.config import (
    MISSING as MISSING,
    DictConfig as DictConfig,
    LazyCall as LazyCall,
    LazyConfig as LazyConfig,
    ListConfig as ListConfig,
    OmegaConf as OmegaConf,
    open_dict as open_dict,
)
from hooktrain.compat.detectron2.data import (
    DatasetFromList as DatasetFromList,
    MapDataset as MapDataset,
    ToIterableDataset as ToIterableDataset,
    trivial_batch_collator as trivial_batch_collator,
    worker_init_reset_seed as worker_init_reset_seed,
)
from hooktrain.compat.detectron2.default_trainer import (  # type: ignore[assignment]
    BestCheckpointer as BestCheckpointer,
    DefaultTrainer as DefaultTrainer,
    EvalHook as EvalHook,
    LRScheduler as LRScheduler,
)
from hooktrain.compat.detectron2.functions import (  # type: ignore[assignment]
    default_setup as default_setup,
    import_from_detectron2,
    seed_all_rng as seed_all_rng,
    verify_results as verify_results,
)
from hooktrain.compat.detectron2.model_zoo import get_config as get_config
from hooktrain.compat.detectron2.paths import (
    HTTPURLHandler as HTTPURLHandler,
    NativePathHandler as NativePathHandler,
    OneDrivePathHandler as OneDrivePathHandler,
    PathHandler as PathHandler,
    PathManager as PathManager,
    g_pathmgr as g_pathmgr,
)
from hooktrain.compat.detectron2.profiling import AutogradProfiler as AutogradProfiler
from hooktrain.compat.detectron2.solver import (
    StepParamScheduler as StepParamScheduler,
    StepWithFixedGammaParamScheduler as StepWithFixedGammaParamScheduler,
    build_lr_scheduler as build_lr_scheduler,
    build_optimizer as build_optimizer,
    maybe_add_gradient_clipping as maybe_add_gradient_clipping,
)
from hooktrain.compat.detectron2.trainers import (
    AMPTrainer as AMPTrainer,
    SimpleTrainer as SimpleTrainer,
    TrainerBase as TrainerBase,
)
from hooktrain.compat.detectron2.utils import (  # type: ignore[assignment]
    CommonMetricPrinter as CommonMetricPrinter,
    TensorboardXWriter as TensorboardXWriter,
    create_small_table as create_small_table,
    log_every_n_seconds as log_every_n_seconds,
    log_first_n as log_first_n,
    setup_logger as setup_logger,
)

# detectron2's modules are all names for this module, which has their contents, for imports such as
# `from detectron2.utils import events, logger`.
_here: Any = sys.modules[__name__]
build = collect_env = comm = defaults = env = events = file_io = hooks = logger = _here
memory = registry = samplers = train_loop = _here


def __getattr__(name: str) -> Any:
    """Import a missing name from its own package; see :mod:`hooktrain.compat.peers`."""
    return import_from_detectron2(name)
