"""Faster R-CNN with ResNet-50 and a feature pyramid learns COCO, or data in its format, on GPUs.

It needs torchvision and pip install 'hooktrain[detection]'. One override says where the data is,
dataloader.root=/data/coco; that folder has train2017/, val2017/ and annotations/. Labels are the
ids of categories, 0 is the background, and model.num_classes is above all of them.

Where the numbers come from: pytorch/vision, references/detection. README.md has the command: 26
epochs, a tenth of the rate from epochs 16 and 22 on, three groups of aspect ratios an octave.
train.py has the rest: 8 GPUs with 2 images each, rate 0.02, momentum 0.9, weight decay 1e-4;
engine.py the linear warm-up from a thousandth of the rate, over 1,000 iterations; presets.py the
mirroring of half of the images, and nothing else. Images without a box are left out. For the
weights of this recipe (FasterRCNN_ResNet50_FPN_Weights.COCO_V1) torchvision reports a box AP of
37.0. It differs in two things: norms do not decay, but the frozen ones of this model have no
parameters; and the images of all GPUs are of one group of aspect ratios, there those of each GPU.
This configuration has not been trained, so it has no result of its own.

Another detector has other numbers. RetinaNet, with a box AP of 36.4, takes half the rate:
model._target_=torchvision.models.detection.retinanet_resnet50_fpn optimizer.lr=0.01. More epochs
and images of several sizes give more: detectron2's MODEL_ZOO.md has a box AP of 37.9 after 12
epochs (faster_rcnn_R_50_FPN_1x) and of 40.2 after 37 (3x).

Which norm: a GPU has two images, too few for batch norm. torchvision therefore freezes the norms of
a pre-trained backbone (FrozenBatchNorm2d), and they keep the statistics of ImageNet. With
model.weights_backbone=null it takes BatchNorm2d; then a backbone with GroupNorm, which needs no
other images, is better (He et al., arXiv:1811.08883). Where batch norm stays, and its momentum is
small, the AP of a short run may be 0 although the losses fall. The hook PreciseBN cures that; see
docs/guide/configuration.md, "Batch norm after a short run".

PyPI's torchvision is built for the torch of PyPI. Beside a torch from another index, such as +cpu,
its operators are missing; take both from the same index.
"""

from operator import mul

import pycocotools  # If it is missing, the run ends before the training.
import torch
from torchvision.models import detection

from hooktrain.config import LazyCall as L
from hooktrain.data import build_test_loader
from hooktrain.demos import (
    CocoDataset,
    CocoEvaluator,
    build_coco_train_loader,
    collate_detection,
)
from hooktrain.solver import MultiStepParamScheduler, WarmupParamScheduler

from .common.optim import SGD as optimizer
from .common.train import train

EPOCHS, STEPS = 26, [16, 22]
TOTAL_BATCH = 16  # of all GPUs together
BASE_LR = 0.02  # the rate grows with the batch
ITERATIONS = EPOCHS * 117_266 // TOTAL_BATCH  # COCO has so many images with a box
WARMUP = 1000
GPU = torch.accelerator.is_available()

model = L(detection.fasterrcnn_resnet50_fpn)(
    weights=None, weights_backbone="IMAGENET1K_V1", num_classes=91
)

_val_annotations = "${dataloader.root}/annotations/instances_val2017.json"
dataloader = dict(
    root="./datasets/coco",
    train=L(build_coco_train_loader)(
        root="${dataloader.root}/train2017",
        annotations="${dataloader.root}/annotations/instances_train2017.json",
        total_batch_size=TOTAL_BATCH,
        num_workers=4,
        pin_memory=GPU,
        collate_fn=collate_detection,
        seed="${train.seed}",
    ),
    test=L(build_test_loader)(
        dataset=L(CocoDataset)(
            root="${dataloader.root}/val2017", annotations=_val_annotations, train=False
        ),
        batch_size=1,
        num_workers=4,
        collate_fn=collate_detection,
    ),
    evaluator=L(CocoEvaluator)(annotations=_val_annotations),
)

# The learning rate scales with the batch size.
optimizer.lr = L(mul)(BASE_LR / TOTAL_BATCH, "${dataloader.train.total_batch_size}")
optimizer.nesterov = False
optimizer.weight_decay = 1e-4

lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(
        values=[1, 0.1, 0.01], num_updates=EPOCHS, milestones=STEPS
    ),
    warmup_factor=0.001,
    warmup_length=WARMUP / ITERATIONS,
)

train.output_dir = "./output/coco_fasterrcnn"
train.max_epochs = EPOCHS
train.checkpointer.period = "1 epoch"
train.eval_period = "1 epoch"
train.best_metric = "bbox/AP"
train.best_mode = "max"
