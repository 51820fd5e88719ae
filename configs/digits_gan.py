"""A generative adversarial network learns to draw digits, in half a minute on two CPU cores.

The images that it draws are in samples/ of the output folder, and in TensorBoard. A classifier of
the real digits judges them at the end.
"""

from hooktrain.config import LazyCall as L
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.demos import (
    CLASS_NAMES,
    DigitsDataset,
    DigitsGAN,
    SampleQualityEvaluator,
    SampleWriter,
    adam_for_each,
    fixed_latents,
    trained_digits_cnn,
)
from hooktrain.solver import LinearParamScheduler

from .common.train import train

model = L(DigitsGAN)(latent_size=32, hidden_size=256, discriminator_steps=2)

dataloader = dict(
    train=L(build_train_loader)(
        dataset=L(DigitsDataset)(train=True), total_batch_size=64, seed="${train.seed}"
    ),
    # The model is evaluated on these: it draws an image for each.
    test=L(build_test_loader)(
        dataset=L(fixed_latents)(count=500, latent_size="${model.latent_size}", seed=1),
        batch_size=250,
    ),
    evaluator=L(SampleQualityEvaluator)(
        classifier=L(trained_digits_cnn)(dataset=L(DigitsDataset)(train=True)),
        class_names=CLASS_NAMES,
        real=L(build_test_loader)(
            dataset=L(DigitsDataset)(train=False), batch_size=180
        ),
    ),
)

# Each network has its own optimizer and schedule.
optimizer = L(adam_for_each)(
    generator=dict(lr=7e-4, betas=(0.0, 0.99)),
    discriminator=dict(lr=7e-4, betas=(0.0, 0.99)),
)
lr_multiplier = dict(
    generator=L(LinearParamScheduler)(start_value=1.0, end_value=0.0),
    discriminator=L(LinearParamScheduler)(start_value=1.0, end_value=0.0),
)

train.output_dir = "./output/digits_gan"
train.max_iter = 5000
train.ema = dict(enabled=True, decay=0.998)
train.checkpointer.period = 1000
train.checkpointer.max_to_keep = 2
train.eval_period = 0

hooks = [
    L(SampleWriter)(
        period=500,
        inputs=L(fixed_latents)(count=100, latent_size="${model.latent_size}", seed=2),
        output_dir="${train.output_dir}",
        scale=4,
    )
]
