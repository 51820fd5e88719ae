"""The scripts that tools/crash_campaign.py disturbs: the core's own, and those of compat's users.

Each trains a small network on the digits. Called again, it resumes from its folder.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import train_net
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from hooktrain.checkpoint import Checkpointer
from hooktrain.compat import detectron2, mmengine
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.demos import (
    CLASS_NAMES,
    ClassificationEvaluator,
    DigitsCNN,
    DigitsDataset,
    RandomShift,
)
from hooktrain.engine import default_writers, hooks
from hooktrain.evaluation import inference_on_dataset
from hooktrain.utils import comm
from hooktrain.utils.env import seed_on_host, seed_step
from hooktrain.utils.logger import setup_logger
from hooktrain.utils.tensors import broadcast_tensors

CONFIG = str(Path(__file__).parent.parent / "configs" / "digits_cnn.py")
ITERATIONS = 70
BATCH_SIZE = 12  # which 1, 2, 3, 4 and 6 ranks can divide
SAVE_PERIOD = 7
EVAL_PERIOD = 30
# The second evaluation requests the stop, one iteration before a checkpoint is due.
EVAL_PERIOD_OF_EARLY_STOP = 24
# Samples: the run has more than three epochs, and all readers get equally many.
STREAM_LENGTH = 264
SEED = 5
WATCHDOG_SECONDS = 15  # a step of four ranks has taken 5 on a busy machine
HYBRID = {"replicate": 2}  # the mesh of four ranks


@dataclass(frozen=True)
class Variant:
    """How a run is set up.

    Attributes:
        script: a name in ``SCRIPTS``.
        ranks: the number of processes.
        workers: the number of workers of the data loader.
        sharded: save folders of shards.
        background: save in the background.
        streams: read the data as a stream, which torchdata resumes.
        stops_early: end when an evaluation shows no improvement.
        fsdp: shard the model among the ranks, if there are several, in the core's script. The
            scripts of MMEngine do so if they save folders of shards.
        mixed: compute in bfloat16, and accumulate gradients.
        store: the address of a store, or "".
        port: the port of the server of an ``s3://`` store.
        ranks_change: each machine has a different number of ranks.
    """

    script: str
    ranks: int
    workers: int
    sharded: bool
    background: bool
    streams: bool = False
    stops_early: bool = False
    fsdp: bool = False
    mixed: bool = False
    store: str = ""
    port: int = 0
    ranks_change: bool = False

    @property
    def is_hybrid(self) -> bool:
        """Whether each half of the ranks has all shards of the model (HSDP)."""
        return self.sharded and self.ranks == 4 and not self.ranks_change


def train_loader(variant: Variant) -> Any:
    """Batches of the digits, shifted at random."""
    return build_train_loader(
        DigitsDataset(train=True, transform=RandomShift()),
        total_batch_size=BATCH_SIZE,
        num_workers=variant.workers,
        seed=SEED,
    )


class DigitsStream(IterableDataset[Any]):
    """Some of the digits, shuffled for each epoch, and divided among ranks and workers."""

    def __init__(self) -> None:
        self._digits = DigitsDataset(train=True, transform=RandomShift())
        self._epoch = 0
        self._place = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """This reader's share of the samples."""
        worker = get_worker_info()
        reader, readers = comm.data_parallel_rank(), comm.data_parallel_size()
        if worker is not None:
            reader = reader * worker.num_workers + worker.id
            readers *= worker.num_workers
        generator = torch.Generator().manual_seed(self._epoch)
        order = torch.randperm(STREAM_LENGTH, generator=generator).tolist()
        for index in order[reader::readers][self._place :]:
            self._place += 1
            # All ranks resume with the main process's worker seed, so it must not be used.
            if worker is not None:
                seed_on_host(index, "digits", self._epoch)
            yield self._digits[index]
        self._place = 0

    def state_dict(self) -> dict[str, int]:
        """How many samples this reader has read of the epoch."""
        return {"place": self._place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue there."""
        self._place = state_dict["place"]


def stream_loader(num_workers: int) -> Any:
    """Batches of the stream."""
    share = BATCH_SIZE // comm.data_parallel_size()
    return StatefulDataLoader(DigitsStream(), share, num_workers=num_workers)


def test_loader() -> Any:
    """The digits to evaluate on."""
    return build_test_loader(DigitsDataset(train=False), batch_size=180)


# The core.


def core(folder: str, variant: Variant) -> None:
    """tools/train_net.py, with the configuration of the digits."""
    options = {
        "train.output_dir": folder,
        "train.max_iter": ITERATIONS,
        "train.checkpointer.period": SAVE_PERIOD,
        "train.checkpointer.max_to_keep": 3,
        "train.checkpointer.sharded": variant.sharded,
        "train.checkpointer.background": variant.background,
        "train.eval_period": EVAL_PERIOD,
        "train.log_period": 10,
        "train.ema.enabled": True,
        "dataloader.train.num_workers": variant.workers,
        "optimizer.lr": 0.02,  # at more, some variants learn nothing
        "model.channels": 4,
        "model.dropout": 0.5,
    }
    if variant.mixed:
        options["train.amp.enabled"] = True
        options["train.amp.dtype"] = "bfloat16"
        options["train.accumulative_counts"] = 2
    if variant.store:
        options["train.store"] = variant.store
    if variant.ranks > 1 and (variant.fsdp or variant.is_hybrid):
        options["train.strategy"] = {
            "_target_": "hooktrain.strategy.FSDPStrategy",
            "mesh": HYBRID if variant.is_hybrid else None,
        }
    if variant.streams:
        name = f"{stream_loader.__module__}.{stream_loader.__qualname__}"
        options["dataloader.train"] = {"_target_": name, "num_workers": variant.workers}
    else:
        options["dataloader.train.total_batch_size"] = BATCH_SIZE
    added: list[dict[str, Any]] = [
        {"_target_": "hooktrain.engine.hooks.Watchdog", "timeout_s": WATCHDOG_SECONDS}
    ]
    if variant.stops_early:
        stopping = {
            "_target_": "hooktrain.engine.hooks.EarlyStopping",
            "metric": "classification/accuracy",
            "mode": "max",
            "patience": 1,
            "min_delta": 100.0,  # percent: none is an improvement
        }
        added.append(stopping)
        options["train.eval_period"] = EVAL_PERIOD_OF_EARLY_STOP
    options["+hooks"] = added
    overrides = [f"{key}={value}" for key, value in options.items()]
    arguments = ["--resume", "--config-file", CONFIG, *overrides]
    train_net.main(train_net.argument_parser().parse_args(arguments))


# detectron2.


class Tree(dict[str, Any]):
    """The part of yacs's CfgNode that DefaultTrainer needs."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]

    def clone(self) -> "Tree":
        """A copy, with copies of the trees in it."""
        copied = Tree(self)
        for key, value in self.items():
            if isinstance(value, Tree):
                copied[key] = value.clone()
        return copied

    def defrost(self) -> None:
        """Do nothing: it can always be changed."""

    def dump(self) -> str:
        """The text that is saved beside the run."""
        return repr(self)


def tree(folder: str, variant: Variant) -> Tree:
    """A configuration in detectron2's form."""
    solver = Tree(
        MAX_ITER=ITERATIONS,
        IMS_PER_BATCH=BATCH_SIZE,
        CHECKPOINT_PERIOD=SAVE_PERIOD,
        REFERENCE_WORLD_SIZE=0,
        AMP=Tree(ENABLED=False),
        BASE_LR=0.05,
        MOMENTUM=0.9,
        NESTEROV=False,
        WEIGHT_DECAY=1e-3,
        WEIGHT_DECAY_NORM=0.0,
        WEIGHT_DECAY_BIAS=None,
        BIAS_LR_FACTOR=2.0,
        CLIP_GRADIENTS=Tree(
            ENABLED=True, CLIP_TYPE="norm", CLIP_VALUE=1.0, NORM_TYPE=2.0
        ),
        LR_SCHEDULER_NAME="WarmupMultiStepLR",
        STEPS=(30, 50),
        GAMMA=0.5,
        WARMUP_ITERS=10,
        WARMUP_FACTOR=0.1,
        WARMUP_METHOD="linear",
        RESCALE_INTERVAL=False,
    )
    return Tree(
        OUTPUT_DIR=folder,
        SEED=SEED,
        CUDNN_BENCHMARK=False,
        VARIANT=variant,
        MODEL=Tree(WEIGHTS=""),
        DATALOADER=Tree(NUM_WORKERS=variant.workers),
        DATASETS=Tree(TEST=("digits",)),
        SOLVER=solver,
        TEST=Tree(
            EVAL_PERIOD=EVAL_PERIOD,
            EXPECTED_RESULTS=[],
            PRECISE_BN=Tree(ENABLED=False, NUM_ITER=1),
        ),
    )


class Trainer(detectron2.DefaultTrainer):
    """A subclass like those of projects."""

    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:
        """A small network."""
        return DigitsCNN(channels=4, dropout=0.5)

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Any:
        """The digits to train on."""
        return train_loader(cfg.VARIANT)

    @classmethod
    def build_test_loader(cls, cfg: Any, dataset_name: str) -> Any:
        """The digits to evaluate on."""
        return test_loader()

    @classmethod
    def build_evaluator(cls, cfg: Any, dataset_name: str) -> Any:
        """An evaluator of the accuracy."""
        return ClassificationEvaluator(class_names=CLASS_NAMES)

    @classmethod
    def test(cls, cfg: Any, model: nn.Module, evaluators: Any = None) -> dict[str, Any]:
        """Evaluate with the first rank's batch norm on all ranks, as in a checkpoint."""
        broadcast_tensors(model.buffers())
        return super().test(cfg, model, evaluators)

    def build_hooks(self) -> list[Any]:
        """The default hooks, and a watchdog."""
        variant = self.cfg.VARIANT
        self.checkpointer = detectron2.DetectionCheckpointer(
            self.model,
            self.cfg.OUTPUT_DIR,
            sharded=variant.sharded,
            background=variant.background,
            store=variant.store,
            trainer=weakref.proxy(self),
        )
        return [*super().build_hooks(), hooks.Watchdog(WATCHDOG_SECONDS)]


def default_trainer(folder: str, variant: Variant) -> None:
    """detectron2's tools/train_net.py."""
    args = detectron2.default_argument_parser().parse_args(["--resume"])
    cfg = tree(folder, variant)
    detectron2.default_setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    trainer.train()


# MMEngine.


class DigitsClassifier(mmengine.BaseModel):
    """A small network in MMEngine's form. It uses its own training flag instead of ``mode``."""

    def __init__(self) -> None:
        super().__init__()
        self.network = DigitsCNN(channels=4, dropout=0.5)

    def forward(  # type: ignore[override]
        self, image: Tensor, label: Tensor, mode: str = "tensor"
    ) -> Any:
        """Losses by name in training mode, or logits."""
        return self.network({"image": image, "label": label})


def prepared(folder: str, variant: Variant) -> Any:
    """A strategy with a model, an optimizer and schedulers in MMEngine's style."""
    settings: dict[str, Any] = {
        "work_dir": folder,
        "device": "cpu",
        "env_kwargs": {"randomness": {"seed": SEED, "diff_rank_seed": True}},
    }
    if variant.ranks == 1:
        strategy: Any = mmengine.SingleDeviceStrategy(**settings)
    elif variant.sharded:
        strategy = mmengine.FSDPStrategy(
            state_dict_cfg="local",
            mesh=HYBRID if variant.is_hybrid else None,
            **settings,
        )
    else:
        strategy = mmengine.DDPStrategy(**settings)
    optim_wrapper: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.01},
        "clip_grad": {"max_norm": 1.0},
        "paramwise_cfg": {"norm_decay_mult": 0.0},
    }
    if variant.mixed:
        # An iteration is one batch here, so a save is exact at the end of an accumulation.
        optim_wrapper["accumulative_counts"] = SAVE_PERIOD
        optim_wrapper.update(type="AmpOptimWrapper", dtype="bfloat16")
    strategy.prepare(
        {"type": DigitsClassifier},
        optim_wrapper=optim_wrapper,
        param_scheduler=[
            {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 10},
            {"type": "CosineAnnealingLR", "by_epoch": False, "begin": 10},
        ],
        dispatch_kwargs={"max_iters": ITERATIONS},
    )
    return strategy


class Accuracy(mmengine.BaseMetric):
    """The share of digits that are recognised."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Compare each prediction of a batch."""
        self.results += (data_samples.argmax(1) == data_batch["label"]).tolist()

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """The mean over all samples."""
        return {"accuracy": sum(results) / len(results)}


def step_trainer(folder: str, variant: Variant) -> None:
    """A replacement for a Runner: a strategy's parts in a trainer with hooks."""
    setup_logger(folder, comm.get_rank())
    strategy = prepared(folder, variant)
    trainer = mmengine.StepTrainer(
        strategy.model, train_loader(variant), strategy.optim_wrapper
    )
    checkpointer = Checkpointer(
        strategy.model,
        folder,
        sharded=variant.sharded,
        background=variant.background,
        store=variant.store,
        trainer=trainer,
    )

    def evaluate() -> dict[str, Any]:
        # All ranks evaluate the buffers that a checkpoint holds.
        broadcast_tensors(strategy.model.buffers())
        return inference_on_dataset(strategy.model, test_loader(), Accuracy())

    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            mmengine.LRScheduler(scheduler=strategy.param_schedulers),
            hooks.EvalHook(EVAL_PERIOD, evaluate),
            hooks.PeriodicWriter(default_writers(folder, ITERATIONS), period=20),
            hooks.PeriodicCheckpointer(checkpointer, SAVE_PERIOD, max_to_keep=3),
            hooks.Preemption(checkpointer),
            hooks.Watchdog(WATCHDOG_SECONDS),
        ]
    )
    checkpointer.resume_or_load("")
    trainer.train(max_iter=ITERATIONS)


def own_loop(folder: str, variant: Variant) -> None:
    """A custom loop, in which a strategy resumes and saves."""
    setup_logger(distributed_rank=comm.get_rank())
    strategy = prepared(folder, variant)
    loader = train_loader(variant)
    state = strategy.load_or_resume(resume=True)
    done = 0
    if state is not None:
        done = state["meta"]["iter"]
        loader.load_state_dict(state["data"])
    strategy.model.train()
    batches = iter(loader)
    for iteration in range(done, ITERATIONS):
        seed_step(strategy.seed, iteration, strategy.rank)
        strategy.model.train_step(next(batches), strategy.optim_wrapper)
        for scheduler in strategy.param_schedulers:
            scheduler.step()
        done = iteration + 1
        if done % SAVE_PERIOD == 0:
            strategy.save_checkpoint(
                Path(folder, f"iter_{done}.pth"),
                extra_ckpt={"meta": {"iter": done}, "data": loader.state_dict()},
            )


@dataclass(frozen=True)
class Script:
    """A script to disturb.

    Attributes:
        main: called with the folder and the variant, in each rank.
        has_hooks: whether it has hooks that save on a signal, and end the run if it hangs.
    """

    main: Callable[[str, Variant], None]
    has_hooks: bool = True


SCRIPTS = {
    "core": Script(core),
    "DefaultTrainer": Script(default_trainer),
    "StepTrainer": Script(step_trainer),
    "own loop": Script(own_loop, has_hooks=False),
}
