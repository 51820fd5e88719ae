"""The strategy that shards a model, in real processes."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from equality import assert_equal
from gloo import run_ranks
from hooktrain.config import LazyCall
from hooktrain.demos.text import Block, TextGPT
from hooktrain.strategy import (
    BaseStrategy,
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)
from hooktrain.utils.tensors import full_tensors
from sharding_toys import VOCABULARY, batches, make_model, train

DATA = batches(2) * 3
ADAMW = {"optimizer": {"type": "AdamW", "lr": 0.01}, "clip_grad": {"max_norm": 0.5}}
SCHEDULER = {"type": "LinearLR", "start_factor": 0.5, "end": 6, "by_epoch": False}
CONFIG = LazyCall(TextGPT)(vocab_size=VOCABULARY, block_size=8, size=(2, 16, 2))


def make(kind: type[BaseStrategy], work_dir: str, **options: Any) -> BaseStrategy:
    if kind is FSDPStrategy:
        options = {"wrap": {Block}, **options}
    return kind(work_dir=work_dir, env_kwargs={"seed": 3}, device="cpu", **options)


def prepared(kind: type[BaseStrategy], work_dir: str, **options: Any) -> BaseStrategy:
    strategy = make(kind, work_dir, **options)
    known = {"max_iters": 6}
    strategy.prepare(
        CONFIG, optim_wrapper=ADAMW, param_scheduler=SCHEDULER, dispatch_kwargs=known
    )
    return strategy


def run(strategy: BaseStrategy, steps: slice) -> list[float]:
    losses = []
    for batch in DATA[steps]:
        losses += train(strategy.model, strategy.optim_wrapper, [batch])  # type: ignore[arg-type]
        for scheduler in strategy.param_schedulers:
            scheduler.step()
    return losses


def states(strategy: BaseStrategy) -> Any:
    model = full_tensors(dict(strategy.model_state_dict()))
    optimizer = full_tensors(strategy.optim_state_dict())["state"]
    return copy.deepcopy({"model": model, "optimizer": optimizer})


def saved_run(kind: type[BaseStrategy], path: str, **options: Any) -> dict[str, Any]:
    """Three steps, a checkpoint, and three more."""
    strategy = prepared(kind, os.path.dirname(path), **options)
    losses = run(strategy, slice(3))
    strategy.save_checkpoint(path, extra_ckpt={"meta": {"iter": 3}})
    kept = states(strategy)
    return {"states": kept, "losses": losses + run(strategy, slice(3, 6))}


def resumed_run(
    kind: type[BaseStrategy], work_dir: str, resume: str | bool, **options: Any
) -> dict[str, Any]:
    strategy = prepared(kind, work_dir, **options)
    rest = strategy.load_or_resume(resume=resume)
    assert rest is not None
    kept = states(strategy)
    return {
        "iter": rest["meta"]["iter"],
        "states": kept,
        "losses": run(strategy, slice(3, 6)),
    }


def _losses(folder: str, **options: Any) -> list[float]:
    strategy = make(FSDPStrategy, folder, activation_checkpointing=True)
    model, wrapper = strategy.prepare(make_model(), optim_wrapper=ADAMW, **options)
    return train(model, wrapper, DATA)


def _compiled_blocks(folder: str) -> tuple[list[float], int]:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile = {"backend": backend, "blocks": ["Block"]}
    return _losses(folder, compile=compile), len(graphs)


def _built_before(folder: str) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="build it from the prepared model"):
        make(FSDPStrategy, folder).prepare(model, optim_wrapper=optimizer)


def _deferred(folder: str) -> Any:
    strategy = make(FSDPStrategy, folder, deferred_init=True)
    assert isinstance(strategy.prepare(CONFIG), FSDPModule)
    return strategy.model_state_dict()["head.weight"]


def _on_two_ranks(folder: str) -> dict[str, Any]:
    sharded = {"state_dict_cfg": "sharded"}
    return {
        "ddp": saved_run(DDPStrategy, f"{folder}/ddp/iter_3.pth")["losses"],
        "full": saved_run(FSDPStrategy, f"{folder}/full/iter_3.pth"),
        "shards": saved_run(FSDPStrategy, f"{folder}/shards/iter_3", **sharded),
        "from one": resumed_run(FSDPStrategy, folder, f"{folder}/one/iter_3.pth"),
        "from shards": resumed_run(FSDPStrategy, f"{folder}/shards", True, **sharded),
        "ddp from shards": resumed_run(DDPStrategy, f"{folder}/shards", True),
        "plain": _losses(folder),
        "compiled": _losses(folder, compile={"backend": "eager"}),
        "blocks": _compiled_blocks(folder),
        "built before": _built_before(folder),
        "deferred": _deferred(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return saved_run(SingleDeviceStrategy, f"{folder}/one/iter_3.pth")


@pytest.fixture(scope="module")
def two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2, str(folder))


def test_losses_are_those_of_the_other_strategies(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    assert one["losses"][-1] < one["losses"][1] - 0.05
    assert two[0]["ddp"] == pytest.approx(one["losses"], abs=1e-5)
    assert two[0]["full"]["losses"] == pytest.approx(two[0]["ddp"], abs=1e-5)
    assert two[0]["shards"]["losses"] == two[0]["full"]["losses"]


def test_what_one_strategy_saves_resumes_in_any_other(
    folder: Path, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    full, shards = two[0]["full"], two[0]["shards"]
    for resumed, saved in (
        (two[0]["from one"], one),
        (resumed_run(SingleDeviceStrategy, f"{folder}/full", True), full),
        (resumed_run(SingleDeviceStrategy, f"{folder}/shards", True), shards),
        (two[0]["ddp from shards"], shards),
        (two[0]["from shards"], shards),
    ):
        assert resumed["iter"] == 3
        assert_equal(resumed["states"], saved["states"])
        assert resumed["losses"] == pytest.approx(saved["losses"][3:], abs=1e-5)
    assert two[0]["from shards"]["losses"] == shards["losses"][3:]  # bit for bit


def test_the_states_are_whole_on_the_main_process_only(
    two: list[dict[str, Any]],
) -> None:
    assert list(two[0]["full"]["states"]["model"]) == list(make_model().state_dict())
    assert set(two[1]["full"]["states"]["model"].values()) == {None}


def test_a_compiled_model_learns_the_same(two: list[dict[str, Any]]) -> None:
    assert two[0]["compiled"] == pytest.approx(two[0]["plain"], abs=1e-5)
    losses, graphs = two[0]["blocks"]
    assert losses == pytest.approx(two[0]["plain"], abs=1e-5)
    assert graphs > 0


def test_a_deferred_model_is_sharded_before_it_has_weights(
    two: list[dict[str, Any]],
) -> None:
    weight = two[0]["deferred"]
    assert weight.std().item() == pytest.approx(0.02, rel=0.3)


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="must be 'full' or 'sharded', got 'shraded'"):
        FSDPStrategy(state_dict_cfg="shraded")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtype'"):
        FSDPStrategy(mp_policy={"dtype": "bfloat16"})
    with pytest.raises(RuntimeError, match="start them by torchrun"):
        FSDPStrategy(device="cpu", env_kwargs={"seed": 0}).prepare(make_model())
