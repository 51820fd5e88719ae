"""A small language model of characters, with its text, its data set and its evaluator."""

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hooktrain.evaluation import DatasetEvaluator
from hooktrain.utils import comm

# A target with this value is not predicted.
IGNORED_TARGET = -1


@lru_cache(maxsize=1)
def load_python_docs() -> tuple[str, str]:
    """The topics of Python's ``help()``, about 370,000 characters, split into two parts.

    The topics are sorted by name. Some repeat parts of others, so each paragraph is taken once,
    and training sees none of the held-out text. The text differs between versions of CPython, so
    train, resume and evaluate with the same version.

    Returns:
        The text to train on, about nine tenths of the characters; and the held-out rest.

    Raises:
        ModuleNotFoundError: if this Python lacks ``pydoc_data.topics``, which is part of the
            full standard library (on Debian and Ubuntu, the package libpython3-stdlib).
    """
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    paragraphs = _distinct_paragraphs(texts)
    ends = list(accumulate(map(len, paragraphs)))
    nine_tenths = ends[-1] * 9 // 10
    heldout = bisect_right(ends, nine_tenths)
    train = paragraphs[:heldout]
    rest = paragraphs[heldout:]
    return "".join(train), "".join(rest)


def _distinct_paragraphs(texts: Sequence[str]) -> list[str]:
    """Each paragraph once, regardless of indentation, with the empty line that ends it."""
    paragraphs: dict[str, str] = {}
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if not words:
                continue
            ended = paragraph.strip("\n") + "\n\n"
            paragraphs.setdefault(words, ended)
    return list(paragraphs.values())


class CharVocabulary:
    """The characters of a text, numbered from 1 in the order of their code points.

    Token 0 stands for every other character, and for the position before a text.

    Args:
        text: the text whose characters are numbered.

    Attributes:
        characters: the characters that have a token, in order.
    """

    def __init__(self, text: str) -> None:
        self.characters = "".join(sorted(set(text)))
        self._tokens: dict[str, int] = {}
        for token, character in enumerate(self.characters, 1):
            self._tokens[character] = token

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.characters) + 1

    def encode(self, text: str) -> Tensor:
        """The tokens of a text: int64, shape (len(text),)."""
        tokens = [self._tokens.get(character, 0) for character in text]
        return torch.tensor(tokens, dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens in [0, len(self)); token 0 becomes U+FFFD, the replacement character.

        Raises:
            IndexError: for a token out of range.
        """
        characters = "\N{REPLACEMENT CHARACTER}" + self.characters
        found = [characters[token] for token in tokens.tolist()]
        return "".join(found)


@lru_cache(maxsize=1)
def python_docs_vocabulary() -> CharVocabulary:
    """The vocabulary of the training part of :func:`load_python_docs`."""
    train, _ = load_python_docs()
    return CharVocabulary(train)


class TextDataset(Dataset[dict[str, Tensor]]):
    """Pieces of a text, with the next character of each position as its target.

    A sample is a dict of ``tokens`` and ``targets``, both int64 of shape (block_size,); targets
    are the tokens shifted by one position. The first character of the text is predicted from token
    0. The targets of the last sample are padded with ``IGNORED_TARGET``.

    Args:
        text: the text.
        vocabulary: the vocabulary that turns it into tokens.
        block_size: the number of characters in a sample, at least 1.
        stride: the number of characters from the start of one sample to the start of the next, in
            [1, block_size]; with ``block_size`` each character is predicted once.

    Raises:
        ValueError: if the stride is out of range.
    """

    def __init__(
        self, text: str, vocabulary: CharVocabulary, block_size: int, stride: int = 1
    ) -> None:
        if not 1 <= stride <= block_size:
            raise ValueError(f"stride must be in [1, {block_size}], but got {stride!r}")
        self.block_size = block_size
        self.stride = stride
        start = torch.zeros(1, dtype=torch.int64)
        tokens = torch.cat([start, vocabulary.encode(text)])
        after_first = max(0, len(text) - block_size)
        further = -(-after_first // stride)
        end = further * stride + block_size
        missing = end - len(text)
        targets = tokens[1:]
        self._tokens = F.pad(tokens, (0, missing))
        self._targets = F.pad(targets, (0, missing), value=IGNORED_TARGET)
        self._samples = 1 + further

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(
                f"index {index!r} is out of range for {self._samples} samples"
            )
        begin = index * self.stride
        end = begin + self.block_size
        place = slice(begin, end)
        return {"tokens": self._tokens[place], "targets": self._targets[place]}


class PythonDocs(TextDataset):
    """One part of :func:`load_python_docs`, in tokens of the training part's vocabulary.

    Args:
        part: ``"train"``, with a sample for each position; or ``"heldout"``, with each character
            predicted once.
        block_size: see :class:`TextDataset`.

    Raises:
        ValueError: if the part is unknown, or the block size below 1.
    """

    def __init__(self, part: str, block_size: int) -> None:
        train, heldout = load_python_docs()
        vocabulary = python_docs_vocabulary()
        if part == "train":
            super().__init__(train, vocabulary, block_size)
        elif part == "heldout":
            super().__init__(heldout, vocabulary, block_size, stride=block_size)
        else:
            raise ValueError(f"part must be 'train' or 'heldout', but got {part!r}")


# (depth, width, heads): about 12 * depth * width^2 parameters.
SIZES = {
    "tiny": (2, 32, 2),
    "small": (4, 256, 4),
    "medium": (6, 512, 8),
    "large": (12, 768, 12),
}


class TextGPT(nn.Module):
    """A causal transformer: GPT-2's, with rotary positions (RoFormer, arXiv:2104.09864).

    No layer has a bias. Weights are drawn from N(0, 0.02), and those that write into the residual
    stream from N(0, 0.02 / sqrt(2 * depth)), as in GPT-2 (Radford et al. 2019).

    Args:
        vocab_size: the number of tokens, at least 1.
        block_size: the context length, at least 1.
        size: a name in ``SIZES``, or (depth, width, heads) with an even number of features per
            head.
        dropout: the dropout probability of the embeddings, of the attention's weights and of the
            layers' outputs, in [0, 1).
        fused: whether a single matrix computes queries, keys and values. Three matrices can be
            divided by heads, as :mod:`hooktrain.demos.text_parallel` does.

    Attributes:
        blocks: the layers, a ``ModuleList`` of :class:`Block`.

    Raises:
        ValueError: if the size is invalid.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        size: str | tuple[int, int, int] = "small",
        dropout: float = 0.0,
        fused: bool = True,
    ) -> None:
        super().__init__()
        depth, width, heads = _checked_size(size)
        self.block_size = block_size
        self.head_width = width // heads
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(Block(width, heads, dropout, fused))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise all weights, for example after the model has left the meta device."""
        additions = 2 * len(self.blocks)
        residual = 0.02 / math.sqrt(additions)
        for name, weight in self.named_parameters():
            if weight.dim() == 1:  # the weight of a norm
                weight.fill_(1.0)
            elif name.endswith(("attention_out.weight", "mlp_out.weight")):
                weight.normal_(std=residual)
            else:
                weight.normal_(std=0.02)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | Tensor:
        """Compute the loss in training mode, logits in evaluation mode.

        Args:
            batch: a dict, on any device: ``"tokens"``, int64 of shape (N, T), in [0, vocab_size);
                and in training mode ``"targets"`` of that shape, each the next token, or -1 for
                none.

        Returns:
            ``{"loss_lm": mean cross entropy in nats}``, or logits of shape (N, T, vocab_size).
        """
        device = self.head.weight.device
        tokens = batch["tokens"].to(device, non_blocking=True)
        x = self.embedding(tokens)
        x = self.dropout(x)
        rotation = _rotation(tokens.shape[1], self.head_width, device)
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        if not self.training:
            return logits
        targets = batch["targets"].to(device, non_blocking=True)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET
        )
        return {"loss_lm": loss}

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        count: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a text token by token, each predicted from the last ``block_size`` tokens.

        The model must be in evaluation mode.

        Args:
            prompt: the tokens to continue, int64 of shape (T,), at least one.
            count: the number of tokens to add, at least 0.
            temperature: the divisor of the logits; 0 always takes the most likely token.
            generator: the random generator, on the CPU; None is torch's global one.

        Returns:
            The prompt and its continuation, int64 of shape (T + count,), on the CPU.
        """
        tokens = prompt.cpu()
        for _ in range(count):
            # Call the model itself, not its forward: FSDP needs __call__.
            seen = tokens[-self.block_size :]
            batch = {"tokens": seen.unsqueeze(0)}
            logits = self(batch)[0, -1]
            # A host-device synchronisation per token.
            logits = logits.float().cpu()
            if temperature == 0:
                token = logits.argmax(keepdim=True)
            else:
                logits = logits / temperature
                chances = logits.softmax(0)
                token = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, token])
        return tokens


class Block(nn.Module):
    """A layer: attention, then a perceptron at each position, each with a residual connection.

    Args:
        width: the number of features at a position.
        heads: the number of heads of the attention.
        dropout: see :class:`TextGPT`.
        fused: see :class:`TextGPT`.
    """

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, fused: bool = True
    ) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in: nn.Module
        if fused:
            self.attention_in = nn.Linear(width, 3 * width, bias=False)
        else:
            self.attention_in = ThreeLinears(width)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Compute the layer's output, of the same shape (N, T, width) as ``x``.

        Args:
            x: the input.
            rotation: cosines and sines of the positions, of shape (2, T, width / heads / 2).
        """
        attended = self._attend(self.attention_norm(x), rotation)
        x = x + self.dropout(attended)
        hidden = self.mlp_in(self.mlp_norm(x))
        hidden = F.gelu(hidden, approximate="tanh")
        added: Tensor = self.dropout(self.mlp_out(hidden))
        return x + added

    def _attend(self, x: Tensor, rotation: Tensor) -> Tensor:
        # (N, T, 3 * width) becomes three tensors of (N, heads, T, width / heads). With tensor
        # parallelism a rank has only some of the heads.
        head_width = x.shape[-1] // self.heads
        parts = self.attention_in(x)
        parts = parts.unflatten(-1, (3, -1, head_width))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = 0.0
        if self.training:
            dropout = self.dropout.p
        mixed = F.scaled_dot_product_attention(
            _rotate(query, rotation),
            _rotate(key, rotation),
            value,
            dropout_p=dropout,
            is_causal=True,
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        out: Tensor = self.attention_out(mixed)
        return out


class ThreeLinears(nn.Module):
    """Separate matrices for queries, keys and values.

    Args:
        width: the number of features at a position.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Queries, keys and values, concatenated: (N, T, 3 * width)."""
        return torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)


def _rotation(length: int, width: int, device: torch.device) -> Tensor:
    """Cosines and sines of all positions and frequencies, which are fast to compute each time."""
    features = torch.arange(0, width, 2, device=device)
    speeds = 10000.0 ** (-features / width)
    places = torch.arange(length, device=device)
    angles = torch.outer(places, speeds)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of features by the angle of its position, in float32 or better."""
    cosine, sine = rotation
    a, b = x.chunk(2, dim=-1)
    parts = [a * cosine - b * sine, b * cosine + a * sine]
    turned = torch.cat(parts, dim=-1)
    return turned.to(x.dtype)


def _checked_size(size: str | tuple[int, int, int]) -> tuple[int, int, int]:
    if isinstance(size, str):
        if size not in SIZES:
            raise ValueError(f"size must be one of {list(SIZES)}, but got {size!r}")
        return SIZES[size]
    _, width, heads = size
    if width % (2 * heads):
        raise ValueError(f"width must be a multiple of 2 * heads: {size!r}")
    return size


class BitsPerCharacterEvaluator(DatasetEvaluator):
    """Computes the bits per character of a text when it is encoded by a model's predictions.

    This is the mean over all predicted characters, however they are divided into batches and among
    ranks. Losses are summed in float64 (float32 on Apple's devices, which have no float64), and
    stay on the device of the outputs until the end, so a batch costs no host-device
    synchronisation.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self._nats: Any = 0.0
        self._characters: Any = 0

    @torch.no_grad()
    def process(self, inputs: Mapping[str, Any], outputs: Tensor) -> None:
        """Take in one batch.

        Args:
            inputs: the batch, with ``"targets"`` as in :class:`TextDataset`, of shape (N, T).
            outputs: logits of shape (N, T, C).

        Raises:
            KeyError: if the batch has no targets.
        """
        device = outputs.device
        targets = inputs["targets"].flatten()
        targets = targets.to(device, non_blocking=True)
        dtype = torch.float64
        if device.type == "mps":
            dtype = torch.float32
        logits = outputs.flatten(0, 1).to(dtype)
        predicted = targets != IGNORED_TARGET
        loss = F.cross_entropy(
            logits, targets, ignore_index=IGNORED_TARGET, reduction="sum"
        )
        self._nats = self._nats + loss
        self._characters = self._characters + predicted.sum()

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Sum up the batches of all ranks. Collective.

        Returns:
            ``{"text": {"bits_per_character": ..., "val_loss": ...}}``, equal on all ranks to
            the last bit. ``val_loss`` is the mean cross entropy, in nats.

        Raises:
            ValueError: on all ranks, if there was nothing to predict.
        """
        # The transfers wait for the device: a host-device synchronisation, once per evaluation.
        mine = (float(self._nats), int(self._characters))
        ranks = comm.all_gather(mine)
        nats, counts = zip(*ranks, strict=True)
        characters = sum(counts)
        if characters == 0:
            raise ValueError("no rank has a character to predict")
        loss = math.fsum(nats) / characters
        bits = loss / math.log(2)
        values = {"bits_per_character": bits, "val_loss": loss}
        return {"text": values}
