"""Steps that are computed twice, and replicas that are compared, with bits flipped on purpose."""

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from equality import assert_equal
from gloo import run_ranks
from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer, StepTrainer
from hooktrain.engine.hooks import CallbackHook, ReplayCheck
from hooktrain.events import get_event_storage
from hooktrain.model.sharding import shard_model
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from hooktrain.utils import comm
from hooktrain.utils.tensors import local_tensor, map_leaves
from toys import Idle, Together, Two, batches, sgd


class Noisy(nn.Module):
    """Has buffers, dropout, draws of all generators, and changes its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x += random.random() + np.random.rand()
        y = nn.functional.dropout(self.bn(self.fc(x)), 0.3)
        return {"loss_a": self.last(y).square().mean(), "loss_b": y.abs().mean()}


class Draws(list[Tensor]):
    """Samples that draw from the global generator of the process."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + torch.rand(4)


def plain(model: nn.Module) -> Any:
    return OptimWrapper(sgd(model, lr=0.01))


def accumulating(model: nn.Module) -> Any:
    clip = {"max_norm": 1.0}
    return OptimWrapper(sgd(model), accumulative_counts=3, clip_grad=clip)


def in_bf16(model: nn.Module) -> Any:
    return AmpOptimWrapper(sgd(model), "bfloat16", accumulative_counts=2)


def in_fp16(model: nn.Module) -> Any:
    # The first scales overflow.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    return AmpOptimWrapper(sgd(model), "float16", grad_scaler=scaler)


def two_optimizers(model: Any) -> Any:
    last = torch.optim.Adam(model.last.parameters())
    rest = [*model.fc.parameters(), *model.bn.parameters()]
    return OptimWrapper(Together(torch.optim.SGD(rest, 0.1), last))


def end_of(
    wrapper: Callable[[Any], Any], in_process: bool, *hooks: Any, wrap: Any = None
) -> Any:
    """This rank's state after 8 iterations, and what the generators have drawn."""
    model: Any = Noisy()
    if wrap is not None:
        model = wrap(model)
    data: Any = list(batches(1, 40)[0])
    if in_process:
        loader: Any = DataLoader(Draws(data), batch_size=4, shuffle=True)
    else:
        loader = build_train_loader(data, total_batch_size=4, num_workers=0, seed=2)
    trainer = SimpleTrainer(model, loader, wrapper(model))
    trainer.seed = 3
    drawn = []

    def draw(trainer: Any) -> None:
        drawn.append([random.random(), np.random.rand(), torch.rand(2).tolist()])

    draws = CallbackHook(before_step=draw, after_backward=draw, after_step=draw)
    trainer.register_hooks([*hooks, draws])
    trainer.train(max_iter=8)
    state = trainer.state_dict()
    del state["meta"]
    state["storage"]["metrics"].pop("data_time", None)
    # Their bits, since where float16 overflows they are NaN.
    gradients = [local_tensor(p.grad).view(torch.int32) for p in model.parameters()]
    found = (dict(model.state_dict()), state, drawn, gradients)

    def local(_: Any, leaf: Any) -> Any:
        return local_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(local, found)


@pytest.mark.parametrize(
    ("wrapper", "in_process"),
    [
        (plain, True),
        (plain, False),
        (accumulating, False),
        (in_bf16, False),
        (in_fp16, True),
        (two_optimizers, True),
    ],
)
def test_a_checked_run_has_the_bits_of_one_that_is_not_checked(
    wrapper: Callable[[Any], Any], in_process: bool
) -> None:
    once = end_of(wrapper, in_process)
    assert_equal(end_of(wrapper, in_process, ReplayCheck(1)), once)
    assert_equal(end_of(wrapper, in_process, ReplayCheck(3)), once)


class WithViews(nn.Module):
    """Has a buffer and a parameter that are single numbers of larger tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(2, 3)[1:2, 1])
        self.scale = nn.Parameter(torch.ones(2, 3)[1:2, 1])

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).square().mean()


def test_single_numbers_of_larger_tensors_are_compared() -> None:
    model = WithViews()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.register_hooks([ReplayCheck(1)])
    trainer.train(max_iter=2)
    assert trainer.done == 2


def flip(tensor: Tensor) -> None:
    """Flip one bit of the second number: the highest of its fraction."""
    tensor.detach().view(-1).view(torch.int32)[1] ^= 1 << 22


class Flipping(SimpleTrainer):
    """Flips a bit of something on one rank, in the first computation of iteration 4."""

    what = ""
    rank = 0
    is_done = False

    def is_now(self, what: str) -> bool:
        if self.is_done or (self.iter, self.what) != (4, what):
            return False
        self.is_done = True
        return comm.get_rank() == self.rank

    def compute_loss(self, data: Any) -> Any:
        if self.is_now("batch"):
            flip(data)
        return super().compute_loss(data)

    def compute_gradients(self, batches: Any) -> Any:
        result = super().compute_gradients(batches)
        model: Any = self.model
        model = getattr(model, "module", model)
        if self.is_now("weight"):
            flip(local_tensor(model.last.weight))
        if self.is_now("gradient"):
            flip(local_tensor(model.fc.weight.grad))
        if self.is_now("buffer"):
            flip(model.bn.running_mean)
        if self.is_now("loss"):
            result["loss_b"] = result["loss_b"] + 1
        return result


def failure_of(
    what: str,
    rank: int,
    *hooks: Any,
    wrapper: Callable[[Any], Any] = plain,
    wrap: Any = None,
    kind: Any = None,
    **options: Any,
) -> tuple[str, int, bool]:
    """The error, the updates before it, and whether the weights are as these have left them."""
    model: Any = Noisy()
    own = model
    if wrap is not None:
        model = wrap(model)
    loader = batches(40, 6)[comm.get_rank() :: comm.get_world_size()]
    trainer = (kind or Flipping)(model, loader, wrapper(model), **options)
    trainer.what, trainer.rank = what, rank
    trainer.seed = 3
    updates: list[Tensor] = []
    note = CallbackHook(after_step=lambda _: updates.append(own.fc.weight.clone()))
    trainer.register_hooks([*hooks, note])
    try:
        trainer.train(max_iter=20)
    except RuntimeError as error:
        return str(error), len(updates), torch.equal(updates[-1], own.fc.weight)
    return "", len(updates), True


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("gradient", "fc.weight.grad is"),
        ("batch", "total_loss is"),
        ("weight", "the sum of the bytes of its weights"),
        ("buffer", "bn.running_mean is"),
        ("loss", "loss_b is"),
    ],
)
def test_a_bit_that_flips_ends_the_run_before_the_update(what: str, named: str) -> None:
    text, updates, unchanged = failure_of(what, 0, ReplayCheck(2))
    assert text.startswith("iteration 4 makes no update")
    assert f"rank 0: {named}" in text
    assert updates == 4
    assert unchanged
    assert failure_of(what, 0, ReplayCheck(3)) == ("", 20, True)  # between two checks


FLIPS: list[tuple[str, Callable[[Any], Any]]] = [
    ("gradient", accumulating),
    ("batch", plain),
    ("weight", in_bf16),
    ("buffer", in_fp16),
]


def on_two_ranks() -> list[Any]:
    """Everything that needs ranks, in one start of the processes."""
    found = []
    for wrap in (DistributedDataParallel, shard_model):
        for wrapper in (plain, accumulating, in_bf16, in_fp16):
            once = end_of(wrapper, False, wrap=wrap)
            assert_equal(end_of(wrapper, False, ReplayCheck(1), wrap=wrap), once)
        for rank in (0, 1):
            for what, wrapper in FLIPS:
                told = failure_of(
                    what, rank, ReplayCheck(2), wrapper=wrapper, wrap=wrap
                )
                found.append((wrap.__name__, rank, what, *told))
    return found


def test_each_of_two_ranks_is_named_by_both_and_good_ones_keep_their_bits() -> None:
    first, second = run_ranks(on_two_ranks, 2)
    assert first == second
    for wrap, rank, what, text, updates, unchanged in first:
        assert (updates, unchanged) == (4, True)
        own, other = {
            "gradient": ("fc.weight.grad", ""),
            "buffer": ("bn.running_mean", ""),
            # The others see it in the gradient that is averaged.
            "batch": ("total_loss", "fc.weight.grad"),
            "weight": ("the sum of the bytes of its weights", "fc.weight.grad"),
        }[what]
        if (wrap, what) == ("shard_model", "weight"):  # they compute with this shard
            other = "(total_loss|loss_a)"
        assert f"rank {rank}: {own}" in text
        if other:
            assert re.search(f"rank {1 - rank}: {other} is", text)
        else:
            assert f"rank {1 - rank}" not in text


class Overwriting(SimpleTrainer):
    """Its losses are overwritten by the next ones, as CUDA graphs do that."""

    before: Any = ()

    def compute_gradients(self, batches: Any) -> Any:
        for loss in self.before:
            loss.detach().fill_(float("nan"))
        result = super().compute_gradients(batches)
        self.before = list(result.values())
        return result


def test_losses_may_take_the_place_of_those_of_the_first_computation() -> None:
    losses = []
    for hooks in ([], [ReplayCheck(2)]):
        model = Noisy()
        trainer = Overwriting(model, batches(10, 6), plain(model))
        trainer.seed = 3
        trainer.register_hooks(hooks)
        trainer.train(max_iter=10)
        losses.append(trainer.storage.history("total_loss").values())
    assert losses[0] == losses[1]


class OwnGenerator(Noisy):
    """Draws from a generator that nobody seeds."""

    generator = torch.Generator()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x + torch.rand(4, generator=self.generator))


def test_a_step_that_is_not_deterministic_is_told_as_that_in_the_first_check() -> None:
    model = OwnGenerator()
    trainer = SimpleTrainer(model, batches(4), plain(model))
    trainer.register_hooks([ReplayCheck(5)])
    with pytest.raises(RuntimeError, match="first check"):
        trainer.train(max_iter=20)
    assert trainer.iter == 5


def test_of_many_ranks_whose_steps_differ_the_first_eight_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comm, "on_all_ranks", lambda function: [function()] * 20)
    model = OwnGenerator()
    trainer = SimpleTrainer(model, batches(4), plain(model))
    trainer.register_hooks([ReplayCheck(5)])
    with pytest.raises(RuntimeError) as error:
        trainer.train(max_iter=20)
    assert str(error.value).count("rank 0") == 8


def test_what_cannot_be_computed_twice_is_refused() -> None:
    gan = Two()
    wrappers = OptimWrapperDict(one=plain(gan.one), two=plain(gan.two))
    for trainer in (StepTrainer(gan, batches(2), wrappers), Idle()):
        trainer.register_hooks([ReplayCheck(5)])
        with pytest.raises(TypeError, match="its own step"):
            trainer.train(max_iter=2)


class Drifting(Flipping):
    """Flips a bit of a weight on one rank before iteration 4, which stays."""

    def compute_gradients(self, batches: Any) -> Any:
        if self.is_now("replica"):
            model: Any = self.model
            flip(local_tensor(getattr(model, "module", model).last.weight))
        return super().compute_gradients(batches)


def drift(rank: int, wrap: Any) -> tuple[str, int]:
    told = failure_of("replica", rank, ReplayCheck(3), kind=Drifting, wrap=wrap)
    return told[:2]


def drift_of_each_replica() -> list[tuple[str, int]]:
    return [drift(rank, DistributedDataParallel) for rank in range(3)]


def test_a_rank_whose_weights_are_not_those_of_most_is_named_at_the_next_check() -> (
    None
):
    first, second, third = run_ranks(drift_of_each_replica, 3)
    assert first == second == third
    for rank, (text, updates) in enumerate(first):
        assert f"iteration 6 makes no update: the weights of the ranks [{rank}]" in text
        assert updates == 6


def drift_of_a_shard() -> list[tuple[str, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def wrap(model: Any) -> nn.Module:
        sharded: Any = shard_model(model, mesh=mesh)
        sharded.own = nn.Parameter(torch.full((2,), float(comm.get_rank())))
        return sharded  # type: ignore[no-any-return]

    return [drift(-1, wrap), drift(2, wrap), drift(1, wrap)]


def test_a_shard_that_is_not_that_of_its_replica_is_named() -> None:
    healthy, of_first, of_second = run_ranks(drift_of_a_shard, 4)[0]
    assert healthy == ("", 20)
    # Of two replicas either may be wrong, and one of them is named.
    for (text, updates), rank in ((of_first, 0), (of_second, 1)):
        assert f"the weights of the ranks [{rank}] differ" in text
        assert updates == 6


def weights_of_one_rank() -> list[tuple[str, int]]:
    def wrap(model: Any) -> nn.Module:
        model.own = nn.Linear(2, 2)
        nn.init.constant_(model.own.weight, comm.get_rank())
        own = [f"own.{name}" for name in ("weight", "bias")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        return DistributedDataParallel(model)

    return [drift(-1, wrap), drift(1, wrap)]


def test_weights_that_are_not_exchanged_may_differ_and_others_are_compared() -> None:
    healthy, drifted = run_ranks(weights_of_one_rank, 2)[0]
    assert healthy == ("", 20)
    assert "the weights of the ranks [0] differ" in drifted[0]


class Counting(Noisy):
    """Records a metric of its own."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        losses = super().forward(x)
        get_event_storage().put_scalar("of the model", losses["loss_a"])
        return losses


def test_metrics_of_the_model_are_recorded_once() -> None:
    found = []
    for hooks in ([], [ReplayCheck(2)]):
        model = Counting()
        trainer = SimpleTrainer(model, batches(10, 6), plain(model))
        trainer.seed = 3
        trainer.register_hooks(hooks)
        trainer.train(max_iter=10)
        found.append(trainer.storage.history("of the model").values())
    assert found[0] == found[1]
    assert [i for _, i in found[0]] == list(range(10))


def test_the_first_iteration_of_a_resumed_run_is_not_checked() -> None:
    model = Noisy()
    passes: list[int] = []

    class Counted(SimpleTrainer):
        def compute_gradients(self, batches: Any) -> Any:
            passes.append(self.iter)
            return super().compute_gradients(batches)

    trainer = Counted(model, batches(10, 6), plain(model))
    trainer.register_hooks([ReplayCheck(2)])
    trainer.train(0, 4)
    trainer.train(max_iter=7)
    assert passes == [0, 1, 2, 2, 3, 4, 5, 6, 6]


def test_sparse_gradients_are_compared() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4, sparse=True)

        def forward(self, words: Tensor) -> Tensor:
            return self.embedding(words).square().mean()

    model = Words()
    trainer = SimpleTrainer(model, [torch.tensor([1, 2])], sgd(model, momentum=0.0))
    trainer.register_hooks([ReplayCheck(2)])
    trainer.train(max_iter=4)
    passes = []

    class Bent(SimpleTrainer):
        def compute_gradients(self, batches: Any) -> Any:
            found = super().compute_gradients(batches)
            passes.append(self.iter)
            if len(passes) == 3:
                self.model.embedding.weight.grad.mul_(2)  # type: ignore[union-attr, operator]
            return found

    model = Words()
    trainer = Bent(model, [torch.tensor([1, 2])], sgd(model, momentum=0.0))
    trainer.register_hooks([ReplayCheck(2)])
    with pytest.raises(RuntimeError, match=r"embedding\.weight\.grad"):
        trainer.train(max_iter=4)
