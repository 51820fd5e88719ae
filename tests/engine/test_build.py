"""One configuration on one process and on several: build_trainer with each strategy."""

import gc
import logging
import shutil
import weakref
from collections.abc import Iterator
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import Subset

from gloo import run_ranks
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.config import LazyCall, LazyConfig
from hooktrain.demos import DigitsDataset
from hooktrain.engine import SimpleTrainer, build_trainer, train_settings
from hooktrain.engine.build import prepare_model
from hooktrain.engine.hooks import IterationTimer, Watchdog
from hooktrain.strategy import DDPStrategy
from hooktrain.utils.logger import close_logger
from hooktrain.utils.tensors import full_tensor
from runs import build, last_results, train as run
from toys import Together, sgd

CONFIGS = Path(__file__).parent.parent.parent / "configs"
TINY = {
    "text_gpt": [
        "model.size=tiny",
        "model.dropout=0.0",
        "dataloader.train.dataset.block_size=16",
        "dataloader.test.batch_size=3000",
        "train.amp.enabled=false",
        "hooks.0.length=3",
    ],
    "digits_cnn": ["model.channels=2", "model.dropout=0.0", "train.best_metric=null"],
}
SHORT = [
    "dataloader.train.total_batch_size=8",
    "train.max_iter=6",
    "train.eval_period=0",
]
FSDP = (
    "train.strategy={'_target_': 'hooktrain.strategy.FSDPStrategy', 'wrap': ['Block']}"
)


def first_samples(dataset: Any) -> Subset[Any]:
    return Subset(dataset, range(400))


def train(folder: str, name: str, *overrides: str) -> dict[str, Any]:
    """Train by a configuration, going on with what the folder has."""
    cfg = LazyConfig.load(str(CONFIGS / f"{name}.py"))
    options = [
        *TINY[name],
        *SHORT,
        f"train.output_dir={folder}",
        "train.device=cpu",
        *overrides,
    ]
    cfg = LazyConfig.apply_overrides(cfg, options)
    test = cfg.dataloader.test
    test.dataset = LazyCall(first_samples)(dataset=test.dataset)
    trainer = build(cfg, resume=True)
    trainer.train(max_iter=cfg.train.max_iter)
    close_logger()
    state = {
        k: full_tensor(v).clone()
        for k, v in trainer.checkpointer.model.state_dict().items()
    }
    return {
        "model": state,
        "losses": {i: v for v, i in trainer.storage.history("total_loss").values()},
        "results": last_results(trainer),
        "wrapper": type(trainer.model).__name__,
    }


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_logger()


def test_hooks_of_a_configuration_have_the_places_of_their_phases(
    tmp_path: Path,
) -> None:
    cfg = LazyConfig.load(str(CONFIGS / "digits_cnn.py"))
    options = [*TINY["digits_cnn"], f"train.output_dir={tmp_path}", "train.device=cpu"]
    cfg = LazyConfig.apply_overrides(cfg, options)
    cfg.hooks = [LazyCall(Watchdog)(600), LazyCall(IterationTimer)(5)]
    kinds = [type(hook) for hook in build(cfg).hooks]
    assert kinds[:2] == [IterationTimer, IterationTimer]
    assert kinds.index(Watchdog) == len(kinds) - 1


def train_each(runs: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Several runs in the same processes, which take seconds to start."""
    return {name: train(*arguments) for name, arguments in runs.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Complete runs of the transformer; each has saved after half of it, too."""
    folder = tmp_path_factory.mktemp("runs")
    half = ("text_gpt", "train.checkpointer.period=3")
    folders = ("train.checkpointer.sharded=true", "train.checkpointer.background=true")
    on_two_ranks = {
        "ddp": (f"{folder}/ddp", *half),
        "fsdp": (f"{folder}/fsdp", *half, FSDP),
        "shards": (f"{folder}/shards", *half, FSDP, *folders),
    }
    made = {"one": train(f"{folder}/one", *half)}
    made |= run_ranks(train_each, 2, on_two_ranks)[0]
    made["folder"] = {"path": folder}
    return made


# What goes on, by what has saved it, the number of ranks, and the options.
GO_ON: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "ddp, one": ("ddp", 1, ()),
    "fsdp, one": ("fsdp", 1, ()),
    "shards, one": ("shards", 1, ()),
    "fsdp, ddp on four": ("fsdp", 4, ()),
    "ddp, fsdp on four": ("ddp", 4, (FSDP,)),
    "shards, fsdp on four": ("shards", 4, (FSDP,)),
}


@pytest.fixture(scope="module")
def resumed(
    runs: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    to_do: dict[int, dict[str, tuple[str, ...]]] = {1: {}, 4: {}}
    for name, (saved_by, world_size, options) in GO_ON.items():
        folder = tmp_path_factory.mktemp("resumed")
        saved = runs["folder"]["path"] / saved_by / "model_0000002"
        if saved_by == "shards":
            shutil.copytree(saved, folder / saved.name)
        else:
            shutil.copy(saved.with_suffix(".pth"), folder)
        to_do[world_size][name] = (str(folder), "text_gpt", *options)
    return train_each(to_do[1]) | run_ranks(train_each, 4, to_do[4])[0]


WRAPPERS = {"ddp": "NamingDistributedDataParallel", "fsdp": "FSDPTextGPT"}


@pytest.mark.parametrize("strategy", WRAPPERS)
def test_the_losses_of_each_strategy_are_those_of_one_process(
    strategy: str, runs: Any
) -> None:
    ours, theirs = runs[strategy], runs["one"]
    assert ours["wrapper"] == WRAPPERS[strategy]
    assert len(theirs["losses"]) == 6
    assert_close(ours["losses"], theirs["losses"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", WRAPPERS)
def test_each_strategy_evaluates_model_and_average_alike(
    strategy: str, runs: Any
) -> None:
    ours, theirs = runs[strategy]["results"], runs["one"]["results"]
    assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert ours["text"] != ours["ema"]["text"]


@pytest.mark.parametrize("name", GO_ON)
def test_a_run_of_two_ranks_goes_on_with_one_or_four(
    name: str, runs: Any, resumed: Any
) -> None:
    whole = runs[GO_ON[name][0]]
    assert_close(resumed[name]["losses"], whole["losses"], rtol=0, atol=1e-5)
    assert_close(resumed[name]["model"], whole["model"], rtol=0, atol=1e-5)


def test_what_the_configuration_says_reaches_a_strategy_however_it_is_given(
    tmp_path: Path,
) -> None:
    cfg = LazyConfig.load(CONFIGS / "digits_cnn.py")
    cfg.train.update(output_dir=str(tmp_path), seed=7, sync_bn=True)
    for given in ("DDPStrategy", LazyCall(DDPStrategy)()):
        cfg.train.strategy = given
        made = prepare_model(cfg)[0]
        assert isinstance(made, DDPStrategy)
        assert (made.seed, made.sync_bn) == (7, True)
    cfg.train.strategy = made
    with pytest.raises(TypeError, match="DDPStrategy object"):
        prepare_model(cfg)[0]


def digits(folder: Path, *overrides: str) -> Any:
    """The configuration of one iteration."""
    cfg = LazyConfig.load(str(CONFIGS / "digits_cnn.py"))
    output = f"train.output_dir={folder}"
    options = [*TINY["digits_cnn"], *SHORT, "train.max_iter=1", output]
    return LazyConfig.apply_overrides(cfg, [*options, *overrides])


def muon_and_adamw(model: nn.Module, muon: Any, adamw: Any) -> Together:
    """A function of the model that makes several optimizers for one loss."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, **muon)
    return Together(muon, torch.optim.AdamW(others, **adamw))


def test_a_configuration_gives_one_loss_to_several_optimizers(tmp_path: Path) -> None:
    cfg = digits(tmp_path, "train.max_iter=6", "train.device=cpu")
    cfg.optimizer = LazyCall(muon_and_adamw)(muon={"lr": 0.02}, adamw={"lr": 1e-3})
    LazyConfig.save(cfg, tmp_path / "config.json")
    trainer = build(LazyConfig.load(str(tmp_path / "config.json")))
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.train(max_iter=6)
    for name, parameter in trainer.model.named_parameters():
        assert not before[name].equal(parameter), name
    groups = trainer.optimizer.param_groups
    assert {parameter.ndim for parameter in groups[0]["params"]} == {2}
    # The schedule has moved the rates of both.
    assert groups[0]["lr"] < 0.02
    assert groups[1]["lr"] < 1e-3


def test_a_loss_of_ones_own_is_that_of_a_subclass(tmp_path: Path) -> None:
    class Trainer(SimpleTrainer):
        def compute_loss(self, data: Any) -> Any:
            losses = super().compute_loss(data)
            return {"loss_twice": 2 * losses["loss_cls"], **losses}

    trainer = build_trainer(digits(tmp_path), Trainer)
    trainer.train(max_iter=1)
    latest = {name: value for name, (value, _) in trainer.storage.latest().items()}
    assert latest["loss_twice"] == 2 * latest["loss_cls"]
    assert latest["total_loss"] == pytest.approx(3 * latest["loss_cls"])


def test_several_test_loaders_give_results_by_name(tmp_path: Path) -> None:
    cfg = digits(tmp_path, "train.ema.enabled=true")
    test = cfg.dataloader.test
    other = {**test, "dataset": LazyCall(DigitsDataset)(train=True)}
    cfg.dataloader.test = {"val": test, "ood": other}
    cfg.train.best_metric = "ema/ood/classification/accuracy"
    trainer = run(cfg)
    results = last_results(trainer)
    assert list(results) == ["val", "ood", "ema"]
    latest = trainer.storage.latest()
    for name in ("val", "ood"):
        accuracy, _ = latest[f"{name}/classification/accuracy"]
        assert accuracy == results[name]["classification"]["accuracy"]
    best, _ = latest["ema/ood/classification/accuracy"]
    assert read_checkpoint(tmp_path / "model_best.pth")["best"]["best_metric"] == best


def test_the_common_configuration_has_each_key_with_its_default() -> None:
    common = LazyConfig.load(CONFIGS / "common" / "train.py").train
    assert common == train_settings()


@pytest.mark.parametrize(
    ("key", "nearest"), [("train.epochs", "max_epochs"), ("train.amp.dtyp", "dtype")]
)
def test_an_unknown_key_is_refused_with_the_nearest(
    key: str, nearest: str, tmp_path: Path
) -> None:
    cfg = LazyConfig.apply_overrides(digits(tmp_path), [f"+{key}=1"])
    with pytest.raises(ValueError, match=f"'{nearest}'"):
        build_trainer(cfg)


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ("train.amp.dtype=bfloat16", True),
        ("train.amp={'enabled': True, 'dtype': 'bfloat16'}", False),
        ("train.amp.enabled=false", False),
    ],
)
def test_a_dtype_without_amp_is_told(
    change: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = LazyConfig.apply_overrides(digits(tmp_path), [change])
    with caplog.at_level(logging.INFO, "hooktrain"):
        build_trainer(cfg)
    assert ("dtype has no effect without train.amp.enabled" in caplog.text) is is_told


def test_an_optimizer_that_is_built_already_is_refused(tmp_path: Path) -> None:
    built = sgd(nn.Linear(1, 1))
    for optimizer in (built, {"head": built}):
        cfg = digits(tmp_path)
        cfg.optimizer = optimizer
        with pytest.raises(TypeError, match=r"cfg\.optimizer.*SGD"):
            build_trainer(cfg)


def test_a_trainer_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    trainer = build_trainer(digits(tmp_path))
    model = weakref.ref(trainer.model)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert model() is None
    finally:
        gc.enable()


def test_a_rate_may_follow_the_batch(tmp_path: Path) -> None:
    cfg = digits(tmp_path, "dataloader.train.total_batch_size=8")
    size = "${dataloader.train.total_batch_size}"
    cfg.optimizer.lr = LazyCall(mul)(0.1 / 256, size)
    assert build_trainer(cfg).optimizer.defaults["lr"] == 0.1 / 32
