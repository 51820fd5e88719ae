"""The documentation of Python, character by character."""

from hooktrain.config import LazyCall as L
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.demos import BitsPerCharacterEvaluator, PythonDocs

dataloader = dict(
    train=L(build_train_loader)(
        dataset=L(PythonDocs)(part="train", block_size=128),
        total_batch_size=8,
        num_workers=0,
        seed="${train.seed}",
    ),
    test=L(build_test_loader)(
        dataset=L(PythonDocs)(
            part="heldout", block_size="${dataloader.train.dataset.block_size}"
        ),
        batch_size=32,
    ),
    evaluator=L(BitsPerCharacterEvaluator)(),
)
