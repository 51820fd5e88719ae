"""What is said to the natural mistakes of a script: an error or a warning, with what to do."""

import copy
import itertools
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError
from hooktrain.config import ConfigDict, LazyCall, apply_overrides, instantiate
from hooktrain.data import build_train_loader
from hooktrain.engine import (
    DefaultTrainer,
    HookBase,
    SimpleTrainer,
    StepTrainer,
    TrainerBase,
    default_hooks,
)
from hooktrain.engine.hooks import (
    EMA,
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
    PreciseBN,
    Watchdog,
)
from hooktrain.evaluation import (
    ClassificationEvaluator,
    DatasetEvaluator,
    inference_on_dataset,
)
from hooktrain.model import BaseModel
from hooktrain.solver import (
    AmpOptimWrapper,
    CosineParamScheduler,
    LRMultiplier,
    OptimWrapper,
    WarmupParamScheduler,
)
from hooktrain.utils.events import JSONWriter, get_event_storage
from hooktrain.utils.logger import close_logger

ROOT = Path(__file__).parent.parent.parent
DATA = [torch.ones(2, 4)] * 4
SAMPLES = TensorDataset(torch.ones(6, 4))
LABELLED = {"x": torch.ones(2, 4), "label": torch.tensor([0, 1])}
WARNING = None  # in place of an error


class Net(nn.Module):
    """Returns in training what `output` makes of its scores."""

    def __init__(self, output: Callable[[Tensor], Any] = Tensor.mean) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.head(self.body(x)))


class Steps(BaseModel):
    """The same with MMEngine's step."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.output = output

    def forward(
        self, inputs: Tensor, data_samples: Any = None, mode: str = "tensor"
    ) -> Any:
        return self.output(self.body(inputs))


@dataclass
class Output(dict):  # type: ignore[type-arg]
    """As Hugging Face's: a mapping and a dataclass."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        self.update(vars(self))


class LayersInAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]


class Forgetful(SimpleTrainer):
    def __init__(self, model: nn.Module, *_: Any) -> None:
        """Does not call super().__init__()."""


class Results(DatasetEvaluator):
    def evaluate(self) -> Any:
        return [99.0]


class Unsaved(HookBase):
    def state_dict(self) -> Any:
        return {"rule": max}


class LateEvent(HookBase):
    def after_steps(self) -> None:
        """Is not called."""


class AnotherFrameworksEvent(HookBase):
    def on_train_start(self) -> None:
        """Is not called."""


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    *hooks: Any,
    model: Any = None,
    data: Any = DATA,
    optimizer: Any = None,
    by: Any = SimpleTrainer,
    max_iter: Any = 4,
) -> Any:
    """Four iterations. Hooks and optimizer may be functions of what they are for."""
    model = Net() if model is None else model
    optimizer = optimizer(model) if callable(optimizer) else optimizer or sgd(model)
    trainer = by(model, data, optimizer)
    made = [hook if isinstance(hook, HookBase) else hook(trainer) for hook in hooks]
    trainer.register_hooks(made)
    trainer.train(max_iter=max_iter)
    return trainer


def schedule(
    make: Callable[[Any], Any], **options: Any
) -> Callable[[Any], LRScheduler]:
    return lambda trainer: LRScheduler(scheduler=make(trainer.optimizer), **options)


def best(
    metric: str, period: int = 1, **options: Any
) -> Callable[[Any], BestCheckpointer]:
    return lambda trainer: BestCheckpointer(
        period, Checkpointer(trainer.model), metric, **options
    )


def evaluate(metrics: Any, period: int | str = 1) -> EvalHook:
    return EvalHook(period, lambda: metrics)


def returning(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: train(model=Net(output))


def stepping(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: train(model=Steps(output), data=[[x] for x in DATA], by=StepTrainer)


def put(name: Any, value: Any) -> Callable[[], Any]:
    return lambda: train(
        CallbackHook(after_step=lambda t: t.storage.put_scalar(name, value))
    )


def save(folder: str = "", period: Any = 2) -> Callable[[Any], PeriodicCheckpointer]:
    return lambda t: PeriodicCheckpointer(
        Checkpointer(t.model, folder, trainer=t), period
    )


def wrap(**options: Any) -> Callable[[], Any]:
    return lambda: train(optimizer=lambda model: OptimWrapper(sgd(model), **options))


def small(batch_size: int = 2, optimizer: Any = torch.optim.SGD) -> SimpleTrainer:
    model = Net()
    loader = build_train_loader(SAMPLES, total_batch_size=batch_size, seed=0)
    return SimpleTrainer(model, loader, optimizer(model.parameters(), lr=0.1))


def resume(trainer: SimpleTrainer, *hooks: HookBase) -> Callable[[], Any]:
    """Let a trainer go on where one with a batch of two, SGD and these hooks was."""
    (before := small()).register_hooks(hooks)
    return lambda: trainer.load_state_dict(before.state_dict())


def judge(
    evaluator: Any, batch: Any = LABELLED, outputs: Any = None
) -> Callable[[], Any]:
    """What an evaluator says of the outputs, two scores each if there are no others."""
    outputs = torch.ones(2, 2) if outputs is None else outputs
    return lambda: inference_on_dataset(lambda _: outputs, [batch], evaluator)


def override(text: str) -> Callable[[], Any]:
    cfg = ConfigDict(
        train={"max_iter": 9, "amp": {"enabled": False}}, model=LazyCall(nn.Linear)()
    )
    return lambda: apply_overrides(cfg, [text])


def another_head(model: Any) -> torch.optim.SGD:
    optimizer = sgd(model)
    model.head = nn.Linear(3, 2)
    return optimizer


COSINE = CosineParamScheduler(1, 0)
of_another = "has the parameters of another model"
step_lr = StepLR(sgd(Net()), 2)
other_rate = LRMultiplier(sgd(Net()), COSINE, 4)
MISTAKES: list[tuple[Callable[[], Any], type[Exception] | None, str]] = [
    # What belongs together
    (lambda: train(optimizer=sgd(Net())), ValueError, f"OptimWrapper {of_another}"),
    (
        lambda: train(optimizer=lambda m: sgd(copy.deepcopy(m))),
        ValueError,
        "OptimWrapper has the ",
    ),
    (
        lambda: train(optimizer=another_head),
        WARNING,
        "2 parameters of the optimizer are not the m",
    ),
    (
        lambda: train(optimizer=another_head),
        WARNING,
        r"2 trainable .* in no optimizer.*head\.weig",
    ),
    (
        lambda: train(optimizer=lambda m: sgd(m.body)),
        WARNING,
        "2 trainable parameters are in no",
    ),
    (lambda: train(EMA(Net())), ValueError, f"EMA {of_another}"),
    (
        lambda: train(PreciseBN(2, Net(), DATA, 1)),
        ValueError,
        f"PreciseBN {of_another}",
    ),
    (
        lambda: train(PeriodicCheckpointer(Checkpointer(Net()), 2)),
        ValueError,
        "PeriodicCheckpoint",
    ),
    (
        lambda: train(BestCheckpointer(1, Checkpointer(Net()), "acc")),
        ValueError,
        "BestCheckpointe",
    ),
    (
        lambda: train(schedule(lambda o: [StepLR(o, 2)] * 2)),
        ValueError,
        "two schedules, or one twi",
    ),
    (lambda: train(*[HookBase()] * 2), ValueError, "registered already"),
    (
        lambda: train(lambda _: HookBase),
        TypeError,
        "must be HookBase objects, but got <class",
    ),
    (
        lambda: train(lambda _: print),
        TypeError,
        "must be HookBase objects, but got <built-in",
    ),
    (lambda: train(LateEvent()), WARNING, "did you mean 'after_step'"),
    (lambda: train(AnotherFrameworksEvent()), WARNING, "on_train_start is no event"),
    (lambda: train(optimizer=lambda _: torch.optim.SGD), TypeError, "torch optimizer"),
    (
        lambda: SimpleTrainer(Net, DATA, sgd(Net())),
        TypeError,
        "nn.Module object, but got <class",
    ),  # type: ignore[arg-type]
    (
        lambda: train(model=Net().parameters(), optimizer=sgd(Net())),
        TypeError,
        "but got <generator",
    ),
    (
        lambda: train(lambda t: EMA(t)),
        TypeError,
        "nn.Module object, but got <.*SimpleTrainer",
    ),
    (
        lambda: Checkpointer("output", Net()),
        TypeError,
        "nn.Module object, but got 'output'",
    ),  # type: ignore[arg-type]
    (
        lambda: train(optimizer=lambda m: [sgd(m)]),
        TypeError,
        r"a torch optimizer or .* got \[SGD",
    ),
    (
        lambda: train(model=LayersInAList()),
        WARNING,
        "model.layers has layers that are not trained",
    ),
    (
        lambda: train(HookBase(), by=Forgetful),
        RuntimeError,
        r"must call super\(\).__init__\(\)",
    ),
    (
        lambda: TrainerBase().train(max_iter=4),
        NotImplementedError,
        "must define run_step",
    ),
    (
        lambda: train(CallbackHook(after_step=lambda t: t.model.eval())),
        RuntimeError,
        "in evaluation mode.* must call model.train",
    ),
    (
        lambda: train().register_hooks([HookBase()], before="Eval"),
        ValueError,
        "no hook 'Eval' is",
    ),
    # Lengths and periods
    (
        lambda: train(max_iter=None),
        ValueError,
        "needs an integer max_iter.*max_iter=None",
    ),
    (
        lambda: train(max_iter="4"),
        ValueError,
        "needs an integer max_iter.*max_iter='4'",
    ),
    (
        lambda: train(max_iter=4.5),
        ValueError,
        "needs an integer max_iter.*max_iter=4.5",
    ),
    (lambda: train(max_iter=-4), ValueError, "needs an integer max_iter.*max_iter=-4"),
    (
        lambda: train().train(max_iter=2),
        ValueError,
        "but got start_iter=4 and max_iter=2",
    ),
    (
        lambda: train(evaluate({}, 2.5)),
        ValueError,
        "EvalHook needs a whole number as period: 2.5",
    ),  # type: ignore[arg-type]
    (
        lambda: train(save(period=0)),
        ValueError,
        "period must be a whole number of .* got 0",
    ),
    (
        lambda: train(save(period=2.5)),
        ValueError,
        "period must be a whole number .* got 2.5",
    ),
    (
        wrap(accumulative_counts=0),
        ValueError,
        "accumulative_counts must be an integer > 0: 0",
    ),
    (
        wrap(accumulative_counts=2.5),
        ValueError,
        "accumulative_counts must be an integer .*: 2.5",
    ),
    (
        wrap(clip_grad=1.0),
        ValueError,
        "clip_grad must be like {'max_norm': 1.0, .*not 1.0",
    ),
    (
        wrap(clip_grad={"max_nrom": 1}),
        ValueError,
        "clip_grad must be like .*not {'max_nrom': 1}",
    ),
    (
        lambda: AmpOptimWrapper(sgd(Net()), "bf16"),
        ValueError,
        "float16 or bfloat16, but got 'bf16'",
    ),
    (lambda: EMA(Net(), 99.9), ValueError, r"decay must be in \[0, 1\): 99.9"),
    (lambda: Watchdog(0), ValueError, "timeout_s must be above 0 seconds, but got 0"),
    # Loaders
    (
        lambda: train(data=SAMPLES),
        TypeError,
        "a loader of batches, such as a DataLoader.*TensorDataset",
    ),
    (
        lambda: train(data=torch.ones(8, 4)),
        TypeError,
        "a loader of batches.*torch.Tensor",
    ),
    (lambda: train(data="data/train"), TypeError, "a loader of batches.*'str'"),
    (lambda: train(data=None), TypeError, "NoneType"),
    (lambda: train(data=lambda: DATA), TypeError, "'function' object is not iterable"),
    (lambda: train(data=[]), ValueError, "empty"),
    (lambda: train(data=iter(DATA[:2])), ValueError, "starts only once"),
    (
        lambda: train(data=DataLoader(SAMPLES, 9, drop_last=True)),
        ValueError,
        "by drop_last",
    ),
    (
        lambda: inference_on_dataset(Net(), SAMPLES, None),
        TypeError,
        "a loader of batches.*TensorD",
    ),
    (
        lambda: inference_on_dataset(Net(), itertools.cycle(DATA), None),
        ValueError,
        "never ends",
    ),
    (
        lambda: inference_on_dataset(
            Net(), build_train_loader(SAMPLES, total_batch_size=2), DatasetEvaluator()
        ),
        ValueError,
        "never ends.*build_test_loader",
    ),
    (
        lambda: build_train_loader(SAMPLES, total_batch_size=6 / 2),  # type: ignore[arg-type]
        ValueError,
        "total_batch_size must be an integer, .*, but got 3.0",
    ),
    (
        lambda: build_train_loader(TensorDataset(torch.ones(0, 4)), total_batch_size=2),
        ValueError,
        "size, that of the data set, must be at least 1, but got 0",
    ),
    # Batches
    (
        lambda: train(data=DataLoader(SAMPLES, 3)),
        TypeError,
        r"batch: \[Tensor\(\(3, 4\), torch.fl",
    ),
    (
        lambda: train(data=[{"x": DATA[0]}]),
        TypeError,
        r"batch: \{'x': Tensor\(\(2, 4\), torch.floa",
    ),
    (
        lambda: train(data=[torch.ones(2, 5)]),
        RuntimeError,
        r"batch: Tensor\(\(2, 5\), torch.float3",
    ),
    (
        lambda: train(data=[DATA[0].long()]),
        RuntimeError,
        r"batch: Tensor\(\(2, 4\), torch.int64",
    ),
    (lambda: train(data={"train": DATA}), TypeError, "batch: 'train'"),
    (
        lambda: train(
            model=Steps(Tensor.mean), data=[{"x": 1.5, "y": None}], by=StepTrainer
        ),
        TypeError,
        r"keyword argument 'x'\nThe last batch: \{'x': 1.5, 'y': None\}",
    ),
    # Losses
    (returning(lambda y: y), TypeError, r"one element each, not Tensor\(\(2, 2\)"),
    (returning(lambda y: y.sum(1)), TypeError, r"one element each, not Tensor\(\(2,\)"),
    (
        returning(lambda y: None),
        TypeError,
        "return a loss or a dict of losses.*not None",
    ),
    (returning(lambda y: y.mean().item()), TypeError, r"return a loss.*not -?\d"),
    (
        returning(lambda y: (y.mean(), y)),
        TypeError,
        r"return a loss.*not \(Tensor\(\(\), ",
    ),
    (returning(lambda y: {}), TypeError, r"return a loss.*not \{\}"),
    (returning(lambda y: y.mean().detach()), ValueError, "no loss has a gradient"),
    (returning(lambda y: y.argmax()), ValueError, "no loss has a gradient.*int64"),
    (
        returning(lambda y: {"acc": y.detach().mean()}),
        ValueError,
        "no loss has a gradient: {'acc'",
    ),
    (
        returning(lambda y: {"loss": y.mean(), "logits": y}),
        TypeError,
        r"'logits': Tensor\(\(2, 2\)",
    ),
    (
        returning(lambda y: {"loss": y.mean(), "loss_b": None}),
        TypeError,
        "'loss_b': None",
    ),
    (
        returning(lambda y: {"a": y.mean(), "total_loss": y.mean()}),
        ValueError,
        "name of the sum",
    ),
    (
        returning(lambda y: Output(None, y)),
        TypeError,
        r"Output\(\{'logits': Tensor.*'loss': None",
    ),
    (stepping(lambda y: y.mean()), TypeError, "a dict of losses, not a .*Tensor"),
    (stepping(lambda y: None), TypeError, "a dict of losses, not a .*NoneType"),
    (
        stepping(lambda y: {"ce": y.mean()}),
        ValueError,
        r"has 'loss' in its name.*\['ce'\]",
    ),
    (stepping(lambda y: {"loss": 0.5}), TypeError, "'loss' must be a tensor"),
    (lambda: train(by=StepTrainer), AttributeError, "no attribute 'train_step'"),
    # Evaluations
    (lambda: EvalHook(dict, 10), TypeError, "after the period, must be callable: 10"),  # type: ignore[arg-type]
    (lambda: EvalHook(10, {"acc": 1}), TypeError, "must be callable: {'acc': 1}"),  # type: ignore[arg-type]
    (lambda: EvalHook(10, None), TypeError, "must be callable: None"),  # type: ignore[arg-type]
    (lambda: train(evaluate(0.5)), TypeError, "return a dict of results, but got 0.5"),
    (
        lambda: train(evaluate({"a": {"acc": [1, 2]}})),
        ValueError,
        r"'a/acc' is \[1, 2\]",
    ),
    (
        lambda: train(lambda t: EvalHook(2, t.model.eval)),
        TypeError,
        "a dict of results",
    ),
    (lambda: train(evaluate({}, "2")), ValueError, "a text like '1 epoch', not '2'"),
    (
        judge(ClassificationEvaluator),
        TypeError,
        "evaluators must be objects, but got the class <class",
    ),
    (judge(5), TypeError, r"an evaluator needs process\(\), or is a metric to call: 5"),
    (
        judge(Results()),
        TypeError,
        r"Results.evaluate must return a dict of results, not \[99.0\]",
    ),
    (
        judge(ClassificationEvaluator("ab", "target")),
        ValueError,
        "under 'target', and this is a dict without; there is 'x', 'label'",
    ),
    (
        judge(ClassificationEvaluator("ab"), torch.ones(2)),
        ValueError,
        "must be a tuple, or a dict with targets under 'label', and this is a Tensor",
    ),
    (
        judge(ClassificationEvaluator("abc")),
        ValueError,
        r"shape \(N, 3\).* got \(2, 2\)",
    ),
    (
        judge(ClassificationEvaluator("ab"), outputs={}),
        ValueError,
        "got <class 'dict'> and",
    ),
    (
        judge(ClassificationEvaluator("a"), outputs=torch.ones(2, 1)),
        ValueError,
        r"1 labels are out of range: not in \[0, 1\)",
    ),
    (
        lambda: default_hooks(
            scheduler=COSINE,
            checkpointer=Checkpointer(Net()),
            checkpoint_period=2,
            eval_period=2,
        ),
        WARNING,
        "Without eval_function eval_period=2 and best_metric=None do nothing",
    ),
    # Metrics to put
    (put(0.5, "speed"), TypeError, "metric 0.5 must be a number .* but got 'speed'"),
    (
        put("speed", "fast"),
        TypeError,
        "metric 'speed' must be a number .* but got 'fast'",
    ),
    (
        put("speed", torch.ones(2)),
        TypeError,
        r"metric 'speed' must be .* got tensor\(\[1., 1",
    ),
    (lambda: get_event_storage(), RuntimeError, "call this inside of train"),
    (
        lambda: train().storage.history("total_los"),
        KeyError,
        "did you mean 'total_loss'",
    ),
    (
        lambda: JSONWriter(ROOT),
        IsADirectoryError,
        "json_file must be a file, not the folder",
    ),
    # Metrics to watch
    (
        lambda: train(evaluate({"acc": 1}, 2), best("acc", 3)),
        ValueError,
        "was measured at 1: register",
    ),
    (
        lambda: train(best("acc", mode="maximum")),
        ValueError,
        "'max' or 'min' for .*'acc', but got 'maximum'",
    ),
    (lambda: train(schedule(ReduceLROnPlateau)), TypeError, "argument: 'metrics'"),
    (
        lambda: train(schedule(lambda o: 0.5)),
        AttributeError,
        "'float' object has no attribute",
    ),
    # Schedules
    (lambda: train(LRScheduler(step_lr)), ValueError, "no schedule: give scheduler="),  # type: ignore[arg-type]
    (
        lambda: WarmupParamScheduler(COSINE, 0.1, 100),
        ValueError,
        "is a share of the run, in .0, 1",
    ),
    # Checkpoints
    (
        lambda: train(lambda t: PeriodicCheckpointer(Checkpointer(t.model), 2)),
        WARNING,
        r"no trainer to resume: give Checkpointer\(..., trainer=trainer",
    ),
    (
        lambda: train(
            save(__file__), model=Net(lambda y: None)
        ),  # which fails in the first step
        FileExistsError,
        f"File exists: '{re.escape(__file__)}'",
    ),
    (
        lambda: train(Unsaved(), save()),
        TypeError,
        "cannot save trainer.hooks.Unsaved.rule of type builtins.builtin",
    ),
    (
        lambda: Checkpointer(Net()).load("no.pth"),
        FileNotFoundError,
        "No such file .*: 'no.pth'",
    ),
    (
        lambda: Checkpointer(Net()).load(__file__),
        CorruptCheckpointError,
        "not as a file of torch.s",
    ),
    (
        resume(small(3)),
        ValueError,
        "with total_batch_size=2, but now total_batch_size=3; use the",
    ),
    (
        resume(small(), EMA(Net())),
        ValueError,
        r"that are not registered: \['EMA'\].*Register them",
    ),
    (
        resume(small(2, torch.optim.Adam)),
        ValueError,
        "that of SGD, and this is Adam: resume with",
    ),
    # Configurations
    (
        lambda: setattr(ConfigDict(max_iter=9), "max_itr", 5),
        WARNING,
        "has 'max_iter' already, and gets 'max_itr' beside it",
    ),
    (
        lambda: DefaultTrainer({"train": {}}),
        TypeError,
        "must be a ConfigDict.*{'train': {}}",
    ),
    (
        lambda: ConfigDict(train={}).trian,
        AttributeError,
        "no 'trian'; did you mean 'train'",
    ),
    (
        lambda: instantiate(LazyCall(Net)(ouput=1)),
        TypeError,
        "'ouput'.*did you mean 'output'",
    ),
    (
        override("train.max_itr=5"),
        KeyError,
        "no 'train.max_itr'; did you mean 'max_iter'",
    ),
    (
        override("train.max_iter=five"),
        ValueError,
        "'train.max_iter=five' replaces 9: give a val",
    ),
    (
        override("model=resnet"),
        ValueError,
        "'model=resnet' replaces {'_target_.*quotes around",
    ),
    (
        override("train.amp=true"),
        ValueError,
        "'train.amp=true' replaces .*give its .enabled=true",
    ),
    (
        override("train.amp.enabled=y"),
        ValueError,
        "'train.amp.enabled=y' .*: write true or false",
    ),
]

# The files that the commands find, and the commands with what they print.
FILES = {
    "notes.txt": "not a folder",
    "broken.py": "train = dict(\n    max_iter=10\n    seed=1\n)\n",
    "elsewhere.py": "from .common.trian import train\n",
    "unknown.py": "train = {}\nmodel = L(int)(1)\n",
    "run/log.txt": "",
}
DIGITS = (
    "tools/train_net.py",
    "--config-file",
    str(ROOT / "configs" / "digits_cnn.py"),
)
COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (("tools/train_net.py",), "--config-file is missing, such as configs"),
    (("tools/train_net.py", "--config-file", "digits.py"), "No such file .*digits.py'"),
    (
        ("tools/train_net.py", "--config-file", "a.yaml"),
        "must be a .py file, got 'a.yaml'",
    ),
    (
        ("tools/train_net.py", "--config-file", "broken.py"),
        'broken.py", line .*SyntaxError',
    ),
    (
        ("tools/train_net.py", "--config-file", "elsewhere.py"),
        "No such file .*common/trian.py'\nin .*elsewhere.py, line 1",
    ),
    (
        ("tools/train_net.py", "--config-file", "unknown.py"),
        "name 'L' is not defined\nin .*unknown.py, line 2",
    ),
    ((*DIGITS, "train.max_itr=5"), "did you mean 'max_iter'"),
    ((*DIGITS, "train.max_iter", "=", "5"), "'train.max_iter' is none of 'key=value'"),
    ((*DIGITS, "optimizer.lr=0.l"), "'optimizer.lr=0.l' replaces 0.1: give a value"),
    ((*DIGITS, "train.output_dir=notes.txt"), "File exists: 'notes.txt'"),
    ((*DIGITS, "train.device=gpu"), "Expected one of cpu.*device string: gpu"),
    ((*DIGITS, "train.strategy=FSDP"), "no object named 'FSDP' .*'FSDPStrategy'"),
    ((*DIGITS, "train.log_period=0"), r"at least 1, but got 0 \(train.log_period\)"),
    ((*DIGITS, "+model.chanels=4"), "'chanels'.*did you mean 'channels'"),
    (
        (*DIGITS, "optimizer._target_=torch.optim.Adamw"),
        "no 'Adamw'; did you mean 'Adam",
    ),
    ((*DIGITS, "--num-gpus=0"), "num_gpus_per_machine must be at least 1, got 0"),
    (("hooktrain/__main__.py", "trian"), "no command 'trian'; there are train, eval"),
    (
        ("hooktrain/__main__.py", "new", "notes.txt"),
        "hooktrain: .*File exists: 'notes.txt'",
    ),
    (("hooktrain/__main__.py", "new", "--help"), "usage: hooktrain new FOLDER"),
    (
        ("tools/checkpoint.py", "inspect", "model.pth"),
        "error: .*No such file .*'model.pth'",
    ),
    (
        ("tools/checkpoint.py", "inspect", "run"),
        "error: run.state.pth is missing",
    ),
    (
        ("tools/checkpoint.py", "weights", "notes.txt", "a.pth"),
        "notes.txt is no intact checkpoi",
    ),
    (("tools/plot.py", "run"), "error: .*No such file .*run/metrics.json"),
]


@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES)
def test_a_natural_mistake_is_answered_with_what_to_do(
    mistake: Callable[[], Any],
    error: type[Exception] | None,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raised = None
    try:
        mistake()
    except Exception as caught:
        raised = caught
    assert type(raised) is (error or type(None))
    # Notes of errors are logged where Python has none.
    text = "\n".join([str(raised), *getattr(raised, "__notes__", []), caplog.text])
    assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_a_mistake_in_a_command_is_answered_in_a_few_lines(
    command: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        Path(tmp_path, name).parent.mkdir(exist_ok=True)
        Path(tmp_path, name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*command])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
    close_logger()
    printed = f"{ended.value}\n{capsys.readouterr()}"
    assert "Traceback" not in printed
    assert re.search(message, printed, re.DOTALL), printed


def test_debugging_shows_the_traceback_and_the_log_has_it_in_any_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = [*DIGITS, f"train.output_dir={tmp_path}", "train.device=gpu"]
    for level, error in (("normal", SystemExit), ("debug", RuntimeError)):
        monkeypatch.setattr(sys, "argv", [*command, f"--log-level={level}"])
        with pytest.raises(error, match="Expected one of cpu"):
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")
        close_logger()
    assert "Traceback (most recent call last)" in Path(tmp_path, "log.txt").read_text()
