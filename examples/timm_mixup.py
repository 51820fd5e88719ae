"""A timm ConvNeXt with mixup, soft targets and layer-wise decay of the learning rate.

pip install timm
"""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import param_groups_layer_decay

from hooktrain import Checkpointer, MetricEvaluator, SimpleTrainer, build_strategy
from hooktrain import CosineParamScheduler, WarmupParamScheduler, default_hooks
from hooktrain import build_test_loader, build_train_loader
from hooktrain import inference_on_dataset, launch
from hooktrain.demos import DigitsDataset, RandomShift
from hooktrain.model import unwrap_model


def small_convnext():
    return timm.create_model("test_convnext", in_chans=1, num_classes=10)


def as_pair(sample):
    image = sample["image"].repeat_interleave(4, -1).repeat_interleave(4, -2)
    return image - 0.5, sample["label"]


class MixupTrainer(SimpleTrainer):
    mixup = Mixup(mixup_alpha=0.2, num_classes=10)
    criterion = SoftTargetCrossEntropy()

    def compute_loss(self, data):
        # Its random numbers are seeded in each step, like all others.
        images, targets = self.mixup(*data)
        return self.criterion(self.model(images), targets)


def first_item(model, batch):
    return model(batch[0])


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).double().mean()


def main():
    model = build_strategy(seed=0).prepare(small_convnext)
    train = DigitsDataset(train=True, transform=RandomShift())
    options = {"mapper": as_pair, "drop_last": True}  # mixup needs an even batch size
    loader = build_train_loader(train, total_batch_size=64, **options)
    test = build_test_loader(DigitsDataset(train=False), mapper=as_pair, batch_size=120)
    # timm finds layers by the names of the bare model.
    bare = unwrap_model(model)
    groups = param_groups_layer_decay(bare, weight_decay=0.05, layer_decay=0.8)
    for group in groups:
        group["lr"] = 5e-3 * group.pop("lr_scale")
    trainer = MixupTrainer(model, loader, torch.optim.AdamW(groups))
    saver = Checkpointer(model, "output/timm_mixup", trainer=trainer)
    metric = MetricEvaluator(accuracy)

    def evaluate():
        return inference_on_dataset(model, test, metric, step=first_item)

    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period="5 epochs",
        scheduler=WarmupParamScheduler(CosineParamScheduler(1.0, 0.0), 0.01, 0.1),
        eval_function=evaluate,
        eval_period="5 epochs",
    )
    trainer.register_hooks(usual)
    saver.resume_or_load()
    trainer.train(max_epochs=15)


if __name__ == "__main__":
    launch(main)
