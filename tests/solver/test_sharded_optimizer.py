"""The optimizer wrapper around a model that is sharded."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from gloo import run_ranks
from hooktrain.model.sharding import full_state_dict
from hooktrain.solver import AmpOptimWrapper, OptimWrapper
from hooktrain.utils.dtensor import full_tensors
from hooktrain.utils.events import EventStorage
from sharding_toys import batches, make_model, make_sharded, make_wrapper, own_part, train

DATA = batches(6)
CLIP = {"max_norm": 0.05}


class Exchanges(TorchDispatchMode):
    """Counts how often gradients are brought together."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def _accumulated() -> dict[str, Any]:
    """Windows of two passes, and how often gradients are exchanged in each pass."""
    model = make_sharded()
    wrapper = make_wrapper(model, accumulative_counts=2, clip_grad=CLIP)
    exchanges = []
    for batch in DATA:
        with Exchanges() as seen:
            train(model, wrapper, [batch])
        exchanges.append(seen.count)
    ddp = DistributedDataParallel(make_model())
    train(ddp, make_wrapper(ddp, accumulative_counts=2, clip_grad=CLIP), DATA)
    return {
        "exchanges": exchanges,
        "state": full_state_dict(model),
        "ddp": {name: value.clone() for name, value in ddp.module.state_dict().items()},
    }


def _restored_after_an_error() -> int:
    model = make_sharded()
    wrapper = make_wrapper(model, accumulative_counts=2)
    with pytest.raises(ZeroDivisionError), wrapper.optim_context(model):
        raise ZeroDivisionError
    with Exchanges() as seen:
        model(own_part(DATA[0]))["loss_lm"].backward()
    return seen.count


def clipped(model: nn.Module, clip_grad: dict[str, Any]) -> tuple[Any, list[Tensor | None]]:
    """What is logged as the norm, and the gradients that the update sees."""
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0), clip_grad=clip_grad)
    with EventStorage(0) as storage:
        model(own_part(DATA[0]))["loss_lm"].backward()
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
    model = make_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = AmpOptimWrapper(optimizer, "float16", loss_scale={"init_scale": 4.0})
    before = full_state_dict(model)
    updated = []
    for poison in (True, False):
        with wrapper.optim_context(model):
            loss = model(own_part(DATA[0]))["loss_lm"]
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


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _inside_a_window() -> dict[str, Any]:
    model = make_sharded()
    wrapper = make_wrapper(model, accumulative_counts=2)
    train(model, wrapper, DATA[:3])
    wrapper.prepare_state()
    state = wrapper.state_dict()
    exchanged = make_wrapper(model, accumulative_counts=2)
    exchanged.backward(model(own_part(DATA[0]))["loss_lm"])  # without the context
    gradients = exchanged.state_dict()["gradients"]
    whole = full_tensors(gradients)
    resumed = make_wrapper(model, accumulative_counts=2)
    records = Records()
    logging.getLogger("hooktrain.solver.optim_wrapper").addHandler(records)
    resumed.load_state_dict(state)
    again = make_wrapper(model, accumulative_counts=2)
    again.load_state_dict({**exchanged.state_dict(), "gradients": dist_list(whole)})
    return {
        "kept back": state["gradients"],
        "warnings": records.texts,
        "new window": resumed.should_update(),
        "still open": not again.should_update(),
        "loaded": [
            torch.equal(p.grad.to_local(), g.to_local())  # type: ignore[union-attr, attr-defined]
            for p, g in zip(model.parameters(), gradients, strict=True)
        ],
    }


def dist_list(values: list[Any]) -> list[Any]:
    """The main process's list on every rank."""
    shared = [values]
    dist.broadcast_object_list(shared)
    return shared[0]


def _on_two_ranks() -> dict[str, Any]:
    return {
        "accumulated": _accumulated(),
        "restored": _restored_after_an_error(),
        "clipped": [clipped(make_sharded(), config) for config in NORMS],
        "overflow": _overflow(),
        "window": _inside_a_window(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def test_gradients_are_exchanged_in_the_last_pass_of_a_window_only(
    two: list[dict[str, Any]],
) -> None:
    for result in two:
        assert result["accumulated"]["exchanges"] == [0, 3, 0, 3, 0, 3]  # one for each unit
        assert result["restored"] == 3


def test_accumulated_updates_are_those_of_ddp_and_of_one_process(two: list[dict[str, Any]]) -> None:
    model = make_model()
    train(model, make_wrapper(model, accumulative_counts=2, clip_grad=CLIP), DATA)
    result = two[0]["accumulated"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(result["state"][name], value, atol=1e-5, rtol=0)
        torch.testing.assert_close(result["state"][name], result["ddp"][name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", range(len(NORMS)))
def test_clipping_sees_the_norm_of_the_whole_gradient(
    two: list[dict[str, Any]], index: int
) -> None:
    norm, gradients = clipped(make_model(), NORMS[index])
    sharded_norm, sharded_gradients = two[0]["clipped"][index]
    assert (norm is None) == (NORMS[index].get("type") == "value")
    assert sharded_norm == (norm if norm is None else pytest.approx(norm, rel=1e-5))
    assert two[1]["clipped"][index][0] == sharded_norm
    assert len(gradients) == len(sharded_gradients)
    for one, other in zip(sharded_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)


def test_an_overflow_on_one_rank_skips_the_update_on_all(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["overflow"]["updated"] == [False, True]
        assert result["overflow"]["skipped"] == 1
        assert result["overflow"]["scale"] == 2.0
    assert all(two[0]["overflow"]["changed"])


def test_a_window_whose_gradients_are_kept_back_begins_anew_after_a_resume(
    two: list[dict[str, Any]],
) -> None:
    for result in two:
        window = result["window"]
        assert window["kept back"] == []
        assert window["new window"]
        assert window["warnings"] == [
            "The gradients of an open window do not fit: a new window begins"
        ]


def test_exchanged_gradients_of_an_open_window_are_saved_and_come_back(
    two: list[dict[str, Any]],
) -> None:
    for result in two:
        assert result["window"]["still open"]
        assert len(result["window"]["loaded"]) == len(list(make_model().parameters()))
        assert all(result["window"]["loaded"])
