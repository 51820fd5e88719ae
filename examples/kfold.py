"""Cross-validation: five folds, each a separate run that stops early and keeps its best model."""

import torch
from torch.utils.data import Subset

from hooktrain import Checkpointer, MetricEvaluator, SimpleTrainer, build_strategy
from hooktrain import build_test_loader, build_train_loader, default_hooks, hooks
from hooktrain import comm, inference_on_dataset, launch
from hooktrain.demos import DigitsCNN, DigitsDataset

FOLDS = 5


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).double().mean()


def train_fold(fold):
    """Train on four fifths, and return the accuracy of the best model on the last fifth."""
    folder = f"output/kfold/{fold}"
    data = DigitsDataset(train=True)
    held_out = [i for i in range(len(data)) if i % FOLDS == fold]
    rest = [i for i in range(len(data)) if i % FOLDS != fold]
    model = build_strategy(seed=fold).prepare(lambda: DigitsCNN(channels=8))
    loader = build_train_loader(Subset(data, rest), total_batch_size=64)
    test_loader = build_test_loader(Subset(data, held_out), batch_size=96)
    metric = MetricEvaluator(accuracy, target_key="label")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = SimpleTrainer(model, loader, optimizer)
    saver = Checkpointer(model, folder, trainer=trainer)
    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period="1 epoch",
        eval_function=lambda: inference_on_dataset(model, test_loader, metric),
        eval_period="1 epoch",
        best_metric="accuracy",
        best_mode="max",
    )
    stop = hooks.EarlyStopping("accuracy", "max", patience=2)
    trainer.register_hooks([*usual, stop])
    saver.resume_or_load()  # a finished fold only returns its result
    trainer.train(max_epochs=10)
    saver.load(f"{folder}/model_best.pth", [])  # only the weights
    return inference_on_dataset(model, test_loader, metric)["accuracy"]


def main():
    results = torch.tensor([train_fold(fold) for fold in range(FOLDS)])
    if comm.is_main_process():
        print(
            f"accuracy {results.mean():.4f} +- {results.std():.4f}: {results.tolist()}"
        )


if __name__ == "__main__":
    launch(main)
