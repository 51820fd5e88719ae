"""A small detector learns to find handwritten digits, in about two minutes on two CPU cores.

The scenes are drawn from the digits that come with the package. Pictures with the boxes that it
finds are in samples/ of the output folder, and in TensorBoard. It needs pycocotools:
pip install 'hooktrain[detection]'.
"""

import pycocotools  # If it is missing, the run ends before the training.

from hooktrain.config import LazyCall as L
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.demos import (
    CocoEvaluator,
    DetectionWriter,
    DigitDetector,
    DigitScenes,
    coco_annotations,
    collate_detection,
)

from .common.optim import AdamW as optimizer
from .common.schedule import warmup_cosine as lr_multiplier
from .common.train import train

model = L(DigitDetector)(channels=16)

dataloader = dict(
    train=L(build_train_loader)(
        dataset=L(DigitScenes)(train=True, length=20_000),
        total_batch_size=16,
        collate_fn=collate_detection,
        seed="${train.seed}",
    ),
    test=L(build_test_loader)(
        dataset=L(DigitScenes)(train=False, length=200),
        batch_size=50,
        collate_fn=collate_detection,
    ),
    evaluator=L(CocoEvaluator)(
        annotations=L(coco_annotations)(dataset="${dataloader.test.dataset}")
    ),
)

optimizer.lr = 3e-3

train.output_dir = "./output/digits_detection"
train.max_iter = 1500
train.checkpointer.period = 500
train.eval_period = 250
train.best_metric = "bbox/AP"
train.best_mode = "max"

hooks = [
    L(DetectionWriter)(
        period=500,
        dataset="${dataloader.test.dataset}",
        output_dir="${train.output_dir}",
    )
]
