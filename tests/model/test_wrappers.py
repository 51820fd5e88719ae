import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_toys import PairPreprocessor, ToyModel, batch, sgd
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gloo import run_ranks
from hooktrain.model import (
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    is_model_wrapper,
)
from hooktrain.utils.registry import MODEL_WRAPPERS, Registry

State = dict[str, Tensor]


def toy(seed: int, pairs: bool = False) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel(PairPreprocessor() if pairs else None)


def close(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=1e-6) for k in a)


def halves(seed: int, pairs: bool) -> Any:
    """This rank's half of a batch of 8."""
    mine = [t.chunk(2)[dist.get_rank()] for t in batch(8, seed)]
    return dict(zip("xy", mine, strict=True)) if pairs else mine


def train(pairs: bool = False) -> State:
    model = StepDistributedDataParallel(toy(dist.get_rank(), pairs))
    wrapper = sgd(model)
    for seed in range(3):
        model.train_step(halves(seed, pairs), wrapper)
    return {**model.module.state_dict()}


def train_with_pairs() -> State:
    return train(pairs=True)


@pytest.mark.parametrize("pairs", [False, True])
def test_two_ranks_learn_what_one_learns_from_the_whole_batch(pairs: bool, ranks: Any) -> None:
    model = toy(0, pairs)
    wrapper = sgd(model)
    for seed in range(3):
        whole = batch(8, seed)
        model.train_step(dict(zip("xy", whole, strict=True)) if pairs else whole, wrapper)
    first, second = (rank["train_with_pairs" if pairs else "train"] for rank in ranks)
    assert close(first, model.state_dict())
    assert all(torch.equal(first[name], second[name]) for name in first)


def counted(calls: list[None], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    calls.append(None)
    return allreduce_hook(dist.group.WORLD, bucket)


def accumulate() -> tuple[list[int], State]:
    model = StepDistributedDataParallel(toy(0))
    calls: list[None] = []
    model.register_comm_hook(calls, counted)
    wrapper = sgd(model, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    made = []
    for seed in range(5):
        model.train_step(halves(seed, False), wrapper)
        made.append(len(calls))
    return made, {**model.module.state_dict()}


def test_ranks_communicate_in_the_last_backward_pass_of_a_window_only(ranks: Any) -> None:
    model = toy(0)
    wrapper = sgd(model, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    for seed in range(5):
        model.train_step(batch(8, seed), wrapper)
    for made, state in (rank["accumulate"] for rank in ranks):
        assert made == [0, 0, 1, 1, 2]
        assert close(state, model.state_dict())


class Partly(ToyModel):
    """Its forward leaves out some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.left_out = nn.Linear(1, 1)


def unused() -> tuple[str, list[str], list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    model = StepDistributedDataParallel(Partly(), detect_anomalous_params=True)
    wrapper = sgd(model)
    model.train_step(batch(2), wrapper)
    try:
        model.train_step(batch(2), wrapper)
        message = ""
    except RuntimeError as error:
        message = str(error)
    found = StepDistributedDataParallel(Partly(), find_unused_parameters=True)
    wrapper = sgd(found)
    losses = [list(found.train_step(batch(2), wrapper)) for _ in range(2)]
    return message, records, losses[1]


def test_unused_parameters_are_named_when_ddp_fails_and_when_asked_for(ranks: Any) -> None:
    message, records, losses = ranks[1]["unused"]
    assert "on the parameters ['left_out.weight', 'left_out.bias']" in message
    assert "find_unused_parameters=True" in message
    shapes = {"left_out.weight": "[1, 1]", "left_out.bias": "[1]"}
    logged = [
        f"{name} with shape torch.Size({shape}) is not in the computational graph"
        for name, shape in shapes.items()
    ]
    assert records == logged
    assert losses == ["loss", "loss1", "loss2"]


class OwnStep(ToyModel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return super().train_step(data, optim_wrapper)


class Aware(StepDistributedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {"loss": torch.zeros(())}


def wrap_a_model_with_its_own_step() -> tuple[str, list[str]]:
    model = StepDistributedDataParallel(OwnStep())
    try:
        model.train_step(batch(2), sgd(model))
        message = ""
    except TypeError as error:
        message = str(error)
    return message, list(Aware(OwnStep()).train_step(batch(2), None))


def test_a_models_own_train_step_is_not_passed_over(ranks: Any) -> None:
    message, values = ranks[0]["wrap_a_model_with_its_own_step"]
    assert "OwnStep has a train_step of its own" in message
    assert "SeparateDistributedDataParallel" in message
    assert values == ["loss"]


def fail_otherwise() -> str:
    model = StepDistributedDataParallel(toy(0))
    try:
        model(torch.ones(1, 5), torch.ones(1, 1), mode="loss")
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_errors_of_the_forward_pass_come_as_they_are(ranks: Any) -> None:
    assert ranks[0]["fail_otherwise"].startswith("mat1 and mat2 shapes")


def predict_on_one_rank() -> tuple[bool, list[str]]:
    model = StepDistributedDataParallel(toy(0))
    same = True
    if dist.get_rank() == 1:
        img, label = batch(3)
        for step in (model.val_step, model.test_step):
            same = same and torch.equal(torch.stack(step([img, label])), model.module.linear(img))
    return same, list(model.state_dict())


def test_prediction_is_the_models_own_and_needs_no_other_rank(ranks: Any) -> None:
    for same, names in (rank["predict_on_one_rank"] for rank in ranks):
        assert same
        assert names == ["module.linear.weight", "module.linear.bias"]


def buffers_of_the_ranks() -> list[list[float]]:
    seen = []
    for broadcast in (False, True):
        model = toy(0)
        model.register_buffer("mean", torch.full((1,), float(dist.get_rank())))
        wrapped = StepDistributedDataParallel(model, broadcast_buffers=broadcast)
        values = [model.mean.item()]
        model.mean.fill_(dist.get_rank() + 1)
        wrapped(*batch(2), mode="loss")
        seen.append([*values, model.mean.item()])
    return seen


def test_buffers_are_the_first_ranks_at_the_start_and_later_where_that_is_asked_for(
    ranks: Any,
) -> None:
    assert ranks[0]["buffers_of_the_ranks"] == [[0, 1], [0, 1]]
    assert ranks[1]["buffers_of_the_ranks"] == [[0, 2], [0, 1]]


def everything() -> dict[str, Any]:
    warnings.simplefilter("error")
    functions = (
        train,
        train_with_pairs,
        accumulate,
        unused,
        wrap_a_model_with_its_own_step,
        fail_otherwise,
        predict_on_one_rank,
        buffers_of_the_ranks,
    )
    return {function.__name__: function() for function in functions}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What two ranks returned: it takes seconds to start them, so it is done once."""
    return run_ranks(everything, 2)


def test_wrappers_are_registered_by_both_names() -> None:
    for name, wrapper in {
        "DistributedDataParallel": DistributedDataParallel,
        "DataParallel": DataParallel,
        "StepDistributedDataParallel": StepDistributedDataParallel,
        "MMDistributedDataParallel": StepDistributedDataParallel,
        "SeparateDistributedDataParallel": SeparateDistributedDataParallel,
        "MMSeparateDistributedDataParallel": SeparateDistributedDataParallel,
    }.items():
        assert MODEL_WRAPPERS.get(name) is wrapper


class Mine(nn.Module):
    """To be registered as a wrapper."""


def test_a_wrapper_is_told_from_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_model_wrapper(DataParallel(nn.Linear(1, 1)))
    assert not is_model_wrapper(nn.Linear(1, 1))
    assert not is_model_wrapper(Mine())
    registry = Registry("model wrappers")
    registry.register(lambda model: model, name="a function")
    registry.register(Mine)
    monkeypatch.setattr("hooktrain.model.wrappers.MODEL_WRAPPERS", registry)
    assert is_model_wrapper(Mine())
