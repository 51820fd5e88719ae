"""Two tasks whose losses are weighted by learned uncertainties (arXiv:1705.07115)."""

import torch
from torch import nn
from torch.nn import functional as F

from hooktrain import Checkpointer, DatasetEvaluator, SimpleTrainer, build_strategy
from hooktrain import CosineParamScheduler, build_test_loader, build_train_loader
from hooktrain import comm, default_hooks, inference_on_dataset, launch
from hooktrain.demos import DigitsDataset


class TwoTasks(nn.Module):
    """Predicts the digit, and how much ink it has."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        self.digit, self.ink = nn.Linear(128, 10), nn.Linear(128, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, batch):
        images = batch["image"]
        features = self.body(images)
        logits, ink = self.digit(features), self.ink(features).squeeze(1)
        if not self.training:
            return logits, ink
        losses = (
            F.cross_entropy(logits, batch["label"]),
            F.mse_loss(ink, ink_of(images)),
        )
        weighed = torch.stack(losses) * (-self.log_variances).exp() + self.log_variances
        return {"loss_digit": weighed[0], "loss_ink": weighed[1]}


def ink_of(images):
    return images.sum((1, 2, 3)) / 10


class BothTasks(DatasetEvaluator):
    def reset(self):
        self.sums = torch.zeros(3, dtype=torch.float64)

    def process(self, inputs, outputs):
        logits, ink = outputs
        right = (logits.argmax(1) == inputs["label"]).sum()
        error = (ink - ink_of(inputs["image"])).abs().sum()
        self.sums += torch.stack([right, error, torch.tensor(len(ink))]).cpu()

    def evaluate(self):
        right, error, count = sum(comm.all_gather(self.sums)).tolist()
        return {"accuracy": right / count, "ink_error": error / count}


def main():
    model = build_strategy(seed=0).prepare(TwoTasks)
    loader = build_train_loader(DigitsDataset(train=True), total_batch_size=64)
    test_loader = build_test_loader(DigitsDataset(train=False), batch_size=120)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = SimpleTrainer(model, loader, optimizer)
    saver = Checkpointer(model, "output/two_tasks", trainer=trainer)
    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period="5 epochs",
        scheduler=CosineParamScheduler(1.0, 0.0),
        eval_function=lambda: inference_on_dataset(model, test_loader, BothTasks()),
        eval_period="5 epochs",
    )
    trainer.register_hooks(usual)
    saver.resume_or_load()
    trainer.train(max_epochs=15)


if __name__ == "__main__":
    launch(main)
