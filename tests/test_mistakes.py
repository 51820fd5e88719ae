"""What is said to the natural mistakes of a script: an error or a warning, with what to do."""

import logging
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.loading import load_model_state
from hooktrain.compat.mmengine import PolyLR
from hooktrain.config import ConfigDict, LazyCall
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.demos import ClassificationEvaluator
from hooktrain.engine import (
    HookBase,
    SimpleTrainer,
    StepTrainer,
    default_hooks,
    default_writers,
    train_settings,
)
from hooktrain.engine.build import build_optimizer, evaluate, prepare_model
from hooktrain.engine.hooks import (
    CallbackHook,
    EarlyStopping,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
    SkipNonFinite,
)
from hooktrain.evaluation import DatasetEvaluator, MetricEvaluator, inference_on_dataset
from hooktrain.events import CommonMetricPrinter, EventWriter, JSONWriter
from hooktrain.model import BaseModel, ExponentialMovingAverage
from hooktrain.solver import (
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    OptimWrapper,
)
from hooktrain.strategy import DDPStrategy
from hooktrain.utils.logger import close_logger
from toys import Counter, sgd

ROOT = Path(__file__).parent.parent
DATA = [torch.ones(2, 4)] * 4
PAIRS = [(torch.ones(2, 4), torch.zeros(2))] * 4
SAMPLES = TensorDataset(torch.ones(6, 4))
WARNING = None  # in place of an error; a line of the log


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


class Captions(Net):
    """Has a loss where the batch has labels, as Hugging Face's models."""

    def forward(self, x: Any, labels: Any = None) -> Any:
        return SimpleNamespace(loss=labels)


class LayersInAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]


def train(
    *hooks: Any,
    model: Any = None,
    data: Any = DATA,
    optimizer: Any = sgd,
    by: Any = SimpleTrainer,
    max_iter: Any = 4,
) -> Any:
    """Four iterations. Hooks and optimizer may be functions of what they are for."""
    model = model or Net()
    trainer = by(model, data, optimizer(model))
    made = [hook if isinstance(hook, HookBase) else hook(trainer) for hook in hooks]
    trainer.register_hooks(made)
    trainer.train(max_iter=max_iter)
    return trainer


def another_head(model: Any) -> torch.optim.SGD:
    optimizer = sgd(model)
    model.head = nn.Linear(3, 2)
    return optimizer


def returning(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: train(model=Net(output))


def schedule(given: Any) -> Callable[[], Any]:
    return lambda: train(LRScheduler(scheduler=given))


def beside_a_multiplier(kind: Any) -> Callable[[], Any]:
    """A multiplier, and a schedule of the same rate."""
    multiplier = LRScheduler(scheduler=LinearParamScheduler(1, 0))
    return lambda: train(
        multiplier, lambda t: LRScheduler(scheduler=kind(t.optimizer, step_size=2))
    )


class StepsItself(HookBase):
    """Steps a scheduler that LRScheduler steps too."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def after_step(self) -> None:
        self.scheduler.step()


def stepped_twice(place: int) -> Callable[[], Any]:
    """By a hook before or behind LRScheduler."""

    def run() -> None:
        model = Net()
        optimizer = sgd(model)
        scheduler = StepLR(optimizer, step_size=2)
        hooks: list[HookBase] = [LRScheduler(scheduler=scheduler)]
        hooks.insert(place, StepsItself(scheduler))
        train(*hooks, model=model, optimizer=lambda _: optimizer)

    return run


def never_registered(*hooks: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    StepLR(optimizer, step_size=2)
    train(*hooks, model=model, optimizer=lambda _: optimizer)


def short_cycle() -> None:
    train(lambda t: LRScheduler(scheduler=OneCycleLR(t.optimizer, 0.1, total_steps=3)))


def configured(train: Any = None, **parts: Any) -> Callable[[], Any]:
    """A configuration with other settings or parts."""
    settings = {**train_settings(), **(train or {})}
    return lambda: prepare_model(ConfigDict(train=settings, **parts))


def only_validation() -> None:
    evaluate(ConfigDict(dataloader={"val": DATA, "evaluator": CLASSES}), Net())


def small(batch_size: Any = 2) -> SimpleTrainer:
    model = Net()
    loader = build_train_loader(SAMPLES, total_batch_size=batch_size, seed=0)
    return SimpleTrainer(model, loader, sgd(model))


def measure(data: Any, evaluator: Any, model: Any = None) -> Callable[[], Any]:
    return lambda: inference_on_dataset(model or Net(), data, evaluator)


def stream(**options: Any) -> Any:
    return build_train_loader(SAMPLES, total_batch_size=2, seed=0, **options)


def stream_of(data: Any) -> Any:
    return build_train_loader(data, total_batch_size=2, seed=0)


CALL: Any = LazyCall(CosineParamScheduler)(start_value=1.0, end_value=0.0)
FIXED_PARAMETERS = ConfigDict(
    optimizer=LazyCall(torch.optim.SGD)(params=Net().parameters(), lr=0.1)
)
SAVING: Any = {"checkpointer": Checkpointer(Net()), "checkpoint_period": 2}


class NoAfterStep(SimpleTrainer):
    def after_step(self) -> None:
        """Forgets what the base class does."""
        self.storage.put_scalar("mine", 1.0)


class NoBeforeStep(SimpleTrainer):
    def before_step(self) -> None:
        self.storage.put_scalar("mine", 1.0)


class OwnStep(SimpleTrainer):
    """A step of one's own, as most write it."""

    def run_step(self) -> None:
        loss = self.compute_loss(self.next_batch())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class NoZeroGrad(OwnStep):
    def run_step(self) -> None:
        self.compute_loss(self.next_batch()).backward()
        self.after_backward()
        self.optimizer.step()


class SavesNothing(PeriodicCheckpointer):
    def after_step(self) -> None:
        self.trainer.storage.put_scalar("mine", 1.0)


class OwnEvaluation(EvalHook):
    def __init__(self) -> None:
        self.evaluations = 0


def forgetful_saving(trainer: Any) -> SavesNothing:
    return SavesNothing(Checkpointer(trainer.model, trainer=trainer), 2)


def own_trainer() -> None:
    class OwnTrainer(SimpleTrainer):
        def __init__(self, model: nn.Module) -> None:
            self.model = model

    OwnTrainer(Net()).register_hooks([])


def default_hooks_twice(writer: Callable[[], EventWriter]) -> None:
    model = Net()
    trainer = SimpleTrainer(model, DATA, sgd(model))
    saver = Checkpointer(trainer.model, trainer=trainer)
    for _ in range(2):
        options: Any = {"checkpointer": saver, "checkpoint_period": 2}
        trainer.register_hooks(default_hooks(writers=[writer()], **options))
    trainer.train(max_iter=1)


@torch.no_grad()
def without_gradients() -> None:
    train()


def saving_to(checkpointer: Any) -> Callable[[Any], PeriodicCheckpointer]:
    return lambda _: PeriodicCheckpointer(checkpointer, 2)


def saving(trainer: Any) -> PeriodicCheckpointer:
    return PeriodicCheckpointer(Checkpointer(trainer.model, trainer=trainer), 2)


class Stateless(HookBase):
    def state_dict(self) -> Any:
        return None


class OfLightning(HookBase):
    def on_train_batch_end(self) -> None:
        """Nothing calls it."""


class OfLightningToo(SimpleTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch)


def of_hugging_face() -> None:
    class Mine(SimpleTrainer):
        def compute_loss(  # type: ignore[override]
            self, model: Any, inputs: Any, return_outputs: bool = False
        ) -> Any:
            return model(inputs)


class Misspelt(HookBase):
    def aftr_step(self) -> None:
        """Nothing calls it."""


class OfMMEngine(HookBase):
    def after_train_iter(self) -> None:
        """Nothing calls it."""


class Retrains(DatasetEvaluator):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def reset(self) -> None:
        """Has nothing to forget."""

    def process(self, inputs: Any, outputs: Any) -> None:
        self.model.train()


class Nothing(DatasetEvaluator):
    """Forgets to return its results."""

    def reset(self) -> None:
        """Has nothing to forget."""

    def process(self, inputs: Any, outputs: Any) -> None:
        """Takes in a batch."""


class OfTorchmetrics:
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Takes in a batch."""

    def compute(self) -> float:
        return 0.5

    def reset(self) -> None:
        """Forgets."""


def precision(y_true: Tensor, y_pred: Tensor) -> float:
    """In the order of scikit-learn."""
    return 0.5


def swapped(a: Tensor, b: Tensor) -> Tensor:
    return (a == b.argmax(1)).float().mean()


class NoReset(DatasetEvaluator):
    def __init__(self) -> None:
        self.total = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        self.total += len(outputs)


def never_forgets() -> None:
    NoReset()  # type: ignore[abstract]


def of_each_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float()


def in_a_dict(outputs: Tensor, targets: Tensor) -> Any:
    return {"accuracy": of_each_sample(outputs, targets).mean()}


RETRAINED = Net()
CLASSES = ClassificationEvaluator("ab")


def two_scores(_: Any) -> Tensor:
    return torch.ones(2, 2)


def train_again() -> None:
    train(lambda t: EvalHook(2, lambda: t.train(max_iter=2)))


def nothing_saved() -> None:
    mine = Counter()
    mine.state_dict = lambda: None  # type: ignore[assignment, method-assign, return-value]
    Checkpointer(Net(), mine=mine).begin_run()


def one_name() -> None:
    saver = Checkpointer(Net(), trainer=Counter())
    saver.read = lambda path: {"model": {}, "trainer": {}}  # type: ignore[method-assign]
    saver.load("a.pth", "trainer")


def other_head() -> None:
    load_model_state(nn.Linear(4, 2), nn.Linear(4, 3).state_dict())


def step(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: train(model=Steps(output), data=[[x] for x in DATA], by=StepTrainer)


def eval_mode() -> None:
    train(CallbackHook(after_step=lambda t: t.model.eval()))


MISTAKES: list[tuple[Callable[[], Any], type[Exception] | None, str]] = [
    # What belongs together
    (lambda: train(optimizer=another_head), WARNING, "2 parameters .* not saved"),
    (lambda: train(model=LayersInAList()), WARNING, "model.layers .*nn.ModuleList"),
    (lambda: train(*[HookBase()] * 2), ValueError, "already has a trainer"),
    (
        lambda: train(lambda _: HookBase),
        TypeError,
        "MMEngine.*must be HookBase objects",
    ),
    (lambda: SimpleTrainer(Net, DATA, sgd(Net())), TypeError, "nn.Module"),  # type: ignore[arg-type]
    (lambda: train(optimizer=lambda _: "sgd"), TypeError, "torch optimizer.*'sgd'"),
    (eval_mode, RuntimeError, r"call model.train\(\)"),
    (
        lambda: train().register_hooks([], before="Eval"),  # type: ignore[arg-type]
        ValueError,
        "'Eval' is neither a registered hook nor its class",
    ),
    (lambda: small().register_hooks(HookBase()), TypeError, "a list"),  # type: ignore[arg-type]
    (lambda: PeriodicWriter(CommonMetricPrinter()), TypeError, "a list"),  # type: ignore[arg-type]
    (lambda: PeriodicWriter("log.txt"), TypeError, r"\['log.txt'\]"),  # type: ignore[arg-type]
    (lambda: PeriodicWriter([JSONWriter]), TypeError, "JSONWriter"),  # type: ignore[list-item]
    (train_again, RuntimeError, r"train\(\) cannot be called during a run"),
    (lambda: train(OfLightning()), WARNING, "OfLightning.on_train_batch_end"),
    (
        lambda: train(by=OfLightningToo),
        WARNING,
        r"OfLightningToo.training_step.*compute_loss\(data\)",
    ),
    (of_hugging_face, TypeError, r"Mine.compute_loss.*self.model: .*'inputs'"),
    (lambda: train(Misspelt()), WARNING, "Misspelt.aftr_step"),
    (lambda: train(OfMMEngine()), WARNING, "OfMMEngine.after_train_iter"),
    # Calls that are left out
    (lambda: train(by=NoAfterStep), RuntimeError, r"after_step\(\).*super\(\)"),
    (lambda: train(by=NoBeforeStep), WARNING, "NoBeforeStep.before_step does not"),
    (lambda: train(saving_to("output")), TypeError, "Checkpointer, but got 'output'"),
    (lambda: Checkpointer(Net()).save("a.pth"), ValueError, "'a.pth'"),
    (lambda: train(forgetful_saving), WARNING, "SavesNothing.after_step does not call"),
    (lambda: train(OwnEvaluation()), AttributeError, "OwnEvaluation.__init__ does not"),
    (own_trainer, AttributeError, "OwnTrainer.__init__ does not call super"),
    (lambda: train(SkipNonFinite(), by=OwnStep), WARNING, r"\['SkipNonFinite'\] may"),
    (lambda: train(by=NoZeroGrad), WARNING, r"add up.*zero_grad\(\)"),
    (lambda: small().run_step(), RuntimeError, r"no run .*call train\(\)"),
    (
        lambda: default_hooks_twice(lambda: JSONWriter("metrics.json")),
        ValueError,
        "registered twice",
    ),
    (lambda: default_hooks_twice(CommonMetricPrinter), ValueError, "registered twice"),
    (without_gradients, ValueError, "no_grad"),
    # Names of a configuration
    (configured(lr_multiplyer={}), ValueError, "did you mean 'lr_multiplier'"),
    (configured(dataloader={"trian": 1}), ValueError, "dataloader.trian.*'train'"),
    (configured({"ddp": {"broadcast_bufers": 1}}), ValueError, "train.ddp.*_buffers'"),
    (
        configured({"device": "x"}, lr_scheduler=1),
        RuntimeError,
        "lr_scheduler is not a setting",
    ),
    (only_validation, WARNING, "no test data"),
    (configured({"strategy": "ddp"}), TypeError, "DDPStrategy.*'ddp'"),
    (configured({"device": "cpu"}, model=Net), TypeError, "LazyCall.*Net"),
    (configured({"ema": {"enabeld": True}}), ValueError, "train.ema.*'enabled'"),
    (configured({"amp": True}), TypeError, "train.amp must be a dict.*'enabled'"),
    (configured({"device": "x"}, lr_scheduler=CALL), RuntimeError, "WARNING.*lr_sch"),
    (
        configured({"device": "cpu"}, model=LazyCall(Net)),
        TypeError,
        "Net'>. is not called",
    ),
    (
        configured({"strategy": DDPStrategy}),
        TypeError,
        "DDPStrategy, or a LazyCall.*DDPStr",
    ),
    (lambda: build_optimizer(FIXED_PARAMETERS, Net()), TypeError, "params.*generator"),
    # Lengths and periods
    (lambda: train(max_iter=None), ValueError, "max_iter=None"),
    (lambda: train(max_iter=1e2), ValueError, "max_iter=100.0"),
    (lambda: small().train(max_iter=4, max_epochs=3), ValueError, "max_epochs=3"),
    (lambda: train(EvalHook(-5, lambda: {"a": 1})), ValueError, "-5"),
    (lambda: EvalHook(None, lambda: {"a": 1}), ValueError, "None"),  # type: ignore[arg-type]
    # Schedules
    (schedule(MultiStepParamScheduler([0.1, 0.01], 4)), WARNING, "0.1 x 0.1 = 0.01"),
    (schedule(LinearParamScheduler(30, 0)), WARNING, "0.1 x 30 = 3"),
    (schedule(ReduceLROnPlateau(sgd(Net()))), ValueError, r"LRScheduler.*metric="),
    (schedule(CosineParamScheduler(0.0, 1.0)), WARNING, "rises until the end"),
    (stepped_twice(0), WARNING, "another hook"),
    (stepped_twice(1), WARNING, "another hook"),
    (never_registered, WARNING, r"LRScheduler\(scheduler="),
    (
        lambda: never_registered(LRScheduler(scheduler=[])),
        WARNING,
        r"LRScheduler\(scheduler=",
    ),
    (short_cycle, ValueError, "total_steps=3, but takes 4"),
    (schedule(None), TypeError, "ParamScheduler.*None"),
    (lambda: LRScheduler(LinearParamScheduler(1, 0)), TypeError, "scheduler=Linear"),  # type: ignore[arg-type]
    (lambda: default_hooks(**SAVING, best_metric="a"), ValueError, "eval_function"),
    (beside_a_multiplier(StepLR), ValueError, "multiplier"),
    (schedule({"type": "PolyLR"}), TypeError, "compat.mmengine.*'PolyLR'"),
    (schedule(PolyLR(sgd(Net()), end=4)), TypeError, "compat.mmengine"),
    (schedule([lambda where: 1 - where]), TypeError, "ParamScheduler.*<function"),
    (lambda: OptimWrapper(sgd(Net()), 1, 1.0), TypeError, "'max_norm': 1.0"),  # type: ignore[arg-type]
    (
        lambda: OptimWrapper(sgd(Net()), 1, {"clip_type": "norm"}),
        TypeError,
        "'type': 'value'",
    ),
    # Data
    (lambda: train(data=SAMPLES), TypeError, "DataLoader.*TensorDataset"),
    (lambda: train(data={"a": DataLoader(SAMPLES)}), TypeError, "ConcatDataset"),
    (lambda: stream_of(DataLoader(SAMPLES)), TypeError, "__getitem__.*DataLoader"),
    (lambda: build_test_loader(iter(DATA)), TypeError, "__getitem__.*iterator"),
    (lambda: build_test_loader(SAMPLES, num_worker=1), TypeError, "'num_worker'"),
    (lambda: small("8"), ValueError, "total_batch_size.*'8'"),
    (lambda: train(data=[]), ValueError, "empty"),
    (lambda: stream(batch_size=2), ValueError, "total_batch_size"),
    (lambda: stream(epochs=3), TypeError, "'epochs'"),
    (lambda: stream(num_worker=2), TypeError, "'num_worker'"),
    (lambda: small(9), WARNING, "total_batch_size=9"),
    (lambda: train(data=iter(DATA[:2])), ValueError, "only once"),
    (
        lambda: train(data=[x.to(torch.uint8) for x in DATA]),
        RuntimeError,
        r"batch is .*torch.uint8.*\[2, 4\].*compute_loss",
    ),
    (lambda: train(model=Captions(), data=[{"x": 1}]), TypeError, "need labels"),
    (
        lambda: train(model=Captions(), data=[{"x": 1, "label": 2}]),
        TypeError,
        "'labels'",
    ),
    # Losses
    (lambda: train(model=Steps(lambda y: y)), TypeError, "StepTrainer"),
    (lambda: train(model=nn.Linear(4, 2), data=PAIRS), TypeError, "compute_loss"),
    (returning(lambda y: y), TypeError, r"\[2, 2\]"),
    (returning(lambda y: None), TypeError, "a loss .*None"),
    (returning(lambda y: y.mean().detach()), ValueError, "gradient"),
    (lambda: train(model=Net().requires_grad_(False)), ValueError, "frozen"),
    (returning(lambda y: {"loss": y.mean(), "logits": y}), TypeError, "'logits'"),
    (returning(lambda y: {"a": y.mean(), "total_loss": y.mean()}), ValueError, "sum"),
    (returning(lambda y: {"loss": y.sum(), "a_loss": y.sum()}), ValueError, "detach"),
    (
        returning(lambda y: {"loss_a": y.sum(), "sim": y.sum()}),
        ValueError,
        r"\['sim'\]",
    ),
    (step(lambda y: {"acc": y.mean().detach()}), ValueError, "no loss.*'acc'"),
    # Evaluations and metrics
    (measure(small().data_loader, None), ValueError, "build_test_loader"),
    (lambda: EvalHook(10, {"acc": 1}), TypeError, "callable"),  # type: ignore[arg-type]
    (lambda: train(EvalHook(1, lambda: 0.5)), TypeError, "dict.*0.5"),  # type: ignore[arg-type, return-value]
    (measure(DATA, ClassificationEvaluator), TypeError, "not a class"),
    (lambda: MetricEvaluator(OfTorchmetrics), TypeError, r"OfTorchmetrics\(\.\.\.\)"),
    (measure(PAIRS, precision, two_scores), ValueError, "outputs first.*'y_true'"),
    (measure(PAIRS, Nothing(), two_scores), WARNING, r"Nothing.evaluate\(\)"),
    (never_forgets, TypeError, "abstract.*reset"),
    (lambda: ExponentialMovingAverage(Net()).swap(Net()), WARNING, "with ema.swap"),
    (measure(PAIRS, swapped, two_scores), IndexError, "gets the outputs.*not a loss"),
    (
        measure(PAIRS, of_each_sample, two_scores),
        RuntimeError,
        "must return one number",
    ),
    (measure(PAIRS, in_a_dict, two_scores), TypeError, "a list of metrics"),
    (measure(DATA, Retrains(RETRAINED), RETRAINED), WARNING, "in training mode"),
    (measure([{"labels": [0, 1]}], CLASSES, two_scores), KeyError, "'labels'"),
    (lambda: train(EarlyStopping("acc", "max")), WARNING, "'acc'.*no EvalHook"),
    (lambda: SkipNonFinite(-1), ValueError, "-1"),
    # Checkpoints
    (lambda: train(Stateless(), saving), TypeError, "Stateless.state_dict"),
    (lambda: Checkpointer(Net()).load(ROOT), IsADirectoryError, str(ROOT)),
    (lambda: default_writers(""), ValueError, "output_dir"),
    (nothing_saved, TypeError, "mine.state_dict"),
    (one_name, TypeError, r"\['trainer'\]"),
    (other_head, ValueError, r"'weight', \(3, 4\), \(2, 4\)"),
]

DIGITS = (
    "tools/train_net.py",
    "--config-file",
    str(ROOT / "configs" / "digits_cnn.py"),
)
COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (("tools/train_net.py",), "--config-file"),
    ((*DIGITS[:2], DIGITS[2].replace("gits", "git")), "mean .*digits_cnn.py"),
    ((*DIGITS, "train.max_epochs=5"), "max_epochs=5"),
    ((*DIGITS, "train.max_itr=5"), "did you mean 'max_iter'"),
    ((*DIGITS, "train.hooks=[]"), r"no 'hooks'; there is ((?!a \+ before).)*$"),
    ((*DIGITS, "optimizer.betas=1"), r"'betas'.*a \+ before"),
    ((*DIGITS, "train.batch_size=8"), "dataloader.*total_batch_size"),
    ((*DIGITS, "+train.epochs=3", "train.log_period=0"), "train.epochs.*max_epochs"),
    ((*DIGITS, "train.log_period=0"), "got 0"),
    ((*DIGITS, "train.device=gpu"), "device string: gpu"),
    (
        (*DIGITS, "train.max_iter=1", "train.expected_results=[('a', 'b', 1.0, 0.0)]"),
        "a/b",
    ),
]


@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES)
def test_a_natural_mistake_is_answered_with_what_to_do(
    mistake: Callable[[], Any],
    error: type[Exception] | None,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*command])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
    close_logger()
    printed = f"{ended.value}\n{capsys.readouterr()}"
    assert "Traceback" not in printed
    assert re.search(message, printed, re.DOTALL), printed


def test_debugging_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = [*DIGITS, f"train.output_dir={tmp_path}", "train.device=gpu"]
    for level, error in (("normal", SystemExit), ("debug", RuntimeError)):
        monkeypatch.setattr(sys, "argv", [*command, f"--log-level={level}"])
        with pytest.raises(error, match="gpu"):
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")
        close_logger()
    assert "Traceback (most recent call last)" in Path(tmp_path, "log.txt").read_text()
