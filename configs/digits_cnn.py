"""A convolutional network learns handwritten digits, in well under a minute on two CPU cores."""

from .common.data.digits import dataloader
from .common.models.digits_cnn import model
from .common.optim import SGD as optimizer
from .common.schedule import warmup_cosine as lr_multiplier
from .common.train import train

optimizer.lr = 0.1
optimizer.weight_decay = 2e-3

train.output_dir = "./output/digits_cnn"
train.max_iter = 2000
train.checkpointer.period = 250
train.eval_period = 250
train.best_metric = "classification/accuracy"
train.best_mode = "max"
