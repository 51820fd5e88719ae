"""A transformer learns to write like the documentation of Python, in two minutes on two CPU cores.

A larger one, for a GPU: model.size=medium or model.size=large, with train.device=cuda.
"""

from hooktrain.config import LazyCall as L
from hooktrain.data.text import python_docs_vocabulary
from hooktrain.engine.hooks.text_sampler import TextSampler

from .common.data.text import dataloader
from .common.models.text_gpt import model
from .common.optim import AdamW as optimizer  # noqa: N813
from .common.schedule import warmup_cosine as lr_multiplier
from .common.train import train

optimizer.lr = 2e-3
optimizer.betas = (0.9, 0.95)
optimizer.weight_decay = 0.1
optimizer.params.overrides = {"embedding.weight": dict(weight_decay=0.0)}

train.output_dir = "./output/text_gpt"
train.device = "cpu"
train.max_iter = 400
train.accumulative_counts = 2
train.clip_grad = dict(max_norm=1.0)
# Where the processor has no instructions for bfloat16 (AVX-512 or AMX), it is much slower than
# float32: add train.amp.enabled=false there.
train.amp = dict(enabled=True, dtype="bfloat16")
train.ema = dict(enabled=True, decay=0.99)
train.checkpointer = dict(period=100, max_to_keep=3)
train.eval_period = 100

hooks = [
    L(TextSampler)(
        period="${train.eval_period}",
        vocabulary=L(python_docs_vocabulary)(),
        output_dir="${train.output_dir}",
        prompt="The ",
        length=300,
    )
]
