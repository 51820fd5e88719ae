import copy
import errno
import logging
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, load_checkpoint, save_file
from hooktrain.checkpoint.files import write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.compat import detectron2
from hooktrain.engine import HookBase, SimpleTrainer, create_ddp_model, default_hooks
from hooktrain.engine.hooks import (
    EMA,
    BestCheckpointer,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
    evaluation,
)
from hooktrain.evaluation import DatasetEvaluator, inference_on_dataset
from hooktrain.events import JSONWriter, load_json_metrics
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm
from toys import Idle, LinearLoss, batches, linear_trainer, net_trainer, sgd


@pytest.mark.parametrize(
    ("period", "max_iter", "at_end", "expected"),
    [
        *((15, 30, True, 2), (15, 31, True, 3), (0, 20, True, 1), (40, 20, True, 1)),
        (10, 20, False, 2),
    ],
)
def test_it_evaluates_each_period_and_once_at_the_end(
    period: int, max_iter: int, at_end: bool, expected: int
) -> None:
    calls: list[int] = []
    Idle(EvalHook(period, lambda: calls.append(1), at_end)).train(0, max_iter)  # type: ignore[arg-type, func-returns-value]
    assert len(calls) == expected


@pytest.mark.parametrize("period", [0, 1, "5 epochs"])
def test_the_log_has_the_period_and_its_units(
    period: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Idle(EvalHook(period, lambda: {"acc": 1.0}))
    trainer.epoch_length = 1
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 3)
    units = "a number counts iterations, 0 is never"
    assert f"eval_period={period!r} ({units}); also at the end: True" in caplog.text


def test_results_become_metrics_with_slashes() -> None:
    trainer = Idle(EvalHook(2, lambda: {"bbox": {"AP": 1, "AR": 2.5}, "speed": 3}))
    trainer.train(0, 3)
    assert trainer.storage.latest() == {
        "bbox/AP": (1.0, 2),
        "bbox/AR": (2.5, 2),
        "speed": (3.0, 2),
    }
    assert not trainer.storage.smoothing_hints()["speed"]


def test_results_that_are_not_a_number_are_left_out_with_one_line_a_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # As torchmetrics' MeanAveragePrecision gives them.
    results = {
        "map": torch.tensor(0.5),
        "classes": torch.tensor([1, 2]),
        "names": "cat, dog",
        "none": None,
    }
    trainer = Idle(EvalHook(1, lambda: results))
    trainer.train(0, 2)
    assert trainer.storage.latest() == {"map": (0.5, 1)}
    assert trainer.hooks[0].last_results is results  # type: ignore[attr-defined]
    (line,) = caplog.messages
    assert "['classes', 'names', 'none']" in line


def test_a_run_that_was_stopped_is_evaluated() -> None:
    calls: list[int] = []
    stop = CallbackHook(after_step=lambda t: t.iter == 1 and t.request_stop("now"))
    trainer = Idle(EvalHook(0, lambda: calls.append(trainer.iter)), stop)  # type: ignore[arg-type, func-returns-value]
    trainer.train(0, 1)
    trainer.train(max_iter=9)
    assert calls == [0, 2]


def test_an_early_stop_evaluates_the_same_weights_once() -> None:
    done: list[int] = []

    def evaluate() -> dict[str, float]:
        done.append(trainer.done)
        return {"acc": 1.0}

    trainer = Idle(EvalHook(2, evaluate), EarlyStopping("acc", "max", patience=1))
    trainer.train(0, 9)
    assert done == [2, 4]
    assert trainer.iter == 4


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_complete_run_that_is_started_again_has_its_results(is_stopped: bool) -> None:
    def make() -> tuple[Idle, EvalHook, EarlyStopping]:
        evaluation = EvalHook(3, lambda: {"acc": done.append(trainer.done) or 0.5})  # type: ignore[func-returns-value]
        stopping = EarlyStopping("acc", "max", patience=9)

        def stop(trainer: Any) -> None:
            if is_stopped and trainer.done == 4:
                trainer.request_stop("enough")

        trainer = Idle(evaluation, stopping, CallbackHook(after_step=stop))
        return trainer, evaluation, stopping

    done: list[int] = []
    first, _, judge = make()
    first.train(0, 9 if is_stopped else 4)
    assert done == [3, 4]
    again, evaluation, judge_again = make()
    again.load_state_dict(first.state_dict())
    again.train(max_iter=4)
    assert done == [3, 4]
    assert evaluation.last_results == {"acc": 0.5}
    assert judge_again.state_dict() == judge.state_dict()
    assert again.storage.latest() == first.storage.latest()


def test_a_run_that_was_killed_between_two_evaluations_makes_the_second_one() -> None:
    def make(fails: bool) -> Idle:
        def evaluate() -> dict[str, float]:
            if fails:
                raise KeyboardInterrupt
            done.append(trainer.done)
            return {"test": 2.0}

        save = CallbackHook(
            phase="save",
            after_step=lambda t: states.append(copy.deepcopy(t.state_dict())),
        )
        own = CallbackHook(after_step=lambda t: t.after_evaluation({"own": 3.0}))
        trainer = Idle(
            EvalHook(2, lambda: {"val": 1.0}),
            EvalHook(0, evaluate),
            EarlyStopping("val", "max", patience=1),
            own,
            save,
        )
        return trainer

    done: list[int] = []
    states: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        make(fails=True).train(0, 9)
    again = make(fails=False)
    again.load_state_dict(states[-1])
    again.train(max_iter=9)
    assert done == [4]
    evaluations = [h for h in again.hooks if isinstance(h, EvalHook)]
    assert [h.last_results for h in evaluations] == [{"val": 1.0}, {"test": 2.0}]


def test_a_stopped_run_that_goes_on_keeps_the_row_of_its_last_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(stops_at: int) -> Idle:
        def stop(trainer: Any) -> None:
            if trainer.done == stops_at:
                trainer.request_stop("enough")

        writer = JSONWriter(tmp_path / "metrics.json")
        trainer = Idle(
            EvalHook(7, lambda: {"acc": float(trainer.done)}),
            PeriodicWriter([writer], 1),
            CallbackHook(after_step=stop),
        )
        return trainer

    first = make(stops_at=6)
    first.train(0, 9)
    again = make(stops_at=0)
    again.load_state_dict(first.state_dict())
    again.train(max_iter=9)
    rows = load_json_metrics(tmp_path / "metrics.json")
    assert [(row["iteration"], row["acc"]) for row in rows] == [(5, 6), (6, 7), (8, 9)]
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_an_evaluation_without_a_step_is_of_the_first_iteration() -> None:
    trainer = Idle(EvalHook(0, lambda: {"acc": 1.0}))
    trainer.train(0, 0)
    assert trainer.storage.latest() == {"acc": (1.0, 0)}


def test_a_result_and_a_metric_of_the_training_are_two_things(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer(EvalHook(2, lambda: {"total_loss": 7.0, "accuracy": 1.0}))
    with caplog.at_level("INFO"):
        trainer.train(0, 3)
    storage = trainer.storage
    assert storage.history("eval/total_loss").values() == [(7.0, 1), (7.0, 2)]
    assert [i for _, i in storage.history("total_loss").values()] == [0, 1, 2]
    assert storage.history("accuracy").values() == [(1.0, 1), (1.0, 2)]
    hints = storage.smoothing_hints()
    assert hints["total_loss"]
    assert not hints["accuracy"]
    assert not hints["eval/total_loss"]
    (line,) = [text for text in caplog.messages if "'eval/total_loss'" in text]
    assert "'total_loss'" in line


def draw() -> dict[str, float]:
    return {
        "torch": torch.rand(()).item(),
        "numpy": float(np.random.rand()),
        "python": random.random(),
    }


def test_evaluations_and_the_end_draw_by_seed_and_iteration() -> None:
    at_the_end: list[dict[str, float]] = []

    def run(start: int) -> list[list[tuple[float, int]]]:
        end = CallbackHook(after_train=lambda _: at_the_end.append(draw()))
        # Another hook may draw before the evaluation.
        before = CallbackHook(after_train=lambda _: [draw() for _ in range(start)])
        trainer = Idle(end, before, EvalHook(2, draw))
        trainer.seed = 3
        random.seed(start)
        np.random.seed(start)
        torch.manual_seed(start)
        trainer.train(start, 5)
        return [h.values() for h in trainer.storage.histories().values()]

    whole, complete = run(0), run(5)
    assert [[i for _, i in values] for values in whole] == [[1, 3, 4]] * 3
    drawn = [[value for value, _ in values] for values in complete]
    assert drawn == [[value for value, _ in values[2:]] for values in whole]
    assert len({value for values in whole for value, _ in values}) == 9
    assert at_the_end[0] == at_the_end[1]


def test_a_step_after_an_evaluation_draws_as_without_one() -> None:
    first, second = net_trainer(), net_trainer()
    first.seed = second.seed = 3
    second.register_hooks([EvalHook(1, draw)])
    first.train(0, 3)
    second.train(0, 3)
    assert torch.equal(first.model.fc.weight, second.model.fc.weight)


def broken() -> None:
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_failing_evaluation_comes_after_the_save(
    at_the_end: bool, tmp_path: Path
) -> None:
    def stop(trainer: Any) -> None:
        if at_the_end and trainer.iter == 1:
            trainer.request_stop("now")

    evaluation = EvalHook(0 if at_the_end else 2, broken)  # type: ignore[arg-type]
    trainer = linear_trainer(CallbackHook(after_step=stop), evaluation)
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    best = BestCheckpointer(checkpointer, "acc", "max")
    periodic = PeriodicCheckpointer(checkpointer, 2 + 7 * at_the_end)
    trainer.register_hooks([best, periodic])
    with pytest.raises(ZeroDivisionError, match="broken"):
        trainer.train(0, 8)
    assert not trainer.succeeded
    (name,) = [path.name for path in tmp_path.glob("*.pth")]
    assert name == ("model_final.pth" if at_the_end else "model_0000001.pth")
    assert checkpointer.resume_or_load("")["iteration"] == 1


def fail_on(ranks: list[int], folder: Path) -> tuple[str, list[str]]:
    def evaluate() -> dict[str, float]:
        if comm.get_rank() in ranks:
            raise ZeroDivisionError("broken")
        return {"accuracy": 1.0}

    trainer = linear_trainer(EvalHook(2, evaluate))
    checkpointer = Checkpointer(trainer.model, folder, sharded=True, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2)])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train(0, 8)
    return str(caught.value), sorted(path.name for path in folder.glob("[!.]*"))


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_all_ranks_save_when_the_evaluation_of_one_has_failed(
    ranks: list[int], tmp_path: Path
) -> None:
    saved = ["last_checkpoint", "model_0000001"]
    assert run_ranks(fail_on, 2, ranks, tmp_path) == [("broken", saved)] * 2


def fail_where_another_rank_waits() -> None:
    def evaluate() -> dict[str, float]:
        if comm.is_main_process():
            comm.all_gather("the predictions")
        raise ZeroDivisionError("broken")

    evaluation._PATIENCE_SECONDS = 0.2
    linear_trainer(EvalHook(2, evaluate)).train(0, 8)


def test_a_rank_that_fails_while_another_waits_for_it_ends_the_run_soon() -> None:
    with pytest.raises(RuntimeError, match="failure in rank 1") as caught:
        run_ranks(fail_where_another_rank_waits, 2)
    assert str(caught.value).endswith("ZeroDivisionError: broken\n")


def evaluate_on_the_main_process_only(metric: Any) -> list[Any]:
    def evaluate() -> Any:
        if not comm.is_main_process():
            return {}
        return inference_on_dataset(
            model, [(batches(1)[0], torch.ones(8))], metric, step=first
        )

    trainer = linear_trainer(EvalHook(2, evaluate))
    model = trainer.model
    evaluation._PATIENCE_SECONDS = 0.2
    trainer.train(0, 4)
    return [*trainer.storage.results()]


def first(model: Any, batch: Any) -> Any:
    return model(batch[0])


def mean_of_targets(_: Any, targets: torch.Tensor) -> torch.Tensor:
    return targets.mean()


def test_a_metric_of_all_ranks_that_is_computed_on_one_only_is_refused() -> None:
    with pytest.raises(RuntimeError, match="this rank is at the end of eval_function"):
        run_ranks(evaluate_on_the_main_process_only, 2, mean_of_targets)


class Alone(DatasetEvaluator):
    """Exchanges nothing."""

    def reset(self) -> None:
        self.count = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        self.count += 1

    def evaluate(self) -> Any:
        return {"count": self.count}


def test_the_main_process_may_evaluate_alone_if_it_exchanges_nothing() -> None:
    assert run_ranks(evaluate_on_the_main_process_only, 2, Alone()) == [["count"]] * 2


# The best model


def best_of(
    folder: Path, values: list[float], state: Any = None, **options: Any
) -> tuple[BestCheckpointer, Any]:
    """Train one iteration a value, each evaluated to that value."""
    trainer = linear_trainer()
    mode = options.pop("mode", "max")
    saver = Checkpointer(trainer.model, folder, **options, trainer=trainer)
    hook = BestCheckpointer(saver, "acc", mode)
    value = lambda: values[min(trainer.iter - trainer.start_iter, len(values) - 1)]  # noqa: E731
    evaluation = EvalHook(1, lambda: {"acc": value()}, eval_after_train=False)
    trainer.register_hooks([evaluation, hook])
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(max_iter=trainer.state_dict()["iteration"] + 1 + len(values))
    return hook, trainer


def saved_iteration(folder: Path) -> int:
    path = next(p for p in folder.glob("model_best*") if p.suffix != ".1")
    file = read_checkpoint(str(path))
    assert file["trainer"]["iteration"] == file["iteration"]
    return int(file["iteration"])


@pytest.mark.parametrize(("mode", "best"), [("max", 1), ("min", 2)])
def test_the_best_value_decides_what_is_in_the_file(
    tmp_path: Path, mode: str, best: int
) -> None:
    hook, _ = best_of(tmp_path, [0.5, 0.75, 0.25, 0.5, 0.5], mode=mode)
    assert saved_iteration(tmp_path) == best == hook.best_iter


def test_the_log_has_each_value_and_the_best_one_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hooktrain"):
        best_of(tmp_path, [math.nan, 0.5, 0.75, 0.25])
    told = [text for text in caplog.messages if text.startswith("acc is")]
    assert told == [
        "acc is nan; the best so far: nan",
        "acc is 0.5; the best so far: 0.5",
        "acc is 0.75; the best so far: 0.75",
        "acc is 0.25; the best so far: 0.75",
    ]


@pytest.mark.parametrize("mode", [None, "more"])
def test_whether_more_or_less_is_better_has_to_be_said(mode: Any) -> None:
    saver = Checkpointer(LinearLoss())
    with pytest.raises(ValueError, match=f"best_mode.*{mode}"):
        BestCheckpointer(saver, "acc", mode)
    with pytest.raises(ValueError, match=f"best_mode.*{mode}"):
        EarlyStopping("acc", mode)


@pytest.mark.parametrize(
    ("metric", "mode", "is_told"),
    [
        ("classification/accuracy", "min", True),
        ("val_acc", "min", True),
        ("ema/bbox/AP50", "min", True),
        ("classification/val_loss", "max", True),
        ("eval/mae", "max", True),
        ("classification/accuracy", "max", False),
        ("val_loss", "min", False),
        ("neg_log_loss", "max", False),  # of scikit-learn
        ("acceleration", "min", False),
        ("accuracy_gap", "min", False),
        ("bootstrap", "min", False),
    ],
)
def test_a_mode_that_takes_the_worst_value_for_the_best_is_told(
    metric: str, mode: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    EarlyStopping(metric, mode)
    assert (f"mode={mode!r} would take the worst {metric!r}" in caplog.text) is is_told


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_the_best(
    tmp_path: Path, value: float
) -> None:
    hook, _ = best_of(tmp_path, [value, 0.5, value, value])
    assert saved_iteration(tmp_path) == 1
    assert hook.best_metric == 0.5


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("is_resumed", "kept"), [(True, 0.5), (False, 0.25)])
def test_a_resumed_run_keeps_a_better_model_and_a_new_one_puts_it_aside(
    is_resumed: bool,
    kept: float,
    sharded: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, first = best_of(tmp_path, [0.5, 0.5], sharded=sharded)
    state = first.state_dict() if is_resumed else None
    best_of(tmp_path, [0.25, 0.125, 0.25], state=state, sharded=sharded)
    path = tmp_path / ("model_best" if sharded else "model_best.pth")
    file = read_checkpoint(str(path))
    assert file["best"] == {"metric": "acc", "best_metric": kept, "best_iter": 0}
    aside = path.with_name(f"{path.name}.1")
    assert aside.exists() == (not is_resumed)
    if aside.exists():
        assert read_checkpoint(str(aside))["best"]["best_metric"] == 0.5
        assert str(aside) in caplog.text


def test_a_new_run_that_is_preempted_goes_on_with_its_own_best_model(
    tmp_path: Path,
) -> None:
    best_of(tmp_path, [0.5])  # of an earlier run
    _, first = best_of(tmp_path, [0.125])
    (tmp_path / "model_best.pth").unlink()  # killed before its first best model
    second, _ = best_of(tmp_path, [0.25, 0.125], first.state_dict())
    assert second.best_metric == 0.25
    assert saved_iteration(tmp_path) == 1


def test_a_trainer_that_begins_anew_forgets_its_best_value(tmp_path: Path) -> None:
    hook, trainer = best_of(tmp_path, [0.5])
    trainer.train(0, 1)
    assert (tmp_path / "model_best.pth.1").exists()
    assert (tmp_path / "model_best.pth").exists()
    assert hook.best_metric == 0.5


@pytest.mark.parametrize("sharded", [True, False])
def test_a_run_that_changes_between_files_and_folders_begins_another_best_model(
    sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["model_best.pth", "model_best"]
    old, new = names if sharded else reversed(names)
    _, first = best_of(tmp_path, [0.5], sharded=not sharded)
    best_of(tmp_path, [0.25], first.state_dict(), sharded=sharded)
    assert read_checkpoint(str(tmp_path / new))["best"]["best_metric"] == 0.25
    assert read_checkpoint(str(tmp_path / old))["best"]["best_metric"] == 0.5
    best_of(tmp_path, [0.125], sharded=sharded)  # a new run
    assert not (tmp_path / old).exists()
    assert f"{old}.1" in caplog.text


@pytest.mark.parametrize("is_older", [False, True])
def test_a_model_that_was_saved_after_the_checkpoint_counts(
    is_older: bool, tmp_path: Path
) -> None:
    _, first = best_of(tmp_path, [0.5])
    state = copy.deepcopy(first.state_dict())
    assert state["hooks"]["BestCheckpointer"]["best_metric"] == 0.5
    if is_older:  # of a version without this state
        del state["hooks"]["BestCheckpointer"]
    best_of(tmp_path, [0.75, 0.25], state=first.state_dict())
    # Other hardware may compute other numbers the second time.
    hook, _ = best_of(tmp_path, [0.625, 0.25, 0.25], state=state)
    assert (hook.best_metric, hook.best_iter) == (0.75, 1)
    assert saved_iteration(tmp_path) == 1


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_file_that_is_of_another_metric_or_gone_is_replaced(
    is_gone: bool, tmp_path: Path
) -> None:
    _, first = best_of(tmp_path, [0.5])
    state = copy.deepcopy(first.state_dict())
    if is_gone:
        (tmp_path / "model_best.pth").unlink()
    else:
        state["hooks"]["BestCheckpointer"]["metric"] = "other"
        load = torch.load(tmp_path / "model_best.pth", weights_only=True)
        save_file({**load, "best": {"metric": "other"}}, tmp_path / "model_best.pth")
    best_of(tmp_path, [0.25, 0.125], state=state)
    assert saved_iteration(tmp_path) == 1


def test_a_broken_best_file_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, first = best_of(tmp_path, [0.5, 0.5])
    (tmp_path / "model_best.pth").write_bytes(b"broken")
    best_of(tmp_path, [0.25, 0.25], state=first.state_dict())
    assert "model_best.pth" in caplog.text
    assert saved_iteration(tmp_path) == 2


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("values", "saved"), [([0.9, 0.5], [1]), ([0.5, 0.9, 0.7, 0.6], [0, 2])]
)
def test_a_best_value_that_a_full_disk_has_not_saved_does_not_count(
    values: list[float],
    saved: list[int],
    background: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = []

    def write(state: dict[str, Any], path: Any) -> None:
        if state["best"]["best_metric"] == 0.9:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        written.append(state["iteration"])
        write_file(state, path)

    monkeypatch.setattr("hooktrain.checkpoint.checkpointer.write_file", write)
    hook, _ = best_of(tmp_path, values, background=background)
    assert written == saved
    assert (hook.best_metric, hook.best_iter) == (values[saved[-1]], saved[-1])
    assert saved_iteration(tmp_path) == saved[-1]


@pytest.mark.parametrize(
    "options", [{}, {"background": True}, {"background": True, "sharded": True}]
)
def test_the_best_of_the_final_evaluation_is_there_when_the_run_has_ended(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, **options, trainer=trainer)
    evaluation = EvalHook(0, lambda: {"acc": 1.0})
    trainer.register_hooks([evaluation, BestCheckpointer(saver, "acc", "max")])
    trainer.train(0, 3)
    assert saved_iteration(tmp_path) == 2
    assert not (tmp_path / "last_checkpoint").exists()


def test_a_best_metric_that_no_evaluation_gives_ends_the_run_after_the_save(
    tmp_path: Path,
) -> None:
    trainer = linear_trainer(EvalHook(2, lambda: {"acc": trainer.iter}))
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    best = BestCheckpointer(saver, "accuracy", "max")
    trainer.register_hooks([best, PeriodicCheckpointer(saver, 2)])
    with pytest.raises(ValueError, match=r"'accuracy'.*'acc'"):
        trainer.train(0, 9)
    assert [path.name for path in tmp_path.glob("*.pth")] == ["model_0000001.pth"]


def test_a_period_in_the_place_of_the_checkpointer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"checkpointer.*20"):
        BestCheckpointer(20, Checkpointer(LinearLoss()), "acc", "max")  # type: ignore[arg-type]


def of_the_model(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.json without times, which differ."""
    rows = load_json_metrics(folder / "metrics.json")
    return [{k: v for k, v in row.items() if "time" not in k} for row in rows]


def test_the_best_model_holds_the_judgement_of_other_hooks_and_goes_on_exactly(
    tmp_path: Path,
) -> None:
    def make(folder: Path) -> tuple[Any, Checkpointer]:
        trainer = linear_trainer()
        saver = Checkpointer(trainer.model, folder, trainer=trainer)
        plateau = ReduceLROnPlateau(trainer.optimizer, factor=0.5, patience=0)
        trainer.register_hooks(
            [
                BestCheckpointer(saver, "acc", "max"),
                EarlyStopping("val", "min", patience=9),
                LRScheduler(scheduler=plateau, metric="val"),
                EvalHook(2, lambda: {"acc": -abs(trainer.done - 4), "val": 1.0}),
                PeriodicWriter([JSONWriter(folder / "metrics.json")], 1),
            ]
        )
        return trainer, saver

    whole, _ = make(tmp_path)
    whole.train(max_iter=8)
    rows = of_the_model(tmp_path)
    best, saver = make(tmp_path)
    saver.load(str(tmp_path / "model_best.pth"))
    assert best.done == 4
    best.train(max_iter=8)
    assert torch.equal(best.model.fc.weight, whole.model.fc.weight)
    assert best.hooks[0].state_dict() == whole.hooks[0].state_dict()
    assert of_the_model(tmp_path) == rows


def test_the_best_of_an_average_holds_the_average_as_the_model(tmp_path: Path) -> None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    value = iter([2.0, 1.0, 3.0])
    evaluation = EvalHook(1, lambda: {"ema": {"val_loss": next(value)}})
    ema = EMA(trainer.model, 0.5)
    best = BestCheckpointer(saver, "ema/val_loss", "min")
    averages = []

    def copy(trainer: SimpleTrainer) -> None:
        with ema.swap():
            averages.append(trainer.model.fc.bias.clone())

    trainer.register_hooks([ema, evaluation, best, CallbackHook(after_step=copy)])
    trainer.train(0, 3)
    model = LinearLoss()
    load_checkpoint(model, tmp_path / "model_best.pth")
    assert torch.equal(model.fc.bias, averages[1])
    assert not torch.equal(trainer.model.fc.bias, averages[1])


def best_weights_after_a_run(folder: Path, end: int, sharded: bool) -> list[float]:
    """Of DDP's or one process's model, which is the best one after two iterations."""
    model = create_ddp_model(LinearLoss())
    trainer = SimpleTrainer(model, batches(4), sgd(model))
    saver = Checkpointer(model, folder, trainer=trainer, sharded=sharded)
    trainer.register_hooks(
        default_hooks(
            checkpointer=saver,
            checkpoint_period=100,
            eval_function=lambda: {"acc": -abs(trainer.iter - 1)},
            eval_period=1,
            best_metric="acc",
            best_mode="max",
        )
    )
    saver.resume_or_load()
    trainer.train(max_iter=end)
    saver.load(folder / ("model_best" if sharded else "model_best.pth"), [])
    return unwrap_model(model).fc.bias.tolist()  # type: ignore[no-any-return, union-attr]


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, False), (2, True)])
def test_each_rank_loads_the_best_weights_after_a_run_which_goes_on_from_the_last(
    tmp_path: Path, ranks: int, sharded: bool
) -> None:
    def weights(folder: str, end: int) -> list[float]:
        options = (tmp_path / folder, end, sharded)
        of_ranks = run_ranks(best_weights_after_a_run, ranks, *options)
        assert all(each == of_ranks[0] for each in of_ranks)
        return of_ranks[0]

    def saved(folder: str, name: str) -> list[float]:
        path = tmp_path / folder / (name if sharded else f"{name}.pth")
        return read_checkpoint(str(path))["model"]["fc.bias"].tolist()

    best = weights("best", 2)
    assert weights("run", 4) == best == saved("run", "model_best")
    assert saved("run", "model_final") != best
    assert weights("run", 4) == best  # a complete run that is started again
    assert weights("run", 8) == weights("whole", 8) == best
    assert saved("run", "model_final") == saved("whole", "model_final")
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert "the model has the last weights" in log


def results_of_main_only(folder: Path) -> Any:
    def evaluate() -> dict[str, float]:
        return {"acc": trainer.iter} if comm.is_main_process() else {}

    trainer = linear_trainer(EvalHook(1, evaluate))
    saver = Checkpointer(trainer.model, folder, trainer=trainer)
    hook = BestCheckpointer(saver, "acc", "max")
    trainer.register_hooks([hook])
    trainer.train(0, 4)
    return hook.best_metric


@pytest.mark.parametrize("registered", [0, 2])
def test_a_metric_of_an_average_needs_one_hook_of_an_average(
    registered: int, tmp_path: Path
) -> None:
    trainer = linear_trainer(EvalHook(1, lambda: {"ema/acc": 1.0}))
    trainer.register_hooks([EMA(trainer.model) for _ in range(registered)])
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([BestCheckpointer(saver, "ema/acc", "max")])
    with pytest.raises(ValueError, match=f"'ema/acc'.*EMA.*not {registered}"):
        trainer.train(max_iter=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metric", ["acc", "emanation"])
def test_another_metric_beside_an_average_is_told_to_save_the_raw_weights(
    metric: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = linear_trainer(EvalHook(1, lambda: {metric: 1.0}))
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    best = BestCheckpointer(saver, metric, "max")
    trainer.register_hooks([best])
    trainer.train(max_iter=1)
    assert "raw weights" not in caplog.text
    trainer.register_hooks([EMA(trainer.model)])
    trainer.train(max_iter=2)
    assert caplog.text.count("the best model has these unless its metric") == 1
    assert saved_iteration(tmp_path) == 0


class Perfect(DatasetEvaluator):
    def reset(self) -> None:
        pass

    def process(self, inputs: Any, outputs: Any) -> None:
        pass

    def evaluate(self) -> dict[str, float]:
        return {"accuracy": 1.0}


@pytest.mark.parametrize("returns", [False, True])
def test_an_evaluation_without_a_return_is_told_once_in_each_run(
    returns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def evaluate() -> dict[str, Any] | None:
        results = inference_on_dataset(LinearLoss(), batches(1), Perfect())
        return results if returns else None

    for run in (1, 2):
        linear_trainer(EvalHook(1, evaluate), EvalHook(1, dict)).train(max_iter=4)
        told = sum("`return" in message for message in caplog.messages)
        assert told == (0 if returns else run)


class Parts(LinearLoss):
    """Its layer ``frozen`` is to stay in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.BatchNorm1d(3)
        self.dropout = torch.nn.Dropout()


@pytest.mark.parametrize("called", ["train", "eval", "requires_grad_", "missing"])
def test_an_evaluation_is_one_in_evaluation_mode_and_leaves_each_layer_in_its_own(
    called: str,
) -> None:
    model = Parts()
    model.frozen.eval()
    trainer = SimpleTrainer(model, batches(6), sgd(model))
    seen: list[bool] = []

    def evaluate() -> dict[str, float]:
        seen.extend(module.training for module in model.modules())
        getattr(model, called)()
        return {"acc": 1.0}

    trainer.register_hooks([EvalHook(2, evaluate)])
    if called == "missing":
        with pytest.raises(AttributeError, match="missing"):
            trainer.train(max_iter=6)
    else:
        trainer.train(max_iter=6)
        assert trainer.done == 6
    assert seen
    assert not any(seen)
    modes = {name for name, module in model.named_modules() if not module.training}
    assert modes == {"frozen"}


@pytest.mark.parametrize("model", [None, {"first": LinearLoss()}])
def test_a_trainer_without_a_module_evaluates_too(model: Any) -> None:
    trainer = Idle(EvalHook(1, lambda: {"acc": 1.0}))
    if model:
        trainer.model = model  # type: ignore[attr-defined]
    trainer.train(max_iter=2)
    assert trainer.storage.latest() == {"acc": (1.0, 1)}


def test_all_ranks_follow_the_main_one_that_alone_has_results(tmp_path: Path) -> None:
    assert run_ranks(results_of_main_only, 2, tmp_path) == [3.0, 3.0]
    assert torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"] == 3


def warnings_of_different_results(results: list[dict[str, float]]) -> int:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hooktrain")
    logger.addHandler(handler)
    Idle(EvalHook(1, lambda: results[comm.get_rank()])).train(max_iter=3)
    logger.removeHandler(handler)
    return sum("returned different results" in text for text in told)


@pytest.mark.parametrize(
    ("of_first", "of_second", "is_told"),
    [
        ({"acc": 0.5}, {"acc": 0.25}, True),
        ({"acc": 0.5}, {"acc": 0.5}, False),
        ({"acc": 0.5}, {}, False),
        ({"acc": 0.5, "seconds": 1.0}, {"acc": 0.5, "seconds": 2.0}, False),
        ({"acc": 0.5, "samples": 4}, {"acc": 0.25, "samples": 4}, True),
        ({"acc": float("nan")}, {"acc": float("nan")}, False),
    ],
)
def test_results_that_no_evaluator_has_gathered_are_told_once(
    of_first: dict[str, float], of_second: dict[str, float], is_told: bool
) -> None:
    told = run_ranks(warnings_of_different_results, 2, [of_first, of_second])
    assert told == [is_told] * 2


def looks_before_saves(folder: Path) -> list[int]:
    looks: list[int] = []
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, folder, trainer=trainer)
    values = iter([0.5, 0.25, 0.75, 0.5])
    evaluation = EvalHook(1, lambda: {"acc": next(values)})
    trainer.register_hooks([evaluation, BestCheckpointer(saver, "acc", "max")])
    look = trainer.prepare_save
    trainer.prepare_save = lambda: (looks.append(trainer.done), look())  # type: ignore[assignment, func-returns-value]
    trainer.train(0, 4)
    return looks


def test_the_ranks_look_at_the_weights_only_where_they_are_the_best(
    tmp_path: Path,
) -> None:
    assert run_ranks(looks_before_saves, 2, tmp_path) == [[1, 3], [1, 3]]


# What subclasses override, as in detectron2


class OwnStart(EvalHook):
    """Does something else before the run, as a subclass of detectron2's may."""

    def before_train(self) -> None:
        pass


def test_a_subclass_with_a_start_of_its_own_evaluates_at_the_end() -> None:
    done: list[int] = []
    stop = CallbackHook(after_step=lambda t: t.done == 2 and t.request_stop("enough"))
    trainer = Idle(OwnStart(0, lambda: done.append(trainer.done)), stop)  # type: ignore[arg-type, func-returns-value]
    trainer.train(0, 9)
    assert done == [2]


class OwnEvaluation(EvalHook):
    def _do_eval(self) -> None:
        self.trainer.storage.put_scalar("acc", self._func()["own"])  # type: ignore[index]


class Noted(detectron2.hooks.BestCheckpointer):
    """Learns of a best value, as projects do that copy it to a server."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: list[float] = []

    def _update_best(self, val: float, iteration: int) -> bool:
        self.noted.append(val)
        return super()._update_best(val, iteration) and val != 3.0


class Compared(Noted):
    def _best_checking(self) -> None:
        value, iteration = self.trainer.storage.latest()[self._val_metric]
        if self.best_metric is None or self._compare(value, self.best_metric):
            self._update_best(value, iteration)
            self._checkpointer.save(self._file_prefix, iteration=iteration)
            self._logger.info("saved")


@pytest.mark.parametrize(
    ("kind", "mode", "noted", "saved"),
    [
        *((Noted, "max", [1.0, 2.0, 3.0], 2), (Noted, "min", [1.0, 0.5], 1)),
        *((Compared, "max", [1.0, 2.0, 3.0], 3), (Compared, "min", [1.0, 0.5], 1)),
    ],
)
def test_what_a_subclass_overrides_is_called(
    kind: type[Noted], mode: str, noted: list[float], saved: int, tmp_path: Path
) -> None:
    values = iter([1.0, 0.5, 2.0, 3.0, 1.0])
    trainer = linear_trainer(OwnEvaluation(1, lambda: {"own": next(values)}, False))
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    best = kind(1, saver, "acc", mode)
    trainer.register_hooks([best])
    trainer.train(0, 5)
    assert best.noted == noted
    assert saved_iteration(tmp_path) == saved


def test_what_a_subclass_has_saved_by_itself_counts_in_a_resumed_run(
    tmp_path: Path,
) -> None:
    def run(values: list[float], state: Any = None) -> Any:
        measured = iter(values)
        trainer = linear_trainer(EvalHook(1, lambda: {"acc": next(measured)}, False))
        saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
        trainer.register_hooks([Compared(1, saver, "acc", "max")])
        if state is not None:
            trainer.load_state_dict(state)
        trainer.train(max_iter=trainer.done + len(values))
        return trainer

    first = run([0.5, 0.75, 0.25, 0.25])  # the file does not tell its value
    run([0.625, 0.25], first.state_dict())
    assert saved_iteration(tmp_path) == 1


# Early stopping


def trainer_of(values: list[float], **kwargs: Any) -> Idle:
    """Give a value of "loss" in each iteration, as long as there are values."""

    def evaluate(trainer: Any) -> None:
        if trainer.iter < len(values):
            trainer.after_evaluation({"loss": values[trainer.iter]})

    kwargs.setdefault("mode", "min")
    return Idle(CallbackHook(after_step=evaluate), EarlyStopping("loss", **kwargs))


@pytest.mark.parametrize(
    ("values", "options", "end"),
    [
        ([3.0, 2.0, 2.5, 2.0, 1.0], {"patience": 2}, 4),
        # An improvement resets the patience, and must exceed min_delta.
        ([3.0, 3.5, 2.0, 1.9, 1.8, 1.7], {"patience": 2, "min_delta": 0.15}, 9),
        ([1.0, 2.0, 1.5], {"mode": "max", "patience": 1}, 3),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([1.0, 2.0], {"patience": 2}, 9),  # iterations without a value do not count
    ],
)
def test_training_stops_after_so_many_values_without_improvement(
    values: list[float], options: dict[str, Any], end: int
) -> None:
    trainer = trainer_of(values, **options)
    trainer.train(0, 9)
    assert trainer.iter == end
    assert (trainer.stop_reason is None) == (end == 9)


@pytest.mark.parametrize(
    ("periods", "patience", "is_told"),
    [
        ([0], 1, True),
        ([2], 4, True),
        ([2], 3, False),
        (["1 epoch"], 2, True),
        (["1 epoch"], 1, False),
        (["1 hour"], 9, False),
        ([0, 1], 5, False),
        ([], 5, False),
    ],
)
def test_a_run_with_too_few_evaluations_for_the_patience_is_told(
    periods: list[int | str],
    patience: int,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    hooks = [
        EvalHook(period, lambda: {"acc": 1.0 / (1 + trainer.iter)})
        for period in periods
    ]
    trainer = Idle(*hooks, EarlyStopping("acc", "min", patience))
    trainer.epoch_length = 3
    trainer.train(0, 9)
    told = [text for text in caplog.messages if "too few evaluations" in text]
    assert len(told) == is_told
    assert all(f"EarlyStopping, with its patience of {patience}" in t for t in told)


def test_the_patience_survives_a_resume() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    first = trainer_of(values, patience=3)
    first.train(0, 2)
    second = trainer_of(values, patience=3)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=9)
    assert second.iter == 4
    third = trainer_of(values, patience=3)  # a stopped run stays stopped
    third.load_state_dict(second.state_dict())
    third.train(max_iter=9)
    assert third.iter == 4


def levels_of(pattern: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The levels of the lines in which a pattern is found."""
    found = [each for each in caplog.records if re.search(pattern, each.message)]
    return [each.levelname for each in found]


class Own(HookBase):
    """A hook of the user, which might evaluate."""


@pytest.mark.parametrize("is_first", [True, False])
def test_a_metric_that_no_evaluation_gives_ends_the_run(is_first: bool) -> None:
    hooks = [EarlyStopping("acc", "max"), EvalHook(2, lambda: {"accuracy": 1.0})]
    trainer = Idle(*(hooks if is_first else reversed(hooks)))
    with pytest.raises(ValueError, match=r"'acc'.*'accuracy'"):
        trainer.train(0, 9)
    assert trainer.iter == 1


def error_of_a_metric_that_is_not_there() -> str:
    results = {"accuracy": 1.0} if comm.is_main_process() else {}
    trainer = Idle(EvalHook(2, lambda: results), EarlyStopping("acc", "max"))
    with pytest.raises(ValueError, match="'acc'") as raised:
        trainer.train(0, 9)
    return str(raised.value)


def test_a_metric_that_no_evaluation_gives_ends_all_ranks() -> None:
    one, other = run_ranks(error_of_a_metric_that_is_not_there, 2)
    assert one == other


def test_hooks_that_evaluate_may_give_the_metric_later_than_others() -> None:
    def evaluate(trainer: Any) -> None:
        trainer.after_evaluation({"loss": 1.0})
        if trainer.done % 3 == 0:
            trainer.after_evaluation({"acc": 1.0})

    stopping = EarlyStopping("acc", "max", patience=2)
    trainer = Idle(CallbackHook(after_step=evaluate), stopping)
    trainer.train(0, 20)
    assert trainer.iter == 9


def test_a_hook_of_the_user_may_give_the_metric_later_than_an_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Rare(HookBase):
        def after_step(self) -> None:
            if self.trainer.done % 5 == 0:
                self.trainer.after_evaluation({"rare": 1.0})

    stopping = EarlyStopping("rare", "max", patience=2)
    trainer = Idle(Rare(), EvalHook(1, lambda: {"fast": 1.0}), stopping)
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 20)
    assert trainer.iter == 15
    assert levels_of("'rare'.*'fast'", caplog) == ["INFO"] * 4


def test_only_some_evaluations_may_give_the_metric_if_the_first_one_gives_nan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    later = {2: {"fid": 3.0}, 4: {"fid": 2.0}, 6: {"fid": 4.0}, 8: {"fid": 5.0}}
    others = {"fid": math.nan, "fid_5k": 1.0}
    stopping = EarlyStopping("fid", "min", patience=2)
    trainer = Idle(stopping)
    evaluation = EvalHook(1, lambda: later.get(trainer.done, others))
    trainer.register_hooks([evaluation])
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 20)
    assert "has not improved on 2.0 by more than min_delta=" in str(trainer.stop_reason)
    assert levels_of("'fid'.*math.nan", caplog) == []


@pytest.mark.parametrize("given", ["acc", "val/accuracy", "acuracy", "fid"])
def test_a_metric_that_no_evaluation_gives_ends_the_run_unless_a_hook_may_give_it(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(*hooks: Any) -> Idle:
        evaluation = EvalHook(2, lambda: {given: 1.0})
        return Idle(evaluation, EarlyStopping("accuracy", "max"), *hooks)

    trainer = make()
    with pytest.raises(ValueError, match=f"'accuracy'.*{given!r}"):
        trainer.train(0, 9)
    assert trainer.iter == 1
    with caplog.at_level(logging.INFO, "hooktrain"):
        make(Own()).train(0, 9)
    assert set(levels_of(f"'accuracy'.*{given!r}", caplog)) == {"INFO"}


@pytest.mark.parametrize("name", ["fast", "slow"])
def test_another_evaluation_may_give_the_metric_later(name: str) -> None:
    trainer = Idle(
        EvalHook(1, lambda: {"fast": 1.0}),
        EvalHook(3, lambda: {"slow": 1.0}),
        EarlyStopping(name, "max", patience=2),
    )
    trainer.train(0, 20)
    assert trainer.iter == (3 if name == "fast" else 9)


def test_a_metric_of_the_training_is_no_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    put = CallbackHook(after_step=lambda t: t.storage.put_scalar("acc", t.iter))
    trainer = Idle(put, EarlyStopping("acc", "min", patience=1))
    with caplog.at_level("INFO"):
        trainer.train(0, 5)
    assert trainer.iter == 5
    assert "EarlyStopping waits for trainer.after_evaluation({'acc'" in caplog.text
