"""A small causal transformer over the characters of Python's documentation."""

from hooktrain.config import LazyCall as L
from hooktrain.data.text import python_docs_vocabulary
from hooktrain.model.text_gpt import TextGPT

model = L(TextGPT)(
    vocab_size=L(len)(L(python_docs_vocabulary)()),
    block_size="${dataloader.train.dataset.block_size}",
    size="small",
    dropout=0.0,
)
