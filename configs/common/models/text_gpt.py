"""A small causal transformer over the characters of Python's documentation."""

from hooktrain.config import LazyCall as L
from hooktrain.demos import TextGPT, python_docs_vocabulary

model = L(TextGPT)(
    vocab_size=L(len)(L(python_docs_vocabulary)()),
    block_size="${dataloader.train.dataset.block_size}",
    size="small",
    dropout=0.0,
    fused=True,
)
