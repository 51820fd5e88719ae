"""Models to estimate, and the real peak of their training as torch's profiler has it."""

import logging
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from gloo import run_ranks
from hooktrain.config import ConfigDict, LazyCall as L, LazyConfig
from hooktrain.data import build_train_loader
from hooktrain.engine import HookBase, build_trainer, train_settings
from hooktrain.solver import get_default_optimizer_params


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of random numbers, and a label."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(self.shape), index % 10


class Classifier(nn.Module):
    """Layers, and the cross entropy of what they return."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]).float(), batch[1])


class MLP(Classifier):
    def __init__(self, width: int = 256, depth: int = 16) -> None:
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
        super().__init__(nn.Sequential(*layers, nn.Linear(width, 10)))


class CNN(Classifier):
    def __init__(self, width: int = 16, depth: int = 8) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1)]
        for _ in range(depth):
            conv = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
        last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
        super().__init__(nn.Sequential(*layers, *last))


class Block(nn.Module):
    """A block of a transformer, which attends to a memory too, if there is one."""

    def __init__(self, width: int, crosses: bool = False) -> None:
        super().__init__()
        kinds = ("own", "cross") if crosses else ("own",)
        self.norms = nn.ModuleDict({kind: nn.LayerNorm(width) for kind in kinds})
        self.projections = nn.ModuleDict(
            {kind: nn.Linear(width, 3 * width) for kind in kinds}
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for kind, norm in self.norms.items():
            source = norm(x if kind == "own" else memory)
            q, k, v = (
                part.unflatten(-1, (4, -1)).transpose(1, 2)
                for part in self.projections[kind](source).chunk(3, -1)
            )
            attended = F.scaled_dot_product_attention(q, k, v)
            x = x + attended.transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Transformer(Classifier):
    def __init__(self, width: int = 64, depth: int = 12) -> None:
        blocks = [Block(width) for _ in range(depth)]
        mean = nn.AdaptiveAvgPool1d(1)
        last = [nn.Linear(width, 10), nn.Flatten(0, 1), nn.Unflatten(0, (-1, 32))]
        super().__init__(nn.Sequential(*blocks, *last))
        self.mean = mean

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = self.mean(self.layers(batch[0]).float().transpose(1, 2)).squeeze(-1)
        return F.cross_entropy(logits, batch[1])


class EncoderDecoder(nn.Module):
    def __init__(self, width: int = 64, depth: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.decoder = nn.ModuleList(Block(width, True) for _ in range(depth))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = batch[0].chunk(2, 1)
        memory = self.encoder(source)
        x = target
        for block in self.decoder:
            x = block(x, memory)
        return F.mse_loss(x.float(), target)


MODELS = {
    "MLP": (L(MLP)(), (256,), 512),
    "CNN": (L(CNN)(), (3, 64, 64), 16),
    "Transformer": (L(Transformer)(), (32, 64), 32),
    "EncoderDecoder": (L(EncoderDecoder)(), (64, 64), 32),
}


BF16 = ("train.amp.enabled=True", "train.amp.dtype=bfloat16")


def sharded(*wrap: str) -> str:
    kind = "hooktrain.strategy.FSDPStrategy"
    return f"train.strategy={{'_target_': '{kind}', 'wrap': {list(wrap)}}}"


def samples(model: str, ranks: int) -> str:
    return f"dataloader.train.total_batch_size={ranks * MODELS[model][2]}"


def configuration(model: str, *changes: str) -> Any:
    """The configuration of a model; its batch is one for each rank times the number of ranks."""
    described, shape, batch = MODELS[model]
    cfg = ConfigDict(
        model=described,
        optimizer=L(torch.optim.AdamW)(
            params=L(get_default_optimizer_params)(), lr=1e-4
        ),
        dataloader={
            "train": L(build_train_loader)(
                dataset=L(Samples)(*shape),
                total_batch_size=batch,
                num_workers=0,
                seed=0,
            )
        },
        train={**train_settings(), "device": "cpu", "max_iter": 3},
    )
    return LazyConfig.apply_overrides(cfg, [*changes])


class Mark(HookBase):
    """Marks the iterations in the profile."""

    def before_step(self) -> None:
        self.mark = record_function(f"iteration {self.trainer.iter}")
        self.mark.__enter__()

    def after_step(self) -> None:
        self.mark.__exit__(None, None, None)


def real_peaks(model: str, *changes: str) -> tuple[int, int]:
    """The largest sum of what torch's CPU allocator has given out, in iteration 2.

    Returns:
        The peak without the copies that gloo makes of what it exchanges, and with them.
    """
    cfg = configuration(model, *changes)
    logging.disable(logging.CRITICAL)
    with TemporaryDirectory() as folder:
        cfg.train.output_dir = folder
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            trainer = build_trainer(cfg)
            trainer.register_hooks([Mark()])
            trainer.train(max_iter=3)
    logging.disable(logging.NOTSET)
    own: dict[int, bool] = {}  # by address: whether gloo has allocated it
    now, peaks = [0, 0], [0, 0]
    allocations, start, end = read_profile(profiler)
    for time, address, size, is_of_gloo in allocations:
        if size > 0:
            own[address] = is_of_gloo
        for i in range(2):
            now[i] += size * (i == 1 or not own.get(address, False))
            if start <= time <= end:
                peaks[i] = max(peaks[i], now[i])
    return peaks[0], peaks[1]


def lowest_peak(model: str, ranks: int, changes: Sequence[str], expected: int) -> int:
    """The peak of rank 0 of real ranks, without what gloo allocates.

    The threads of gloo now and then keep a tensor for longer, which is not the rank's doing. So if
    the peak is over 5 % higher than the expected one, it is the lowest of three.
    """
    peaks: list[int] = []
    while len(peaks) < 3 and (not peaks or min(peaks) > 1.05 * expected):
        found = run_ranks(real_peaks, ranks, model, *changes, limit_seconds=150.0)
        peaks.append(found[0][0])
    return min(peaks)


def read_profile(profiler: Any) -> tuple[list[tuple[int, int, int, bool]], int, int]:
    """The allocations in their order, and when iteration 2 began and ended.

    Of gloo are those inside of its operations, and those that other threads make meanwhile.
    """
    found = []
    spans = {}
    stack = [
        (root, False, False)
        for root in profiler.profiler.kineto_results.experimental_event_tree()
    ]
    while stack:
        node, is_in_iteration, is_of_gloo = stack.pop()
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            event = (node.start_time_ns, fields.ptr, fields.alloc_size)
            found.append((event, is_in_iteration, is_of_gloo))
        elif node.name.startswith("iteration "):
            spans[node.name] = node.start_time_ns, node.end_time_ns
        is_in_iteration |= node.name.startswith("iteration ")
        is_of_gloo |= node.name.startswith(("gloo:", "c10d::"))
        stack += [(child, is_in_iteration, is_of_gloo) for child in node.children]
    allocations = []
    for event, is_in_iteration, is_of_gloo in sorted(found):
        is_meanwhile = any(start <= event[0] <= end for start, end in spans.values())
        of_other = is_meanwhile and not is_in_iteration
        allocations.append((*event, is_of_gloo or of_other))
    return allocations, *spans["iteration 2"]
