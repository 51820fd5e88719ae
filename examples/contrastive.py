"""Contrastive learning with a momentum encoder and a queue (MoCo, arXiv:1911.05722)."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from hooktrain import Checkpointer, MetricEvaluator, SimpleTrainer, build_strategy
from hooktrain import build_test_loader, build_train_loader, default_hooks
from hooktrain import comm, inference_on_dataset, launch
from hooktrain.demos import DigitsDataset, RandomShift

shift = RandomShift(max_shift=1)


def two_views(sample):
    views = [shift(sample)["image"] + 0.1 * torch.randn(1, 8, 8) for _ in range(2)]
    return {"views": torch.stack(views), "label": sample["label"]}


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        maps = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.encoder = nn.Sequential(maps, nn.Flatten(), nn.Linear(512, 64))
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(256, 64)))

    def forward(self, batch):
        if not self.training:
            return F.normalize(self.encoder(batch["image"]))
        first, second = batch["views"].unbind(1)
        with torch.no_grad():
            for name, slow in self.teacher.named_parameters():
                slow.lerp_(self.encoder.get_parameter(name), 0.02)
            key = F.normalize(self.teacher(second))
        query = F.normalize(self.encoder(first))
        same = (query * key).sum(1, keepdim=True)
        logits = torch.cat([same, query @ self.queue.T], 1) / 0.1
        keys = torch.cat(comm.all_gather(key))  # so that all ranks have the same queue
        self.queue = torch.cat([keys, self.queue])[:256]
        return F.cross_entropy(logits, torch.zeros_like(batch["label"]))


def same_as_neighbour(features, labels):
    """How often the nearest other image has the same label."""
    nearest = (features @ features.T).fill_diagonal_(-1).argmax(1)
    return (labels[nearest] == labels).double().mean()


def main():
    model = build_strategy(seed=0).prepare(Contrast)
    train, test = DigitsDataset(train=True), DigitsDataset(train=False)
    loader = build_train_loader(train, mapper=two_views, total_batch_size=128)
    test_loader = build_test_loader(test, batch_size=120)
    metric = MetricEvaluator(same_as_neighbour, whole=True)
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3
    )
    trainer = SimpleTrainer(model, loader, optimizer)
    saver = Checkpointer(model, "output/contrastive", trainer=trainer)
    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period="5 epochs",
        eval_function=lambda: inference_on_dataset(model, test_loader, metric),
        eval_period="5 epochs",
    )
    trainer.register_hooks(usual)
    saver.resume_or_load()
    trainer.train(max_epochs=20)


if __name__ == "__main__":
    launch(main)
