"""How a loss becomes an update, compared with loops written by hand."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sharding_toys as sharded
from gloo import run_ranks
from hooktrain.events import EventStorage
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from hooktrain.utils.tensors import full_tensors
from toys import LinearLoss, Together, batches, sgd

PRECISIONS = [None, "bfloat16", "float16"]
in_each_precision = pytest.mark.parametrize("dtype", PRECISIONS)


def wrap(model: nn.Module, dtype: str | None = None, **options: Any) -> OptimWrapper:
    if dtype is None:
        return OptimWrapper(sgd(model), **options)
    return AmpOptimWrapper(sgd(model), dtype, **options)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize(
    ("clip", "by_hand"),
    [
        (None, lambda p: None),
        ({"max_norm": 0.01}, lambda p: nn.utils.clip_grad_norm_(p, 0.01)),
        (
            {"max_norm": 0.01, "norm_type": 1},
            lambda p: nn.utils.clip_grad_norm_(p, 0.01, 1),
        ),
        (
            {"type": "value", "clip_value": 0.01},
            lambda p: nn.utils.clip_grad_value_(p, 0.01),
        ),
    ],
)
def test_updates_equal_a_loop_written_by_hand_bit_for_bit(
    clip: Any, by_hand: Any
) -> None:
    ours, reference, before = LinearLoss(), LinearLoss(), copy.copy(clip)
    wrapper, optimizer = wrap(ours, clip_grad=clip), sgd(reference)
    assert clip == before  # it may serve other wrappers too
    with EventStorage() as storage:
        wrapper.step()  # without gradients there is nothing to clip or to log
    assert storage.latest() == {}
    for batch in batches(5):
        with EventStorage() as storage:
            wrapper.update_params(ours(batch))
        reference(batch).backward()
        norm = by_hand(list(reference.parameters()))
        logged = {} if norm is None else {"grad_norm": (norm.item(), 0)}
        assert storage.latest() == logged
        optimizer.step()
        optimizer.zero_grad()
    assert same(ours, reference)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clip_grad": {}}, ValueError, "max_norm"),
        ({"clip_grad": {"max_norm": -1.0}}, ValueError, "max_norm=-1.0"),
        ({"clip_grad": {"type": "both"}}, ValueError, "'both'"),
        ({"clip_grad": {"type": "value", "max_norm": 1}}, ValueError, "clip_value"),
        ({"clip_grad": {"max_norm": 1, "norm": 2}}, TypeError, "'norm'"),
        ({"clip_grad": {"max_nrom": 1}}, TypeError, "'max_nrom'"),
        ({"accumulative_counts": 0}, ValueError, "got 0"),
        ({"accumulative_counts": 2.5}, ValueError, "got 2.5"),
        # It may be meant for the next argument, or be 64 / 16.
        ({"accumulative_counts": 4.0}, TypeError, "'max_norm': 4.0"),
        ({"accumulative_counts": "2"}, ValueError, "got '2'"),
        ({"dtype": "float32"}, ValueError, "'float32'"),
    ],
)
def test_a_wrong_argument_is_refused(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(error) as caught:
        wrap(LinearLoss(), **options)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert message in told + caplog.text  # where Python has no notes, they are logged


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="LinearLoss"):
        OptimWrapper(LinearLoss())  # type: ignore[arg-type]


def test_an_optimizers_own_zero_grad_is_called_also_one_put_in_later() -> None:
    calls: list[str] = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("of the class")

    wrapper = wrap(LinearLoss())
    wrapper.optimizer = Own(LinearLoss().parameters())
    wrapper.zero_grad()
    assert calls == ["of the class"]
    optimizer = torch.optim.SGD(LinearLoss().parameters())
    optimizer.zero_grad = lambda: calls.append("of the object")  # type: ignore[assignment]
    OptimWrapper(optimizer).zero_grad()
    assert calls == ["of the class", "of the object"]


def test_gradients_are_freed_in_all_groups_dense_or_sparse() -> None:
    embedding = nn.Embedding(2, 2, sparse=True)
    frozen, linear = nn.Linear(2, 1).requires_grad_(False), nn.Linear(2, 1)
    groups = [{"params": list(m.parameters())} for m in (embedding, frozen, linear)]
    wrapper = OptimWrapper(torch.optim.SGD(groups, lr=0.1, foreach=True))
    wrapper.backward(linear(embedding(torch.tensor([0]))).sum())
    wrapper.zero_grad()
    assert all(parameter.grad is None for parameter in wrapper.parameters)


def test_gradients_are_set_to_zero_where_the_arguments_say_so() -> None:
    wrapper = wrap(LinearLoss())
    wrapper.backward(wrapper.parameters[0].sum())
    wrapper.zero_grad(set_to_none=False)
    gradient = wrapper.parameters[0].grad
    assert gradient is not None
    assert not gradient.any()


def test_what_a_subclass_overrides_is_called_in_mmengines_order() -> None:
    names = ["optim_context", "should_sync", "scale_loss", "backward"]
    names += ["should_update", "step", "zero_grad"]
    called: list[str] = []

    def noting(name: str) -> Any:
        def method(self: OptimWrapper, *args: Any) -> Any:
            called.append(name)
            return getattr(OptimWrapper, name)(self, *args)

        return method

    overriding = type("Own", (OptimWrapper,), {name: noting(name) for name in names})
    model = LinearLoss()
    wrapper = overriding(sgd(model))
    with wrapper.optim_context(model):
        loss = model(batches(1)[0])
    wrapper.update_params(loss)
    assert called == names


@in_each_precision
def test_keywords_reach_the_optimizer_and_the_backward_pass(dtype: str | None) -> None:
    steps: list[dict[str, Any]] = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
            steps.append(kwargs)

    model = LinearLoss()
    own = Own(model.parameters(), lr=0.1)
    wrapper = OptimWrapper(own) if dtype is None else AmpOptimWrapper(own, dtype)
    loss = model(batches(1)[0])
    wrapper.backward(loss, retain_graph=True)
    wrapper.update_params(loss, {"by": 2}, {"set_to_none": False})
    assert steps == [{"by": 2}]


# Accumulation


def trained_by_hand(sizes: list[int], data: list[Tensor]) -> LinearLoss:
    """Accumulations of these sizes."""
    model = LinearLoss()
    optimizer = sgd(model)
    stream = iter(data)
    for size in sizes:
        optimizer.zero_grad()
        for _ in range(size):
            (model(next(stream)) / size).backward()
        optimizer.step()
    return model


def test_the_last_accumulation_of_a_run_may_be_shorter() -> None:
    data = batches(10)
    model = LinearLoss()
    wrapper = wrap(model, accumulative_counts=4)
    passes = []
    # A longer run begins a whole accumulation after a shorter one.
    for start, end in ((0, 6), (6, 10)):
        wrapper.initialize_count_status(model, start, end)
        for batch in data[start:end]:
            is_last = wrapper.should_sync()
            scaled = wrapper.scale_loss(torch.tensor(12.0)).item()
            wrapper.update_params(model(batch))
            passes.append((is_last, scaled, wrapper.should_update()))
    whole = [(False, 3.0, False)] * 3 + [(True, 3.0, True)]
    short = [(False, 6.0, False), (True, 6.0, True)]
    assert passes == [*whole, *short, *whole]
    assert same(model, trained_by_hand([4, 2, 4], data))


@pytest.mark.parametrize(("count", "passes"), [(2, 2), (3, 4)])
def test_a_resumed_run_begins_a_new_accumulation(
    count: int, passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = LinearLoss()
    old = wrap(model, accumulative_counts=count)
    for batch in batches(passes):
        old.update_params(model(batch))
    new = wrap(model, accumulative_counts=3)
    new.load_state_dict(old.state_dict())
    warned = "Saved inside a gradient accumulation" in caplog.text
    assert warned == (passes % count > 0)
    assert new.inner_count == passes
    updated = []
    for batch in batches(6):
        before = copy.deepcopy(model)
        new.update_params(model(batch))
        updated.append(not same(model, before))
    assert updated == [False, False, True, False, False, True]


def test_a_state_that_is_refused_changes_nothing() -> None:
    wrapper = wrap(LinearLoss())
    before = copy.deepcopy(wrapper.state_dict())
    adam = OptimWrapper(torch.optim.Adam(LinearLoss().parameters()))
    for refuse in (wrapper.check_state_dict, wrapper.load_state_dict):
        with pytest.raises(ValueError, match="Adam"):
            refuse(adam.state_dict())
    assert wrapper.state_dict() == before


# Mixed precision


def test_mixed_precision_on_the_cpu_is_bfloat16_unless_asked_for_otherwise() -> None:
    assert AmpOptimWrapper(sgd(LinearLoss())).dtype is torch.bfloat16
    assert AmpOptimWrapper(sgd(LinearLoss()), torch.float16).dtype is torch.float16


def test_the_first_group_may_be_empty_in_lower_precision_too() -> None:
    model = LinearLoss()
    groups = [{"params": []}, {"params": [*model.parameters()]}]
    wrapper: Any = AmpOptimWrapper(torch.optim.SGD(groups, lr=0.1))
    assert (wrapper.device_type, wrapper.dtype) == ("cpu", torch.bfloat16)
    before = copy.deepcopy(model)
    wrapper.update_params(model(batches(1)[0]))
    assert not same(model, before)


def test_a_skipped_update_leaves_nothing_in_the_momentum_of_fused_sgd() -> None:
    model = LinearLoss()
    wrapper = AmpOptimWrapper(sgd(model, fused=True), "float16")
    wrapper.update_params(model(batches(1)[0]) * torch.inf)
    assert wrapper.skipped_updates == 1
    assert not wrapper.optimizer.state


# torch's scaler reads the flag itself, if the optimizer's kernel does not.
@pytest.mark.parametrize(("fused", "of_torch"), [(True, []), (False, [1] * 4)])
def test_an_accelerator_counts_what_the_scaler_skips_and_nobody_waits_for_it(
    fused: bool, of_torch: list[int], transfers: list[int]
) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if fused:
            return torch.optim.AdamW(model.parameters(), fused=True)
        return sgd(model)

    ours, reference = LinearLoss(), LinearLoss()
    wrapper = AmpOptimWrapper(optimizer_of(ours), "float16")
    optimizer, scaler = optimizer_of(reference), torch.amp.GradScaler("cpu")
    factors = (1.0, torch.inf, torch.inf, 1.0)
    with EventStorage() as storage:
        for storage.iter, factor in enumerate(factors):
            wrapper.update_params(ours(batches(1)[0]) * factor)
    assert transfers == of_torch
    for factor in factors:
        scaler.scale(reference(batches(1)[0]) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert same(ours, reference)
    state = wrapper.state_dict()
    assert state["grad_scaler"] == scaler.state_dict()
    assert type(state["skipped_updates"]) is int
    assert storage.history("skipped_updates").values() == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 3),
    ]
    wrapper.load_state_dict(state)
    wrapper.update_params(ours(batches(1)[0]) * torch.inf)
    assert wrapper.skipped_updates == 3


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_who_looks_before_the_update_sees_true_gradients(dtype: str | None) -> None:
    model, reference = LinearLoss(), LinearLoss()
    wrapper = wrap(model, dtype, clip_grad={"max_norm": 1e-3})
    seen = []

    def look() -> None:
        assert model.fc.weight.grad is not None
        seen.append(model.fc.weight.grad.clone())

    wrapper.after_backward = look
    batch = batches(1)[0]
    wrapper.update_params(model(batch))
    reference(batch).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], reference.fc.weight.grad)


def test_a_scaler_of_ones_own_finds_the_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    model = LinearLoss()
    wrapper = AmpOptimWrapper(sgd(model), "float16", grad_scaler=scaler)
    for factor in (1.0, torch.inf, 1.0, 1.0):
        before = copy.deepcopy(model)
        wrapper.update_params(model(batches(1)[0]) * factor)
        assert same(model, before) == (factor == torch.inf)
    assert scaler.get_scale() == 16.0  # 4 * 2 / 2 * 2 * 2
    assert wrapper.skipped_updates == 1


# Several ranks


DATA = sharded.batches(6)
CLIP = {"max_norm": 0.05}


class Exchanges(TorchDispatchMode):
    """Counts how often gradients are brought together."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def _accumulated() -> tuple[list[int], dict[str, Any]]:
    """Of two passes each: how often each pass exchanges gradients, and the weights."""
    model = sharded.make_sharded()
    wrapper = sharded.make_wrapper(model, accumulative_counts=2, clip_grad=CLIP)
    exchanges = []
    for batch in DATA:
        with Exchanges() as seen:
            sharded.train(model, wrapper, [batch])
        exchanges.append(seen.count)
    return exchanges, sharded.full_state_dict(model)


def clipped(
    model: nn.Module, clip_grad: dict[str, Any]
) -> tuple[Any, list[Tensor | None]]:
    """What is logged as the norm, and the gradients that the update sees."""
    wrapper = OptimWrapper(sgd(model, lr=0.0), clip_grad=clip_grad)
    with EventStorage(0) as storage:
        model(sharded.own_part(DATA[0]))["loss_lm"].backward()
        wrapper.step()
        logged = storage.latest().get("grad_norm")
    return logged, full_tensors([parameter.grad for parameter in model.parameters()])


NORMS: list[dict[str, Any]] = [
    {"max_norm": 0.05},
    {"max_norm": 0.05, "norm_type": 1},
    {"max_norm": 0.05, "norm_type": float("inf")},
    {"type": "value", "clip_value": 0.001},
]


def _several() -> list[int]:
    """How often the passes of one loss for two optimizers exchange gradients."""
    model = sharded.make_sharded()
    parameters = [*model.parameters()]
    parts = [torch.optim.SGD(parameters[first::2], lr=0.1) for first in (0, 1)]
    together = OptimWrapper(Together(*parts), accumulative_counts=2)
    exchanges = []
    for batch in DATA[:4]:
        with Exchanges() as seen:
            sharded.train(model, together, [batch])
        exchanges.append(seen.count)
    return exchanges


def _overflow() -> dict[str, Any]:
    """A step with an infinite gradient on the last rank alone, and one without."""
    model = sharded.make_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = AmpOptimWrapper(
        optimizer, "float16", grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0)
    )
    before = sharded.full_state_dict(model)
    skipped = []
    for poison in (True, False):
        with wrapper.optim_context(model):
            loss = model(sharded.own_part(DATA[0]))["loss_lm"]
        wrapper.backward(wrapper.scale_loss(loss))
        gradient: Any = next(model.parameters()).grad
        if poison and dist.get_rank() == dist.get_world_size() - 1:
            gradient.to_local()[0, 0] = float("inf")
        wrapper.step()
        skipped.append(wrapper.skipped_updates)
        wrapper.zero_grad()
    after = sharded.full_state_dict(model)
    return {
        "skipped": skipped,
        "scale": wrapper.grad_scaler.get_scale(),
        "changed": [not torch.equal(before[name], after[name]) for name in before],
    }


def _on_two_ranks() -> dict[str, Any]:
    return {
        "accumulated": _accumulated(),
        "clipped": [clipped(sharded.make_sharded(), config) for config in NORMS],
        "several": _several(),
        "overflow": _overflow(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def test_each_pass_of_an_accumulation_leaves_a_rank_with_shards_of_gradients(
    two: list[dict[str, Any]],
) -> None:
    model = sharded.make_model()
    wrapper = sharded.make_wrapper(model, accumulative_counts=2, clip_grad=CLIP)
    sharded.train(model, wrapper, DATA)
    for result in two:
        assert result["accumulated"][0] == [3] * 6  # 3 units, exchanged in each pass
    # The main process has the full tensors.
    expected = dict(model.state_dict())
    torch.testing.assert_close(two[0]["accumulated"][1], expected, atol=1e-5, rtol=0)


def test_so_do_passes_of_one_loss_for_several_optimizers(
    two: list[dict[str, Any]],
) -> None:
    assert [result["several"] for result in two] == [[3] * 4] * 2


def test_clipping_sees_the_norm_of_the_whole_gradient(
    two: list[dict[str, Any]],
) -> None:
    for index, config in enumerate(NORMS):
        norm, gradients = clipped(sharded.make_model(), config)
        first, second = (result["clipped"][index] for result in two)
        assert (norm is None) == (config.get("type") == "value")
        expected = None if norm is None else pytest.approx(norm, rel=1e-5)
        assert first[0] == second[0] == expected
        torch.testing.assert_close(first[1], gradients, atol=1e-7, rtol=1e-5)


def test_an_overflow_on_one_rank_skips_the_update_on_all(
    two: list[dict[str, Any]],
) -> None:
    expected = {"skipped": [1, 1], "scale": 2.0}
    for result in two:
        assert result["overflow"].items() >= expected.items()
    assert all(two[0]["overflow"]["changed"])


class SAM(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, SAM])
@pytest.mark.parametrize("wrap", [OptimWrapper, AmpOptimWrapper])
def test_an_optimizer_that_needs_a_closure_says_what_to_write(
    kind: Any, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.Linear(1, 1)
    wrapper = wrap(kind(layer.parameters(), lr=0.1))
    with pytest.raises((TypeError, AssertionError)) as error:
        wrapper.update_params(layer(torch.ones(1, 1)).sum())
    notes = getattr(error.value, "__notes__", caplog.messages)
    assert "run_step" in "".join(notes)
