"""A trainer that nobody holds any more is gone at once, with its model's memory."""

import gc
import weakref
from pathlib import Path

from hooktrain.config import LazyConfig
from hooktrain.engine import DefaultTrainer

CONFIG = Path(__file__).parents[2] / "configs" / "digits_cnn.py"


def test_a_default_trainer_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    config = LazyConfig.load(str(CONFIG))
    config.train.output_dir = str(tmp_path)
    trainer = DefaultTrainer(config)
    model = weakref.ref(trainer.model)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert model() is None
    finally:
        gc.enable()
