"""tools/from_detectron2.sed, and the one module that it makes scripts import from."""

import importlib
from pathlib import Path

import pytest

from hooktrain.compat import detectron2
from hooktrain.events import get_event_storage
from recipes import PEERS, after_recipe, without
from toys import linear_trainer

HERE = "from hooktrain.compat.detectron2 import"
IMPORTS = {
    "from detectron2.engine import (": f"{HERE} (",
    "    from detectron2.engine.defaults import DefaultTrainer": f"    {HERE} DefaultTrainer",
    "from detectron2.engine.train_loop import HookBase": f"{HERE} HookBase",
    "from detectron2.utils import comm": f"{HERE} comm",
    "import detectron2.utils.comm as comm": "import hooktrain.compat.detectron2 as comm",
    "import detectron2.engine.hooks as h": "import hooktrain.compat.detectron2 as h",
    "rank = detectron2.utils.comm.get_rank()": "rank = hooktrain.compat.detectron2.get_rank()",
    "from detectron2.data.samplers.distributed_sampler import TrainingSampler": (
        f"{HERE} TrainingSampler"
    ),
    "from fvcore.nn.precise_bn import get_bn_modules": f"{HERE} get_bn_modules",
    "from detectron2.solver import LRScheduler": (
        "from hooktrain.compat.detectron2.solver import LRScheduler"
    ),
    "from omegaconf import OmegaConf": f"{HERE} OmegaConf",
    "from detectron2 import model_zoo as zoo": f"{HERE} model_zoo as zoo",
    "from detectron2.model_zoo import get_config": f"{HERE} get_config",
    "\tfrom detectron2.utils import comm, visualizer": f"\t{HERE} comm, visualizer",
    "from iopath.common.file_io import g_pathmgr": f"{HERE} g_pathmgr",
    'logging.getLogger("detectron2.trainer")': 'logging.getLogger("hooktrain.trainer")',
    **dict.fromkeys(
        [
            "from detectron2.modeling import build_model",
            "from detectron2.data.datasets import register_coco_instances",
            "from detectron2.utils.visualizer import Visualizer",
            "from fvcore.common.config import CfgNode",
        ]
    ),
}


def test_the_recipe_changes_the_imports_of_training() -> None:
    changed = after_recipe("detectron2", "\n".join(IMPORTS))
    assert changed.splitlines() == [
        after or before for before, after in IMPORTS.items()
    ]


# By the module of detectron2, fvcore or iopath that scripts import them from.
NAMES = """
detectron2.checkpoint: DetectionCheckpointer PeriodicCheckpointer
detectron2.config: LazyCall LazyConfig instantiate
detectron2: model_zoo
detectron2.model_zoo: get_config
omegaconf: OmegaConf DictConfig ListConfig MISSING open_dict
detectron2.data: DatasetFromList MapDataset ToIterableDataset
detectron2.data.build: trivial_batch_collator worker_init_reset_seed
detectron2.data.samplers: TrainingSampler InferenceSampler
detectron2.engine: HookBase TrainerBase SimpleTrainer AMPTrainer DefaultTrainer create_ddp_model
detectron2.engine: default_argument_parser default_setup default_writers hooks launch
detectron2.engine.hooks: EvalHook LRScheduler PeriodicWriter BestCheckpointer IterationTimer
detectron2.evaluation: DatasetEvaluator DatasetEvaluators inference_on_dataset print_csv_format
detectron2.solver: LRMultiplier WarmupParamScheduler get_default_optimizer_params
detectron2.solver: build_optimizer build_lr_scheduler maybe_add_gradient_clipping
detectron2.utils: comm env events logger
detectron2.utils.collect_env: collect_env_info
detectron2.utils.comm: all_gather gather get_rank get_world_size is_main_process reduce_dict
detectron2.utils.env: seed_all_rng
detectron2.utils.events: EventStorage EventWriter CommonMetricPrinter JSONWriter get_event_storage
detectron2.utils.logger: _log_api_usage
detectron2.utils.logger: setup_logger create_small_table log_every_n_seconds log_first_n
fvcore.common.checkpoint: Checkpointer _IncompatibleKeys _strip_prefix_if_present
iopath.common.file_io: PathManager PathHandler HTTPURLHandler NativePathHandler g_pathmgr
fvcore.common.history_buffer: HistoryBuffer
fvcore.common.param_scheduler: CosineParamScheduler MultiStepParamScheduler
fvcore.common.param_scheduler: StepParamScheduler StepWithFixedGammaParamScheduler
fvcore.common.registry: Registry
fvcore.nn.precise_bn: get_bn_modules update_bn_stats
"""


@pytest.mark.parametrize("line", NAMES.split("\n")[1:-1])
def test_what_scripts_import_is_in_the_flat_module(line: str) -> None:
    for name in line.split(": ")[1].split():
        assert hasattr(detectron2, name)


@pytest.mark.parametrize("module", ["detectron2", "detectron2.solver"])
def test_an_old_scheduler_says_where_it_is(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *PEERS)
    with pytest.raises(
        ImportError, match=r"no 'WarmupCosineLR'.*Install detectron2 too"
    ):
        importlib.import_module(f"hooktrain.compat.{module}").WarmupCosineLR  # noqa: B018


def test_a_whole_module_of_detectron2_has_the_names_that_are_here() -> None:
    assert detectron2.events.get_event_storage is get_event_storage
    assert detectron2.logger.log_first_n is detectron2.log_first_n


def test_the_most_is_best_for_its_best_checkpointer(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, 2.0])
    trainer = linear_trainer(detectron2.EvalHook(1, lambda: {"val_loss": next(values)}))
    saver = detectron2.Checkpointer(trainer.model, tmp_path)
    best = detectron2.hooks.BestCheckpointer(1, saver, "val_loss")
    trainer.register_hooks([best])
    trainer.train(0, 3)
    assert (best.best_metric, best.best_iter) == (3.0, 1)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("PathManagerFactory", "iopath"),
        ("Timer", "fvcore"),
        ("visualizer", "detectron2"),
    ],
)
def test_a_name_of_a_peer_that_is_not_installed_says_whose_it_is(
    name: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *PEERS)
    with pytest.raises(
        ImportError, match=f"no '{name}'.* belongs to {owner}, or is misspelt"
    ):
        getattr(detectron2, name)


def test_a_name_of_detection_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, *PEERS)
    with pytest.raises(
        ImportError, match=r"no 'MetadataCatalog'.*Install detectron2 too"
    ):
        from hooktrain.compat.detectron2 import MetadataCatalog  # noqa: F401
