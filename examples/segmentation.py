"""Semantic segmentation: a small U-Net finds discs and squares; the model of best mIoU is kept."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hooktrain import Checkpointer, MetricEvaluator, SimpleTrainer, build_strategy
from hooktrain import CosineParamScheduler, default_hooks, inference_on_dataset, launch
from hooktrain import build_test_loader, build_train_loader


def shapes(count, seed):
    """Noisy images with a disc and a square, and the class of each pixel: 0, 1 or 2."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(6, 26, (4, count, 1, 1), generator=generator)
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    square = ((y - place[0]).abs() < 5) & ((x - place[1]).abs() < 5)
    disc = (y - place[2]) ** 2 + (x - place[3]) ** 2 < 30
    masks = torch.where(disc, 1, torch.where(square, 2, 0))
    images = (masks > 0) + 0.3 * torch.randn(masks.shape, generator=generator)
    return TensorDataset(images[:, None], masks)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        down, up = nn.Conv2d(16, 32, 3, 2, padding=1), nn.Upsample(scale_factor=2)
        wide = nn.Conv2d(32, 32, 5, padding=2)
        self.deep = nn.Sequential(down, nn.ReLU(), wide, nn.ReLU(), up)
        self.head = nn.Conv2d(48, 3, 3, padding=1)

    def forward(self, batch):
        images, masks = batch
        fine = self.fine(images)
        logits = self.head(torch.cat([fine, self.deep(fine)], 1))
        return nn.functional.cross_entropy(logits, masks) if self.training else logits


def miou(logits, masks):
    """The mean IoU over the classes, each over all pixels of all images."""
    pairs = 3 * masks.flatten() + logits.argmax(1).flatten()
    table = torch.bincount(pairs, minlength=9).view(3, 3).double()
    both = table.diagonal()
    return (both / (table.sum(0) + table.sum(1) - both)).mean()


def main():
    model = build_strategy(seed=0).prepare(UNet)
    loader = build_train_loader(shapes(512, seed=0), total_batch_size=16)
    test_loader = build_test_loader(shapes(128, seed=1), batch_size=32)
    metric = MetricEvaluator(miou, whole=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = SimpleTrainer(model, loader, optimizer)
    saver = Checkpointer(model, "output/segmentation", trainer=trainer)
    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period="1 epoch",
        scheduler=CosineParamScheduler(1.0, 0.0),
        eval_function=lambda: inference_on_dataset(model, test_loader, metric),
        eval_period="1 epoch",
        best_metric="miou",
        best_mode="max",
    )
    trainer.register_hooks(usual)
    saver.resume_or_load()
    trainer.train(max_epochs=6)


if __name__ == "__main__":
    launch(main)
