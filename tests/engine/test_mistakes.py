"""What is said to the natural mistakes of a script: an error or a warning, with what to do."""

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from hooktrain.checkpoint import Checkpointer
from hooktrain.data import build_train_loader
from hooktrain.engine import HookBase, SimpleTrainer, StepTrainer
from hooktrain.engine.hooks import (
    EMA,
    BestCheckpointer,
    EarlyStopping,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
    PreciseBN,
)
from hooktrain.evaluation import DatasetEvaluator, inference_on_dataset
from hooktrain.model import BaseModel
from hooktrain.solver import CosineParamScheduler, LRMultiplier, ReduceOnPlateauLR

DATA = [torch.ones(2, 4)] * 4
SAMPLES = TensorDataset(torch.ones(6, 4))
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

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        return self.output(self.body(inputs))


@dataclass
class Output(dict):  # type: ignore[type-arg]
    """As Hugging Face's: a mapping and a dataclass."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        self.update(vars(self))


class LateEvent(HookBase):
    def after_steps(self) -> None:
        """Is not called."""


class AnotherFrameworksEvent(HookBase):
    def on_train_start(self) -> None:
        """Is not called."""


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    *hooks: Any, model: Any = None, data: Any = DATA, optimizer: Any = None, by: Any = SimpleTrainer
) -> Any:
    """Four iterations. Hooks and optimizer may be functions of what they are for."""
    model = Net() if model is None else model
    optimizer = optimizer(model) if callable(optimizer) else optimizer or sgd(model)
    trainer = by(model, data, optimizer)
    made = [hook if isinstance(hook, HookBase) else hook(trainer) for hook in hooks]
    trainer.register_hooks(made)
    trainer.train(max_iter=4)
    return trainer


def schedule(make: Callable[[Any], Any], **options: Any) -> Callable[[Any], LRScheduler]:
    return lambda trainer: LRScheduler(scheduler=make(trainer.optimizer), **options)


def best(metric: str, period: int = 1, **options: Any) -> Callable[[Any], BestCheckpointer]:
    return lambda trainer: BestCheckpointer(period, Checkpointer(trainer.model), metric, **options)


def evaluate(metrics: Any, period: int | str = 1) -> EvalHook:
    return EvalHook(period, lambda: metrics)


def returning(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: train(model=Net(output))


def stepping(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: train(model=Steps(output), data=[[x] for x in DATA], by=StepTrainer)


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
    (lambda: train(optimizer=lambda m: sgd(copy.deepcopy(m))), ValueError, "OptimWrapper has the "),
    (lambda: train(optimizer=another_head), WARNING, "2 parameters of the optimizer are not the m"),
    (lambda: train(optimizer=another_head), WARNING, r"2 trainable .* in no optimizer.*head\.weig"),
    (lambda: train(optimizer=lambda m: sgd(m.body)), WARNING, "2 trainable parameters are in no"),
    (lambda: train(EMA(Net())), ValueError, f"EMA {of_another}"),
    (lambda: train(PreciseBN(2, Net(), DATA, 1)), ValueError, f"PreciseBN {of_another}"),
    (lambda: train(PeriodicCheckpointer(Checkpointer(Net()), 2)), ValueError, "PeriodicCheckpoint"),
    (lambda: train(BestCheckpointer(1, Checkpointer(Net()), "acc")), ValueError, "BestCheckpointe"),
    (lambda: train(LRScheduler(scheduler=step_lr)), ValueError, "none of .* schedules the optimiz"),
    (lambda: train(LRScheduler(sgd(Net()), step_lr)), ValueError, "none of .* schedules the optim"),
    (
        lambda: train(schedule(lambda o: [LRMultiplier(o, COSINE, 4), other_rate])),
        WARNING,
        "LRMultiplier.* is for an optimizer that the trainer does not have",
    ),
    (lambda: train(LRScheduler(sgd(Net()), COSINE)), WARNING, "CosineParamScheduler.* is for an o"),
    (
        lambda: train(schedule(lambda o: [StepLR(o, 2)] * 2)),
        ValueError,
        "two schedules, or one twi",
    ),
    (lambda: train(*[schedule(lambda _: COSINE)] * 2), ValueError, "two schedules.*CosineParamSch"),
    (lambda: train(*[HookBase()] * 2), ValueError, "registered already"),
    (lambda: train(lambda _: HookBase), TypeError, "must be HookBase objects, but got <class"),
    (lambda: train(lambda _: print), TypeError, "must be HookBase objects, but got <built-in"),
    (lambda: train(LateEvent()), WARNING, "did you mean 'after_step'"),
    (lambda: train(AnotherFrameworksEvent()), WARNING, "on_train_start is no event"),
    (lambda: train(optimizer=lambda _: torch.optim.SGD), TypeError, "torch optimizer"),
    # Loaders
    (
        lambda: train(data=SAMPLES),
        TypeError,
        "a loader of batches, such as a DataLoader.*TensorDataset",
    ),
    (lambda: train(data=torch.ones(8, 4)), TypeError, "a loader of batches.*torch.Tensor"),
    (lambda: train(data="data/train"), TypeError, "a loader of batches.*'str'"),
    (lambda: train(data=None), TypeError, "NoneType"),
    (lambda: train(data=lambda: DATA), TypeError, "'function' object is not iterable"),
    (lambda: train(data=[]), ValueError, "empty"),
    (lambda: train(data=iter(DATA[:2])), ValueError, "starts only once"),
    (lambda: train(data=DataLoader(SAMPLES, 9, drop_last=True)), ValueError, "by drop_last"),
    (lambda: inference_on_dataset(Net(), SAMPLES, None), TypeError, "a loader of batches.*TensorD"),
    (lambda: inference_on_dataset(Net(), itertools.cycle(DATA), None), ValueError, "never ends"),
    (
        lambda: inference_on_dataset(
            Net(), build_train_loader(SAMPLES, total_batch_size=2), DatasetEvaluator()
        ),
        ValueError,
        "never ends.*build_test_loader",
    ),
    # Batches
    (lambda: train(data=DataLoader(SAMPLES, 3)), TypeError, r"batch: \[Tensor\(\(3, 4\), torch.fl"),
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
    (lambda: train(data=[DATA[0].long()]), RuntimeError, r"batch: Tensor\(\(2, 4\), torch.int64"),
    (lambda: train(data={"train": DATA}), TypeError, "batch: 'train'"),
    (
        lambda: train(model=Steps(Tensor.mean), data=[{"x": 1.5, "y": None}], by=StepTrainer),
        TypeError,
        r"keyword argument 'x'\nThe last batch: \{'x': 1.5, 'y': None\}",
    ),
    # Losses
    (returning(lambda y: y), TypeError, r"one element each, not Tensor\(\(2, 2\)"),
    (returning(lambda y: y.sum(1)), TypeError, r"one element each, not Tensor\(\(2,\)"),
    (returning(lambda y: None), TypeError, "return a loss or a dict of losses.*not None"),
    (returning(lambda y: y.mean().item()), TypeError, r"return a loss.*not -?\d"),
    (returning(lambda y: (y.mean(), y)), TypeError, r"return a loss.*not \(Tensor\(\(\), "),
    (returning(lambda y: {}), TypeError, r"return a loss.*not \{\}"),
    (returning(lambda y: y.mean().detach()), ValueError, "no loss has a gradient"),
    (returning(lambda y: y.argmax()), ValueError, "no loss has a gradient.*int64"),
    (returning(lambda y: {"acc": y.detach().mean()}), ValueError, "no loss has a gradient: {'acc'"),
    (
        returning(lambda y: {"loss": y.mean(), "logits": y}),
        TypeError,
        r"'logits': Tensor\(\(2, 2\)",
    ),
    (returning(lambda y: {"loss": y.mean(), "loss_b": None}), TypeError, "'loss_b': None"),
    (returning(lambda y: {"a": y.mean(), "total_loss": y.mean()}), ValueError, "name of the sum"),
    (returning(lambda y: Output(None, y)), TypeError, r"Output\(\{'logits': Tensor.*'loss': None"),
    (stepping(lambda y: y.mean()), TypeError, "a dict of losses, not a .*Tensor"),
    (stepping(lambda y: None), TypeError, "a dict of losses, not a .*NoneType"),
    (stepping(lambda y: {"ce": y.mean()}), ValueError, r"has 'loss' in its name.*\['ce'\]"),
    (stepping(lambda y: {"loss": 0.5}), TypeError, "'loss' must be a tensor"),
    (lambda: train(by=StepTrainer), AttributeError, "no attribute 'train_step'"),
    # Evaluations
    (lambda: EvalHook(dict, 10), TypeError, "after the period, must be callable: 10"),  # type: ignore[arg-type]
    (lambda: EvalHook(10, {"acc": 1}), TypeError, "must be callable: {'acc': 1}"),  # type: ignore[arg-type]
    (lambda: EvalHook(10, None), TypeError, "must be callable: None"),  # type: ignore[arg-type]
    (lambda: train(evaluate(0.5)), TypeError, "return a dict of results, but got 0.5"),
    (lambda: train(evaluate({"a": {"acc": [1, 2]}})), ValueError, r"'a/acc' is \[1, 2\]"),
    (lambda: train(lambda t: EvalHook(2, t.model.eval)), TypeError, "a dict of results"),
    (lambda: train(evaluate({}, "2")), ValueError, "a text like '1 epoch', not '2'"),
    # Metrics to watch
    (lambda: train(evaluate({"acc": 1}), best("accuracy")), ValueError, "there is no metric 'accu"),
    (lambda: train(best("acc")), ValueError, "there is no metric 'acc'.*'total_loss'"),
    (lambda: train(evaluate({"acc": 1}, 2), best("acc", 3)), ValueError, "was measured at 1: give"),
    (lambda: train(best("acc", 2), evaluate({"acc": 1}, 2)), WARNING, "goes behind EvalHook"),
    (
        lambda: train(best("acc", mode="maximum")),
        ValueError,
        "'max' or 'min' for .*'acc', but got 'maximum'",
    ),
    (lambda: train(evaluate({"acc": 1}), EarlyStopping("accuracy")), ValueError, "watches.*'accur"),
    (lambda: train(EarlyStopping("accuracy")), WARNING, "EarlyStopping watches.*nothing has put"),
    (
        lambda: EarlyStopping("sharpness"),
        ValueError,
        "'max' or 'min' for the metric 'sharpness', but got None",
    ),
    (
        lambda: train(evaluate({"acc": 1}), schedule(ReduceLROnPlateau, metric="val_loss")),
        ValueError,
        "LRScheduler watches.*'val_loss'",
    ),
    (
        lambda: train(
            evaluate({"mIoU": 1}), schedule(lambda o: ReduceOnPlateauLR(o, monitor="mIoU"))
        ),
        WARNING,
        "'mIoU' with the mode 'min'",
    ),
    (
        lambda: train(evaluate({"acc": 1}), schedule(ReduceLROnPlateau, metric="acc")),
        WARNING,
        "'acc' with the mode 'min'",
    ),
    (lambda: train(schedule(lambda o: StepLR(o, 1), metric="loss")), ValueError, "for ReduceLROnP"),
    (lambda: train(schedule(ReduceLROnPlateau)), TypeError, "argument: 'metrics'"),
    (lambda: train(schedule(lambda o: 0.5)), AttributeError, "'float' object has no attribute"),
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
