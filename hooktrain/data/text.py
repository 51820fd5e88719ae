"""Text, character by character: the documentation of Python, which comes with every CPython."""

import importlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

__all__ = [
    "IGNORED_TARGET",
    "CharVocabulary",
    "PythonDocs",
    "TextDataset",
    "load_python_docs",
    "python_docs_vocabulary",
]

# Where a target has this value there is nothing to predict.
IGNORED_TARGET = -1

_PARTS = ("train", "heldout")


@lru_cache(maxsize=1)
def load_python_docs() -> tuple[str, str]:
    """The topics of Python's ``help()``, about 370,000 characters, cut in two.

    The topics follow each other in the order of their names. Some repeat parts of others, so each
    paragraph is taken once, where it occurs first: what is held out was not seen in training.

    The text is that of the running interpreter, and differs between versions of CPython: train,
    resume and evaluate with the same one.

    Returns:
        The text to train on, the first nine tenths of the characters, and the rest, held out. The
        cut is between two paragraphs.

    Raises:
        ModuleNotFoundError: if this Python comes without ``pydoc_data.topics``.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this Python has no pydoc_data.topics, the text to train on; the whole standard "
            "library has it (on Debian and Ubuntu the package libpython3-stdlib)"
        ) from error
    paragraphs = _distinct_paragraphs([topics[name] for name in sorted(topics)])
    ends = list(accumulate(map(len, paragraphs)))
    heldout = bisect_right(ends, ends[-1] * 9 // 10)
    return "".join(paragraphs[:heldout]), "".join(paragraphs[heldout:])


def _distinct_paragraphs(texts: Sequence[str]) -> list[str]:
    """Each paragraph once, whatever its indentation, with the empty line that ends it."""
    paragraphs: dict[str, str] = {}
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            if words := " ".join(paragraph.split()):
                paragraphs.setdefault(words, paragraph.strip("\n") + "\n\n")
    return list(paragraphs.values())


class CharVocabulary:
    """The characters of a text, numbered from 1 on in the order of their code points.

    Token 0 stands for every other character, and for what is before a text.

    Args:
        text: where the characters come from.

    Attributes:
        characters: those that have a token, in order.

    Raises:
        ValueError: for an empty text.
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a vocabulary needs a text that is not empty")
        self.characters = "".join(sorted(set(text)))
        self._tokens = {c: token for token, c in enumerate(self.characters, 1)}

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.characters) + 1

    def encode(self, text: str) -> Tensor:
        """The tokens of a text: int64, shape (len(text),)."""
        return torch.tensor([self._tokens.get(c, 0) for c in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens in [0, len(self)); token 0 becomes U+FFFD, the replacement character.

        Raises:
            IndexError: for a token out of range.
        """
        characters = "\N{REPLACEMENT CHARACTER}" + self.characters
        return "".join([characters[token] for token in tokens.tolist()])


@lru_cache(maxsize=1)
def python_docs_vocabulary() -> CharVocabulary:
    """The vocabulary of the training part of :func:`load_python_docs`."""
    return CharVocabulary(load_python_docs()[0])


class TextDataset(Dataset[dict[str, Tensor]]):
    """Pieces of a text, with what comes next after each of their characters.

    A sample is a dict of ``tokens`` and ``targets``, both int64 of shape (block_size,); targets
    are the tokens one place further on. The first character of the text is predicted from token 0.

    Args:
        text: the text.
        vocabulary: turns it into tokens.
        block_size: characters in a sample, at least 1.
        stride: characters from the start of one sample to that of the next, in
            [1, block_size]. 1 gives one sample for each place, ``block_size`` predicts each
            character exactly once; the targets of the last sample are then filled up with
            ``IGNORED_TARGET``.

    Raises:
        ValueError: for arguments out of range, or an empty text.
    """

    def __init__(
        self, text: str, vocabulary: CharVocabulary, block_size: int, stride: int = 1
    ) -> None:
        if not text:
            raise ValueError("text must not be empty")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, but got {block_size!r}")
        if not 1 <= stride <= block_size:
            raise ValueError(f"stride must be in [1, {block_size}], but got {stride!r}")
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.stride = stride
        self.characters = len(text)
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), vocabulary.encode(text)])
        samples = 1 + max(0, -(-(len(text) - block_size) // stride))
        missing = (samples - 1) * stride + block_size - len(text)
        self._tokens = F.pad(tokens, (0, missing))
        self._targets = F.pad(tokens[1:], (0, missing), value=IGNORED_TARGET)
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(f"index {index!r} is out of range for {self._samples} samples")
        begin = index * self.stride
        place = slice(begin, begin + self.block_size)
        return {"tokens": self._tokens[place], "targets": self._targets[place]}


class PythonDocs(TextDataset):
    """One part of :func:`load_python_docs`, by the vocabulary of the training part.

    Args:
        part: ``"train"``, with a sample for each place; or ``"heldout"``, with each character
            predicted exactly once.
        block_size: see :class:`TextDataset`.

    Raises:
        ValueError: for another part, or a block size below 1.
    """

    def __init__(self, part: str, block_size: int) -> None:
        if part not in _PARTS:
            close = get_close_matches(str(part), _PARTS, n=1)
            raise ValueError(
                f"part must be one of {_PARTS}, but got {part!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )
        train = part == "train"
        text = load_python_docs()[0 if train else 1]
        super().__init__(
            text, python_docs_vocabulary(), block_size, stride=1 if train else block_size
        )
