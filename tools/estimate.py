"""Estimate the memory and the messages of one rank without running it.

    hooktrain train --config-file FILE --dry-run --ranks 64 --device-memory 80GiB

The parts of the configuration are built as in a run, and the trainer runs real iterations, but all
tensors are torch's fake tensors: they have types, shapes and a device, but no values, so a model of
any size fits, and a step takes only the time of its Python code. The process group is torch's fake
one, in which this process is rank 0 and the others never answer (`Rank` in estimate_rank.py). So
the real work of the model, DistributedDataParallel, fully_shard and the optimizer is counted:

- `Watch` in estimate_watch.py sees the results of each operation, and adds up the live storages.
  The second iteration finds the peak, since the optimizer has its state by then, and the third one
  attributes the bytes at the peak;
- each collective passes through `Watch` too, with its tensors and its group.

Private names of torch are used only in these three files.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from estimate_rank import Rank, pretended
from tabulate import tabulate
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from hooktrain.strategy import choose_device
from hooktrain.utils.tensors import map_leaves

MOST_SAMPLES = 2**20  # the largest batch of a rank to try

UNKNOWN = """
Not in these figures:
- workspaces that kernels and the communication library allocate themselves;
- fragmentation: an allocator reserves more than is in use at any time;
- the CUDA context and the memory of other programs on the device, often 0.5 to 1 GiB;
- the data: later batches may be larger than the first one;
- evaluations, hooks other than EMA, and what torch.compile saves or adds."""


def estimate(cfg: Any, ranks: int = 1, device_memory: str = "") -> None:
    """Print the memory and the messages of rank 0, which has the largest shards.

    Args:
        cfg: the configuration; it is changed.
        ranks: the number of ranks.
        device_memory: the memory of a device, such as "80GiB", to say whether the rank fits.

    Raises:
        ValueError: if ``ranks`` is below 1, or ``device_memory`` has another form.
        DataDependentError: if the model's code reads the values of a tensor.
    """
    if ranks < 1:
        raise ValueError(f"--ranks must be at least 1, not {ranks}")
    limit = parse_size(device_memory) if device_memory else None
    device = choose_device(cfg.train.device).type
    with pretended(ranks, device) as (fakes, watch):
        rank = Rank(cfg, fakes, watch)
        parts = rank.parts_at_peak()
        peak, messages = watch.peak, watch.messages
        saved = rank.saved()
        print(
            f"One of {ranks} ranks on {device}, in bytes that tensors take at the peak of a step:\n"
        )
        rows = [(name, in_words(size)) for name, size in parts.items() if size]
        print(tabulate([*rows, ("peak", in_words(peak))], colalign=("left", "right")))
        print(f"\nUntil the first step: {in_words(rank.building)}")
        if cfg.train.checkpointer.background:
            whose = (
                "each rank's"
                if cfg.train.checkpointer.sharded
                else "the main process's"
            )
            print(
                f"A save in the background keeps in {whose} host memory: {in_words(saved)}"
            )
        if ranks > 1:
            print_messages(messages)
        if limit is not None:
            print_fit(rank, peak, limit)
    print(UNKNOWN)


def print_messages(messages: Mapping[str, Mapping[str, int]]) -> None:
    """Print the collectives of a step."""
    rows = [(kind, n["count"], in_words(n["bytes"])) for kind, n in messages.items()]
    print(
        "\nMessages that a rank sends in a step; it receives as many bytes (in rings):\n"
    )
    print(
        tabulate(rows, ["kind", "number", "bytes"], colalign=("left", "right", "right"))
    )


def print_fit(rank: Rank, peak: int, limit: int) -> None:
    """Print whether a rank with this peak fits into the memory, and the largest batch that does."""
    needed = max(peak, rank.building)
    verdict = "fits" if needed <= limit else "does not fit"
    print(f"\nIt {verdict} into {in_words(limit)}: {needed / limit:.0%}")
    if rank.building > limit:
        print(
            "The model is too large before the first step, with any batch. FSDPStrategy has "
            "deferred_init, which builds it in shards"
        )
        return
    try:
        size, largest = batch_size(rank.batch), largest_batch(rank, limit, peak)
    except ValueError as error:
        print(f"The largest batch is not known: {error}")
        return
    print(
        f"The batch of a rank has {size} samples; the largest that fits has {largest:,}"
    )


def largest_batch(rank: Rank, limit: int, peak: int) -> int:
    """The largest batch of a rank whose peak is within a limit in bytes; 0 if none is.

    Most models take the same memory for each additional sample, so the line through two sizes
    points at the largest one, and a few iterations find it. If the update takes more memory than
    small batches, the sizes are doubled first.

    Args:
        rank: the rank.
        limit: the limit.
        peak: the peak of the rank's own batch.
    """
    first, size = rank.batch, batch_size(rank.batch)
    stays = sum(leaf.nbytes for leaf in tree_leaves(first) if isinstance(leaf, Tensor))
    points = [(size, peak)]
    fits, too_large = (size, MOST_SAMPLES) if peak <= limit else (0, size)
    while too_large - fits > 1:
        guess = max(fits + 1, min(next_guess(points, limit), too_large - 1))
        if len(points) > 8:
            guess = (fits + too_large) // 2
        batch = resized(first, size, guess, rank.watch.fakes)
        points.append((guess, rank.step(batch) - stays))
        if points[-1][1] <= limit:
            fits = guess
        else:
            too_large = guess
    rank.batch = first
    return fits


def next_guess(points: list[tuple[int, int]], limit: int) -> int:
    """The batch at which the line through the last two points reaches the limit."""
    last, high = points[-1]
    if len(points) == 1:
        return 2 * last
    before, low = points[-2]
    slope = (high - low) / (last - before)
    return last + math.floor((limit - high) / slope) if slope > 0 else 2 * last


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its tensors, or its length.

    Raises:
        ValueError: if the tensors have different sizes.
    """
    if isinstance(batch, list) and not isinstance(batch[0], Tensor):
        return len(batch)  # a list of samples
    sizes = {leaf.shape[:1] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"the first dimensions of the batch's tensors differ, {sorted(map(tuple, sizes))}, so "
            "the shapes of larger batches are unknown"
        )
    return int(sizes.pop()[0])


def resized(batch: Any, size: int, new: int, fakes: FakeTensorMode) -> Any:
    """A batch with another number of samples; see :func:`batch_size`."""
    if isinstance(batch, list) and not isinstance(batch[0], Tensor):
        return [batch[i % size] for i in range(new)]

    def change(_: Any, leaf: Any) -> Any:
        return (
            leaf.new_empty(new, *leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf
        )

    with fakes:
        return map_leaves(change, batch)


def parse_size(text: str) -> int:
    """Parse a size such as "80GiB" or "24 GB" into bytes.

    Raises:
        ValueError: for any other text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip())
    if found is None:
        raise ValueError(f"a memory size must be like '80GiB' or '24GB', not {text!r}")
    number, unit, is_binary = found.groups()
    return round(
        float(number) * (1024 if is_binary else 1000) ** ("KMGT".index(unit) + 1)
    )


def in_words(size: int) -> str:
    """Format a number of bytes with three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
