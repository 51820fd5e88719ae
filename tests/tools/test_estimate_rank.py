"""tools/estimate_rank.py: a rank of fakes takes and sends what one of a real run does."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from estimating import BF16, MODELS, Block, configuration, lowest_peak, samples, sharded
from loading import TOOLS, load_tool
from torch import Tensor, nn

from hooktrain.config import LazyCall as L, LazyConfig
from hooktrain.engine import hooks

tool = load_tool("estimate_rank")

TWO_PASSES = ("train.accumulative_counts=2", "train.clip_grad={'max_norm': 1.0}")
EMA = ("train.ema.enabled=True",)
RECOMPUTED = ("train.activation_checkpointing=['Block']",)

Looked = tuple[Any, dict[str, int]]


def look(cfg: Any, ranks: int = 1) -> Looked:
    """The watched rank, and its parts at the peak."""
    with tool.pretended(ranks, "cpu") as (fakes, watch):
        rank = tool.Rank(cfg, fakes, watch)
        return rank, rank.parts_at_peak()


@pytest.mark.parametrize(
    ("model", "ranks", "changes"),
    [
        ("MLP", 1, (*BF16, *TWO_PASSES, *EMA)),
        ("CNN", 1, (*BF16, *EMA)),
        ("Transformer", 1, (*RECOMPUTED, "+model.depth=4")),
        ("EncoderDecoder", 2, (*TWO_PASSES, *EMA, *RECOMPUTED, "+model.depth=4")),
        ("CNN", 2, (sharded("Conv2d"), *BF16)),
        ("MLP", 4, (sharded("Linear"), *TWO_PASSES)),
    ],
)
def test_an_estimate_is_within_5_percent_of_the_real_peak(
    model: str, ranks: int, changes: tuple[str, ...]
) -> None:
    changes = (samples(model, ranks), *changes)
    rank, parts = look(configuration(model, *changes), ranks)
    assert rank.watch.peak == sum(parts.values())
    real = lowest_peak(model, ranks, changes, rank.watch.peak)
    assert rank.watch.peak == pytest.approx(real, rel=0.05)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in model.parameters())


def test_a_sharded_rank_has_its_shards_of_weights_gradients_and_optimizer() -> None:
    whole = weight_bytes(MODELS["MLP"][0]._target_())
    _, parts = look(configuration("MLP", sharded("Linear"), samples("MLP", 8), *EMA), 8)
    # The last layer has 10 rows, of which each of the first five ranks has two.
    last = 4 * (256 * 10 + 10)
    shard = (whole - last) // 8 + 4 * (2 * 256 + 2)
    assert (
        parts["weights"] == parts["averages (EMA)"] - 8 == shard
    )  # and a number of steps
    tensors = 2 * 17
    assert (
        parts["optimizer"] == 2 * shard + 4 * tensors
    )  # AdamW's two averages, and steps
    assert 0 < parts["gradients"] <= shard


def test_whole_ranks_exchange_each_gradient_once() -> None:
    whole = weight_bytes(MODELS["MLP"][0]._target_())
    cfg = configuration("MLP", samples("MLP", 64), "train.accumulative_counts=3")
    rank, parts = look(cfg, 64)
    # In a ring, 63 parts of 64 are sent to be added up, and as many to be known.
    assert rank.watch.messages["allreduce"]["bytes"] == pytest.approx(
        whole * 2 * 63 / 64, abs=2
    )
    assert parts["kept between steps (buckets of DDP, units of FSDP)"] == whole
    assert parts["weights"] == whole


def test_sharded_ranks_gather_weights_twice_and_scatter_gradients() -> None:
    whole = weight_bytes(MODELS["MLP"][0]._target_())
    cfg = configuration("MLP", sharded("Linear"), samples("MLP", 2))
    rank, _ = look(cfg, 2)
    messages = rank.watch.messages
    assert set(messages) == {"allgather", "reducescatter"}
    assert messages["reducescatter"]["bytes"] == whole / 2
    assert messages["reducescatter"]["count"] == 17
    # The first one in the backward pass is still there from the forward pass.
    assert whole / 2 < messages["allgather"]["bytes"] <= whole


def test_a_model_of_more_than_this_machine_has_is_estimated() -> None:
    cfg = configuration("MLP")
    cfg.model.width = 2**15
    cfg.model.depth = 3
    cfg.dataloader.train.dataset = L(torch.utils.data.TensorDataset)(
        L(torch.zeros)(64, 2**15), L(torch.zeros)(64, dtype=torch.int64)
    )
    cfg.dataloader.train.total_batch_size = 64
    rank, parts = look(cfg)
    assert parts["weights"] == 4 * (3 * (2**30 + 2**15) + 10 * 2**15 + 10)
    assert rank.watch.peak > 40 * 2**30


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        return loss if loss.item() < 10 else loss * 2


class Selecting(Reading):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        values = self.layer(batch[0])
        return values[values > 0].mean()


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Reading, "return loss if loss.item() < 10 else loss * 2"),
        (Selecting, "return values[values > 0].mean()"),
    ],
)
def test_code_that_depends_on_values_is_named_by_its_line(
    model: Callable[..., nn.Module], line: str
) -> None:
    cfg = configuration("MLP")
    cfg.model = L(model)()
    error = tool.DataDependentError
    with pytest.raises(
        error, match=rf"{__file__}, line \d+, needs .*\n    {re.escape(line)}"
    ):
        look(cfg)
    assert not dist.is_initialized()


def test_values_that_the_trainer_reads_are_no_obstacle() -> None:
    scaled = configuration("MLP", "train.amp.enabled=True")  # float16, with a scaler
    scaled.hooks = [L(hooks.SkipNonFinite)()]
    rank, parts = look(scaled)
    assert rank.watch.peak == sum(parts.values())


def test_a_model_with_several_optimizers_is_estimated() -> None:
    cfg = LazyConfig.load(TOOLS.parent / "configs/digits_gan.py")
    cfg.train.device = "cpu"
    rank, parts = look(cfg, 2)
    weights = weight_bytes(rank.trainer.model)
    assert parts["weights"] == weights
    assert 2 * weights < parts["optimizer"] < 2.1 * weights
    assert rank.watch.messages["allreduce"]["count"] == 3  # two passes into one of them


def test_a_copy_that_the_background_writes_is_whole_or_a_shard() -> None:
    whole = weight_bytes(MODELS["MLP"][0]._target_())
    changes = (sharded("Linear"), samples("MLP", 8))
    for is_sharded, share in ((False, 1.0), (True, 1 / 8)):
        cfg = configuration("MLP", *changes, f"train.checkpointer.sharded={is_sharded}")
        with tool.pretended(8, "cpu") as (fakes, watch):
            rank = tool.Rank(cfg, fakes, watch)
            rank.parts_at_peak()
            # The weights, and twice as much of the optimizer.
            assert rank.saved() == pytest.approx(3 * whole * share, rel=0.02)


def test_after_an_estimate_torch_is_as_it_was() -> None:
    before = (
        torch.UntypedStorage.resize_,
        Tensor.__deepcopy__,
        torch.utils.swap_tensors,
    )
    look(configuration("MLP", samples("MLP", 2)), 2)
    assert before == (
        torch.UntypedStorage.resize_,
        Tensor.__deepcopy__,
        torch.utils.swap_tensors,
    )
    assert not dist.is_initialized()
    assert type(Block(4).norms["own"].weight) is nn.Parameter
