"""Handwritten digits, shifted at random in training."""

from hooktrain.config import LazyCall as L
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.demos import (
    CLASS_NAMES,
    ClassificationEvaluator,
    DigitsDataset,
    RandomShift,
)

dataloader = dict(
    train=L(build_train_loader)(
        dataset=L(DigitsDataset)(train=True, transform=L(RandomShift)(max_shift=1)),
        total_batch_size=64,
        num_workers=0,
        seed="${train.seed}",
    ),
    test=L(build_test_loader)(dataset=L(DigitsDataset)(train=False), batch_size=180),
    evaluator=L(ClassificationEvaluator)(class_names=CLASS_NAMES),
)
