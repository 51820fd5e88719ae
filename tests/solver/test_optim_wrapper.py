"""How a loss becomes an update, compared with loops written by hand."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from wrapper_toys import batches, linear, loss_of, same, sgd

import sharding_toys as sharded
from gloo import run_ranks
from hooktrain.model.sharding import full_state_dict
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from hooktrain.utils.events import EventStorage
from hooktrain.utils.tensors import full_tensors


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
    ours, reference, before = linear(), linear(), copy.copy(clip)
    wrapper, optimizer = OptimWrapper(sgd(ours), clip_grad=clip), sgd(reference)
    assert clip == before  # it may serve other wrappers too
    with EventStorage() as storage:
        assert wrapper.step()  # without gradients there is nothing to clip or to log
    assert storage.latest() == {}
    for batch in batches(5):
        with EventStorage() as storage:
            assert wrapper.update_params(ours(batch).square().mean())
        reference(batch).square().mean().backward()
        norm = by_hand(list(reference.parameters()))
        assert storage.latest() == (
            {} if norm is None else {"grad_norm": (norm.item(), 0)}
        )
        optimizer.step()
        optimizer.zero_grad()
    assert same(ours, reference)


def test_wrong_arguments_are_refused() -> None:
    clippings: list[Any] = [{}, {"max_norm": -1.0}, {"max_norm": 1.0, "norm": 2}]
    clippings += [{"type": kind, "max_norm": 1.0} for kind in ("both", "value")]
    for clip in clippings:
        message = f"clip_grad must be like .* not {re.escape(str(clip))}"
        with pytest.raises(ValueError, match=message):
            OptimWrapper(sgd(linear()), clip_grad=clip)
    with pytest.raises(TypeError, match="optimizer must be"):
        OptimWrapper(linear())  # type: ignore[arg-type]
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"accumulative_counts must be .*{bad}"):
            OptimWrapper(sgd(linear()), accumulative_counts=bad)


def test_an_optimizer_put_in_later_has_its_own_zero_grad_called() -> None:
    calls: list[str] = []
    own = type(
        "Own", (torch.optim.SGD,), {"zero_grad": lambda self: calls.append("zero_grad")}
    )
    wrapper = OptimWrapper(sgd(linear()))
    wrapper.optimizer = own(linear().parameters())
    wrapper.zero_grad()
    assert calls == ["zero_grad"]


def overriding(called: list[str], names: list[str]) -> type[OptimWrapper]:
    """A subclass as written for MMEngine, whose methods note that they were called."""

    def noting(name: str) -> Any:
        def method(self: OptimWrapper, *args: Any) -> Any:
            called.append(name)
            return getattr(OptimWrapper, name)(self, *args)

        return method

    return type("Overriding", (OptimWrapper,), {name: noting(name) for name in names})


def test_what_a_subclass_overrides_is_called_in_mmengines_order() -> None:
    names = ["optim_context", "should_sync", "scale_loss", "backward"]
    names += ["should_update", "step", "zero_grad"]
    model, called = linear(), []  # type: ignore[var-annotated]
    wrapper = overriding(called, names)(sgd(model))
    with wrapper.optim_context(model):
        loss = loss_of(model, batches(1)[0])
    wrapper.update_params(loss)
    assert called == names


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_keywords_reach_the_optimizer_and_the_backward_pass(dtype: str | None) -> None:
    steps: list[dict[str, Any]] = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
            steps.append(kwargs)

    model = linear()
    own = Own(model.parameters(), lr=0.1)
    wrapper = OptimWrapper(own) if dtype is None else AmpOptimWrapper(own, dtype)
    loss = loss_of(model, batches(1)[0])
    wrapper.backward(loss, retain_graph=True)
    wrapper.update_params(loss, {"by": 2}, {"set_to_none": False})
    assert steps == [{"by": 2}]
    assert wrapper.defaults["lr"] == 0.1


def grouped(**options: Any) -> OptimWrapper:
    model = linear()
    groups = [{"params": [model.weight], "lr": 0.3}, {"params": [model.bias]}]
    return OptimWrapper(torch.optim.SGD(groups, lr=0.1, momentum=0.9), **options)


def test_several_groups_have_base_settings_that_schedulers_drive_too() -> None:
    single = OptimWrapper(sgd(linear()))
    assert (single.base_param_settings, single.get_lr()) == (None, {"lr": [0.1]})
    assert single.param_groups is single.optimizer.param_groups
    wrapper = grouped()
    assert list(wrapper.get_lr().items()) == [("base_lr", [0.1]), ("lr", [0.3, 0.1])]
    for group in wrapper.param_groups:
        group["lr"] *= 0.5
    assert wrapper.get_lr() == {"base_lr": [0.05], "lr": [0.15, 0.05]}
    assert len(wrapper.optimizer.param_groups) == 2
    other = grouped()
    other.load_state_dict(wrapper.state_dict())
    assert other.get_lr() == wrapper.get_lr()


def test_the_momentum_is_that_of_sgd_or_the_first_beta_or_none() -> None:
    parameters = list(linear().parameters())
    assert grouped().get_momentum() == {"momentum": [0.9, 0.9]}
    adam = OptimWrapper(torch.optim.Adam(parameters, betas=(0.8, 0.99)))
    assert adam.get_momentum() == {"momentum": [0.8]}
    assert OptimWrapper(torch.optim.Adagrad(parameters)).get_momentum() == {
        "momentum": [0.0]
    }


# Accumulation


def test_accumulated_batches_give_the_gradients_of_one_large_batch() -> None:
    ours, reference = linear(), linear()
    wrapper = OptimWrapper(sgd(ours), accumulative_counts=4)
    small = batches(4)
    updated = [wrapper.update_params(ours(b).square().mean()) for b in small[:3]]
    wrapper.backward(wrapper.scale_loss(ours(small[3]).square().mean()))
    reference(torch.cat(small)).square().mean().backward()
    assert updated == [False, False, False]
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)


def reference_run(sizes: list[int], data: list[torch.Tensor]) -> nn.Module:
    """Windows of these sizes, by hand."""
    model = linear()
    optimizer = sgd(model)
    place = 0
    for size in sizes:
        optimizer.zero_grad()
        for batch in data[place : place + size]:
            (loss_of(model, batch) / size).backward()
        optimizer.step()
        place += size
    return model


def test_the_last_window_is_shorter_and_still_a_mean_as_is_known_in_each_pass() -> None:
    data = batches(10)
    model = linear()
    wrapper = OptimWrapper(sgd(model), accumulative_counts=4)
    passes = []
    for start, end in (
        (0, 6),
        (6, 10),
    ):  # a longer run begins a whole window after a shorter one
        wrapper.initialize_count_status(model, start, end)
        for batch in data[start:end]:
            known = (
                wrapper.should_sync(),
                wrapper.scale_loss(torch.tensor(12.0)).item(),
            )
            passes.append((*known, wrapper.update_params(loss_of(model, batch))))
    whole, short = (
        [(False, 3.0, False)] * 3 + [(True, 3.0, True)],
        [(False, 6.0, False), (True, 6.0, True)],
    )
    assert passes == [*whole, *short, *whole]
    assert same(model, reference_run([4, 2, 4], data))


def test_batch_norm_under_accumulation_is_worth_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(3))
    OptimWrapper(sgd(model)).initialize_count_status(model, 0, 3)
    assert caplog.text == ""
    OptimWrapper(sgd(model), accumulative_counts=2).initialize_count_status(model, 0, 3)
    assert "Batch norm takes its statistics from one batch" in caplog.text


@pytest.mark.parametrize(("count", "passes"), [(2, 2), (3, 4)])
def test_a_resumed_run_begins_a_new_window_and_one_that_was_open_is_worth_a_warning(
    count: int, passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = linear()
    old = OptimWrapper(sgd(model), accumulative_counts=count)
    for batch in batches(passes):
        old.update_params(loss_of(model, batch))
    new = OptimWrapper(sgd(model), accumulative_counts=3)
    new.load_state_dict(old.state_dict())
    warned = "inside a window of accumulation, without its gradients" in caplog.text
    assert warned == (passes % count > 0)
    assert new.inner_count == passes
    updated = [new.update_params(loss_of(model, batch)) for batch in batches(6)]
    assert updated == [False, False, True, False, False, True]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_a_run_resumed_after_a_window_continues_bit_for_bit(dtype: str | None) -> None:
    options: Any = {"accumulative_counts": 3, "clip_grad": {"max_norm": 0.1}}
    models = [linear(), linear()]
    whole, resumed = (
        AmpOptimWrapper(sgd(m), dtype, **options)
        if dtype
        else OptimWrapper(sgd(m), **options)
        for m in models
    )

    def step(model: nn.Module, wrapper: OptimWrapper, batch: Tensor) -> None:
        with wrapper.optim_context(model):
            loss = model(batch).float().square().mean()
        wrapper.update_params(loss)

    for i, batch in enumerate(batches(9)):
        step(models[0], whole, batch)
        if i == 2:
            models[1].load_state_dict(models[0].state_dict())
            resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
        if i > 2:
            step(models[1], resumed, batch)
    assert same(*models)


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
    """Windows of two passes: how often each pass exchanges gradients, and the weights."""
    model = sharded.make_sharded()
    wrapper = sharded.make_wrapper(model, accumulative_counts=2, clip_grad=CLIP)
    exchanges = []
    for batch in DATA:
        with Exchanges() as seen:
            sharded.train(model, wrapper, [batch])
        exchanges.append(seen.count)
    return exchanges, full_state_dict(model)


def clipped(
    model: nn.Module, clip_grad: dict[str, Any]
) -> tuple[Any, list[Tensor | None]]:
    """What is logged as the norm, and the gradients that the update sees."""
    wrapper = OptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.0), clip_grad=clip_grad
    )
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


def _overflow() -> dict[str, Any]:
    """A step with an infinite gradient on the last rank alone, and one without."""
    model = sharded.make_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = AmpOptimWrapper(optimizer, "float16", loss_scale={"init_scale": 4.0})
    before = full_state_dict(model)
    updated = []
    for poison in (True, False):
        with wrapper.optim_context(model):
            loss = model(sharded.own_part(DATA[0]))["loss_lm"]
        wrapper.backward(wrapper.scale_loss(loss))
        gradient: Any = next(model.parameters()).grad
        if poison and dist.get_rank() == dist.get_world_size() - 1:
            gradient.to_local()[0, 0] = float("inf")
        updated.append(wrapper.step())
        wrapper.zero_grad()
    after = full_state_dict(model)
    return {
        "updated": updated,
        "skipped": wrapper.skipped_updates,
        "scale": wrapper.grad_scaler.get_scale(),
        "changed": [not torch.equal(before[name], after[name]) for name in before],
    }


def _on_two_ranks() -> dict[str, Any]:
    return {
        "accumulated": _accumulated(),
        "clipped": [clipped(sharded.make_sharded(), config) for config in NORMS],
        "overflow": _overflow(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def test_shards_are_exchanged_at_the_end_of_a_window_and_updated_as_in_one_process(
    two: list[dict[str, Any]],
) -> None:
    model = sharded.make_model()
    sharded.train(
        model, sharded.make_wrapper(model, accumulative_counts=2, clip_grad=CLIP), DATA
    )
    assert [result["accumulated"][0] for result in two] == [[0, 3] * 3] * 2  # 3 units
    # The main process has the full tensors.
    expected = dict(model.state_dict())
    torch.testing.assert_close(two[0]["accumulated"][1], expected, atol=1e-5, rtol=0)


def test_clipping_sees_the_norm_of_the_whole_gradient(
    two: list[dict[str, Any]],
) -> None:
    for index, config in enumerate(NORMS):
        norm, gradients = clipped(sharded.make_model(), config)
        (norm_0, gradients_0), (norm_1, _) = (
            result["clipped"][index] for result in two
        )
        assert (norm is None) == (config.get("type") == "value")
        assert (
            norm_0
            == norm_1
            == (norm if norm is None else pytest.approx(norm, rel=1e-5))
        )
        torch.testing.assert_close(gradients_0, gradients, atol=1e-7, rtol=1e-5)


def test_an_overflow_on_one_rank_skips_the_update_on_all(
    two: list[dict[str, Any]],
) -> None:
    expected = {"updated": [False, True], "skipped": 1, "scale": 2.0}
    for result in two:
        assert result["overflow"].items() >= expected.items()
    assert all(two[0]["overflow"]["changed"])
