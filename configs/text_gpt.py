"""A transformer learns to write like the documentation of Python, in two minutes on two CPU cores.

It reaches about 1.9 bits for each character of the tenth that is held out (CPython 3.11). A table
of single characters needs 4.68, one of pairs 3.45, one of triples 2.62.

A larger model needs one override, model.size=medium or model.size=large; on a GPU, for example:

    model.size=large dataloader.train.total_batch_size=64 optimizer.lr=5e-4
"""

import torch

from hooktrain.config import LazyCall as L
from hooktrain.demos import TextSampler, python_docs_vocabulary

from .common.data.text import dataloader
from .common.models.text_gpt import model
from .common.optim import AdamW as optimizer
from .common.schedule import warmup_cosine as lr_multiplier
from .common.train import train

optimizer.lr = 2e-3
optimizer.betas = (0.9, 0.95)
optimizer.weight_decay = 0.1
optimizer.params.overrides = {"embedding.weight": dict(weight_decay=0.0)}

train.output_dir = "./output/text_gpt"
train.max_iter = 750
train.accumulative_counts = 2
train.clip_grad = dict(max_norm=1.0)
# bfloat16 where the processor computes in it; elsewhere it would take 25 times as long as float32.
fast = torch.accelerator.is_available() or torch.cpu._is_avx512_bf16_supported()
train.amp = dict(enabled=fast, dtype="bfloat16")
train.ema = dict(enabled=True, decay=0.99)
train.checkpointer.period = 250
train.eval_period = 250
train.best_metric = "text/bits_per_character"
train.best_mode = "min"

hooks = [
    L(TextSampler)(
        period="${train.eval_period}",
        vocabulary=L(python_docs_vocabulary)(),
        output_dir="${train.output_dir}",
        prompt="The ",
        length=300,
    )
]
