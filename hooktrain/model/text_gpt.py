"""A small language model of characters, or of any other tokens."""

import math
from collections.abc import Mapping
from difflib import get_close_matches

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SIZES", "Block", "TextGPT"]

# (depth, width, heads): about 12 * depth * width^2 parameters.
SIZES = {
    "tiny": (2, 32, 2),
    "small": (4, 256, 4),
    "medium": (6, 512, 8),
    "large": (12, 768, 12),
}


class TextGPT(nn.Module):
    """A causal transformer: GPT-2's, with rotary positions (RoFormer, arXiv:2104.09864).

    No layer has a bias. Weights start from N(0, 0.02), those that write into the residual stream
    from N(0, 0.02 / sqrt(2 * depth)), as in GPT-2 (Radford et al. 2019).

    Args:
        vocab_size: how many tokens there are, at least 1.
        block_size: the longest text that the model sees at a time, at least 1.
        size: a name in ``SIZES``, or (depth, width, heads); each head gets an even number of
            features.
        dropout: the share of features that training leaves out, in [0, 1): of the embeddings, of
            the attention's weights, and of what a layer adds.

    Attributes:
        blocks: the layers, a ``ModuleList`` of :class:`Block`, to be sharded, compiled or
            recomputed one by one.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        size: str | tuple[int, int, int] = "small",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, but got {vocab_size!r}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, but got {block_size!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), but got {dropout!r}")
        depth, width, heads = _checked_size(size)
        self.block_size = block_size
        self.head_width = width // heads
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew, for example after the model left the meta device."""
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, weight in self.named_parameters():
            if weight.dim() == 1:  # of a norm
                weight.fill_(1.0)
            else:
                adds = name.endswith(("attention_out.weight", "mlp_out.weight"))
                weight.normal_(std=residual if adds else 0.02)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | Tensor:
        """Compute the loss in training mode, logits in evaluation mode.

        Args:
            batch: on any device: ``"tokens"``, int64, shape (N, T), in [0, vocab_size); and in
                training mode ``"targets"`` of the same shape, the token that comes next after each
                one, or -1 where there is nothing to predict.

        Returns:
            ``{"loss_lm": mean cross entropy in nats}``, or logits of shape (N, T, vocab_size).

        Raises:
            ValueError: for wrong shapes.
        """
        device = self.head.weight.device
        tokens = batch["tokens"]
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.block_size:
            raise ValueError(
                f"'tokens' must have shape (N, T), T from 1 to block_size={self.block_size}, but "
                f"got {tuple(tokens.shape)}"
            )
        x = self.dropout(self.embedding(tokens.to(device, non_blocking=True)))
        rotation = _rotation(tokens.shape[1], self.head_width, device)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        if not self.training:
            return logits
        targets = batch["targets"]
        if targets.shape != tokens.shape:
            raise ValueError(
                f"'targets' must have the shape of 'tokens', {tuple(tokens.shape)}, but got "
                f"{tuple(targets.shape)}"
            )
        targets = targets.to(device, non_blocking=True)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return {"loss_lm": loss}

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        count: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a text, one token after the other, each from the last ``block_size`` ones.

        Args:
            prompt: int64, shape (T,), at least one token.
            count: how many tokens to add, at least 0.
            temperature: the logits are divided by it; below 1 the likely becomes more likely, and
                0 always takes the likeliest.
            generator: of the random numbers, on the CPU; None is torch's global one.

        Returns:
            The prompt and what follows: int64, shape (T + count,), on the CPU.

        Raises:
            RuntimeError: in training mode.
            ValueError: for an argument out of range.
        """
        if self.training:
            raise RuntimeError("generate needs the model in evaluation mode: call eval() first")
        if prompt.dim() != 1 or len(prompt) == 0:
            raise ValueError(f"prompt must have shape (T,), T >= 1, but got {tuple(prompt.shape)}")
        if count < 0:
            raise ValueError(f"count must not be negative, but got {count!r}")
        if not temperature >= 0:
            raise ValueError(f"temperature must not be negative, but got {temperature!r}")
        tokens = prompt.cpu()
        for _ in range(count):
            # Through __call__, as a wrapper such as FSDP needs it.
            logits = self({"tokens": tokens[None, -self.block_size :]})[0, -1]
            logits = logits.float().cpu()  # a host-device synchronisation for each token
            if temperature == 0:
                token = logits.argmax(keepdim=True)
            else:
                chances = (logits / temperature).softmax(0)
                token = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, token])
        return tokens


class Block(nn.Module):
    """A layer: attention, then a perceptron at each place, each added to what came in.

    Args:
        width: features of a place.
        heads: of the attention.
        dropout: see :class:`TextGPT`.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """What comes out: (N, T, width), as ``x``.

        Args:
            x: what comes in.
            rotation: cosines and sines of the places, shape (2, T, width / heads / 2).
        """
        x = x + self.dropout(self._attend(self.attention_norm(x), rotation))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.mlp_out(hidden))
        return out

    def _attend(self, x: Tensor, rotation: Tensor) -> Tensor:
        # (N, T, 3 * width) becomes three of (N, heads, T, width / heads).
        parts = self.attention_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = F.scaled_dot_product_attention(
            _rotate(query, rotation),
            _rotate(key, rotation),
            value,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


def _rotation(length: int, width: int, device: torch.device) -> Tensor:
    """Cosines and sines of all places and speeds. Quick to compute, so that nothing is kept."""
    speeds = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(length, device=device), speeds)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of features by the angles of its place, computed in float32 at least."""
    cosine, sine = rotation
    a, b = x.chunk(2, dim=-1)
    turned: Tensor = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)
    return turned.to(x.dtype)


def _checked_size(size: str | tuple[int, int, int]) -> tuple[int, int, int]:
    if isinstance(size, str):
        if size not in SIZES:
            close = get_close_matches(size, SIZES, n=1)
            raise ValueError(
                f"size must be one of {list(SIZES)} or (depth, width, heads), but got {size!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )
        return SIZES[size]
    numbers = isinstance(size, tuple | list) and len(size) == 3 and min(size) >= 1
    if not numbers or size[1] % (2 * size[2]):
        raise ValueError(
            f"size must be a name or (depth, width, heads), the width a multiple of twice the "
            f"heads, but got {size!r}"
        )
    depth, width, heads = size
    return depth, width, heads
