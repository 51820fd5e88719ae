import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from gloo import run_ranks
from hooktrain import evaluation
from hooktrain.data import build_test_loader
from hooktrain.demos import ClassificationEvaluator
from hooktrain.evaluation import (
    DatasetEvaluator,
    MetricEvaluator,
    inference_context,
    inference_on_dataset,
)
from hooktrain.evaluation.evaluator import computes_together
from hooktrain.utils import comm
from hooktrain.utils.logger import log_once
from sharding_toys import batches, make_model, make_sharded

LOGGER = "hooktrain.evaluation.evaluator"


class Recorder(DatasetEvaluator):
    """Writes down what it is called with."""

    def __init__(self, results: dict[str, Any] | None = None) -> None:
        self.results = results
        self.calls: list[Any] = []

    def reset(self) -> None:
        self.calls = ["reset"]

    def process(self, inputs: Any, outputs: Any) -> None:
        self.calls.append((inputs, outputs))

    def evaluate(self) -> dict[str, Any] | None:
        self.calls.append("evaluate")
        return self.results


def double(x: int) -> int:
    return 2 * x


def frozen_model() -> nn.Sequential:
    """In training mode, but for a BatchNorm layer."""
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(0.5))
    )
    model[1].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_an_evaluator_sees_each_batch() -> None:
    recorder = Recorder({"task": {"x": 1.0}})
    assert inference_on_dataset(double, [1, 2], recorder) == {"task": {"x": 1.0}}
    assert recorder.calls == ["reset", (1, 2), (2, 4), "evaluate"]
    for nothing in (None, Recorder(None)):
        assert inference_on_dataset(double, [1, 2], nothing) == {}


class OwnSteps(nn.Module):
    def val_step(self, data: int) -> str:
        return f"val {data}"

    def test_step(self, data: int) -> str:
        return f"test {data}"


@pytest.mark.parametrize(
    ("model", "step", "output"),
    [
        (OwnSteps(), {}, "test 1"),
        (OwnSteps(), {"step": "val_step"}, "val 1"),
        (nn.Identity(), {}, 1),
    ],
)
def test_the_step_of_a_model_that_has_one_is_called(
    model: nn.Module, step: dict[str, str], output: Any
) -> None:
    inference_on_dataset(model, [1], recorder := Recorder(), **step)
    assert recorder.calls == ["reset", (1, output), "evaluate"]


def test_a_function_of_model_and_batch_calls_a_model_that_is_evaluated() -> None:
    model, recorder = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), Recorder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    points = torch.arange(6.0).view(3, 2)
    batch = (points, torch.zeros(3))
    for _ in range(2):
        inference_on_dataset(model, [batch], recorder, step=lambda m, b: m(b[0]))
        assert torch.equal(recorder.calls[1][1], points / (1 + 1e-5) ** 0.5)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


@pytest.mark.parametrize(
    ("batch", "kind", "how"),
    [
        ([torch.ones(1, 2), torch.ones(1)], "list", "step="),
        (DataLoader([1, 2]), "DataLoader", "several loaders are passed as a dict"),
    ],
)
def test_the_error_of_a_model_that_cannot_take_the_batch_says_how_else(
    batch: Any, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TypeError, match=f"Tensor, not {kind}") as caught:
        inference_on_dataset(nn.Linear(2, 2), [batch], None)
    notes = getattr(caught.value, "__notes__", caplog.messages)
    assert how in notes[0]


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_evaluators_come_as_a_list_or_a_tuple(kind: Any) -> None:
    evaluators = kind([Recorder({"a": 1}), Recorder(None), Recorder({"b": 2})])
    assert inference_on_dataset(double, [1], evaluators) == {"a": 1, "b": 2}
    assert [e.calls for e in evaluators] == [["reset", (1, 2), "evaluate"]] * 3
    with pytest.raises(ValueError, match=r"\['b'\]"):
        inference_on_dataset(double, [1], kind([*evaluators, Recorder({"b": 3})]))


def test_several_loaders_are_evaluated_by_name() -> None:
    loaders = {"val": [1], "ood": [2, 3]}
    one = Recorder({"x": 1})
    results = inference_on_dataset(double, loaders, one)
    assert results == {"val": {"x": 1}, "ood": {"x": 1}}
    assert one.calls == ["reset", (2, 4), (3, 6), "evaluate"]
    each: dict[str, Any] = {"val": Recorder({"x": 2}), "ood": [Recorder(None)]}
    assert inference_on_dataset(double, loaders, each) == {"val": {"x": 2}, "ood": {}}
    assert each["val"].calls == ["reset", (1, 2), "evaluate"]
    with pytest.raises(KeyError, match="ood"):
        inference_on_dataset(double, loaders, {"val": Recorder()})


def share_of(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of different sizes: outputs that a model repeats, and targets."""
    outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]])
    targets = torch.tensor([0, 1, 1, 1, 1])
    parts = [slice(0, 3), slice(3, 4), slice(4, 5)]
    return [(outputs[part], targets[part]) for part in parts[rank::world]]


def share_of_right_ones(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def evaluate_metrics() -> dict[str, Any]:
    # Here, since the ranks of the other tests import this module too. It takes seconds.
    import vision  # noqa: F401, I001  # before torchmetrics, which imports torchvision
    from torchmetrics import ClasswiseWrapper, MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassRecall,
    )

    loader = share_of(comm.get_rank(), comm.get_world_size())
    of_torchmetrics = MetricCollection(
        {"acc": MulticlassAccuracy(2, average="micro"), "f1": MulticlassF1Score(2)}
    )
    ours = ClassificationEvaluator(["no", "yes"])
    by_class = ClasswiseWrapper(MulticlassRecall(2, average=None), labels=["no", "yes"])
    metrics = [
        share_of_right_ones,
        of_torchmetrics,
        MulticlassRecall(2),
        MetricCollection({"micro": MulticlassRecall(2, average="micro")}),
        by_class,
        ours,
    ]
    return inference_on_dataset(lambda batch: batch[0], loader, metrics)


def test_functions_and_objects_of_torchmetrics_are_evaluators() -> None:
    first, second = run_ranks(evaluate_metrics, 2)
    assert first == second
    assert first["share_of_right_ones"] == first["acc"] == pytest.approx(0.6)
    # Of the class 0: precision 1/3, recall 1. Of the class 1: precision 1, recall 2/4.
    assert first["f1"] == pytest.approx((0.5 + 2 / 3) / 2)
    assert first["MulticlassRecall"] == pytest.approx(0.75)
    assert first["micro"] == pytest.approx(0.6)
    recalls = {"multiclassrecall_no": 1.0, "multiclassrecall_yes": 0.5}
    assert recalls.items() <= first.items()
    assert first["classification"]["accuracy"] == 60.0


def test_the_mean_of_a_metric_of_python_numbers_keeps_their_precision() -> None:
    def seven_of_thirteen(outputs: Tensor, targets: Tensor) -> float:
        return 7 / len(targets)

    batch = (torch.ones(13, 2), torch.ones(13))
    results = inference_on_dataset(lambda pair: pair[0], [batch], seven_of_thirteen)
    assert results == {"seven_of_thirteen": 7 / 13}


def first_of(batch: Any) -> Any:
    return batch[0]


@pytest.mark.parametrize(
    ("value", "count", "size"),
    [
        (torch.tensor(600.0, dtype=torch.float16), 5, 128),  # float16 ends at 65,504
        (torch.tensor(0.7734375, dtype=torch.bfloat16), 10, 7),
        (torch.tensor([1 / 3]), 20000, 1),
        (0.7, 1000, 4),
        (True, 3, 2),
        (np.float32(0.1), 1000, 3),
    ],
)
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_the_mean_of_a_metric_is_taken_in_float64(
    value: Any, count: int, size: int, default: torch.dtype
) -> None:
    def metric(outputs: Tensor, targets: Tensor) -> Any:
        return value

    loader = [(torch.zeros(size), torch.zeros(size))] * count
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = inference_on_dataset(first_of, loader, metric)["metric"]
    finally:
        torch.set_default_dtype(before)
    assert found == pytest.approx(float(value), rel=1e-11)


def columns(*of_samples: Tensor) -> dict[str, Tensor]:
    return {"boxes": of_samples[0], "classes": of_samples[-1]}


@pytest.mark.parametrize(
    "kind", [lambda *x: [*x], columns, lambda *x: {"a": columns(*x)}]
)
def test_a_batch_counts_by_its_samples_whatever_its_targets_are(kind: Any) -> None:
    def mean(outputs: Tensor, targets: Any) -> Tensor:
        return outputs.mean()

    values = [torch.zeros(4), torch.ones(1)]
    loader = [(x, kind(x, x)) for x in values]
    assert inference_on_dataset(first_of, loader, mean) == {"mean": 0.2}


def test_targets_in_a_list_beside_outputs_in_a_list_are_of_one_sample_each() -> None:
    def mean(outputs: list[Tensor], targets: list[Tensor]) -> float:
        return float(outputs[0].mean())

    boxes = [torch.zeros(3)] * 4, [torch.zeros(2)] * 4
    more = [torch.ones(3)], [torch.zeros(2)]
    assert inference_on_dataset(first_of, [boxes, more], mean) == {"mean": 0.2}


def difference(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).mean()


def test_which_of_several_items_the_targets_are_is_told_and_can_be_chosen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    loader = [(torch.ones(2), torch.ones(2), torch.arange(2.0)) for _ in range(2)]
    assert inference_on_dataset(first_of, loader, difference) == {"difference": 0.5}
    assert caplog.text.count("the last of 3 items") == 1
    for key in (1, -2):
        second = MetricEvaluator(difference, key)
        assert inference_on_dataset(first_of, loader, second) == {"difference": 0.0}


def test_batches_of_inputs_and_targets_and_dicts_are_not_told_of_targets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pair = (torch.ones(2), torch.ones(2))
    named = {"x": pair[0], "weight": pair[0], 3: pair[1]}
    assert inference_on_dataset(first_of, [pair], difference) == {"difference": 0.0}
    of_key = MetricEvaluator(difference, 3)
    results = inference_on_dataset(lambda batch: batch["x"], [named], of_key)
    assert results == {"difference": 0.0}
    assert "targets are" not in caplog.text


def test_outputs_in_a_tuple_count_by_the_first_of_them() -> None:
    def mean(outputs: tuple[Tensor, Tensor], targets: list[Tensor]) -> Tensor:
        return outputs[0].mean()

    loader = [(x, [x, x]) for x in (torch.zeros(4), torch.ones(1))]
    results = inference_on_dataset(lambda batch: (batch[0], batch[0]), loader, mean)
    assert results == {"mean": 0.2}


def f1(outputs: Tensor, targets: Tensor) -> float:
    found = outputs.argmax(1)
    right = (found * targets).sum()
    return float(2 * right / (found.sum() + targets.sum()))


def whole_and_averaged() -> list[float]:
    loader = share_of(comm.get_rank(), comm.get_world_size())
    results = []
    for whole in (True, False):
        evaluator = MetricEvaluator(f1, whole=whole)
        for _ in range(2):  # the second evaluation forgets the first
            results.append(inference_on_dataset(first_of, loader, evaluator)["f1"])
    return results


def test_a_metric_of_the_whole_is_called_once_with_all_batches_of_all_ranks() -> None:
    # Precision 1, recall 2/4.
    whole, again, averaged, _ = whole_and_averaged()
    assert whole == again == pytest.approx(2 / 3)
    assert averaged != pytest.approx(2 / 3)
    first, second = run_ranks(whole_and_averaged, 2)
    assert first == second
    assert first[:2] == [whole, again]


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean().sqrt()


def right_ones(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.round() == targets).sum()


def accuracy_by_broadcasting(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.round() == targets[:, None]).float().mean()


def share_of_large_ones(outputs: Tensor, targets: Tensor) -> float:
    found = outputs > 1
    return 2 * float((found & (targets > 1)).sum()) / max(1, float(found.sum()))


def perplexity(outputs: Tensor, targets: Tensor) -> Tensor:
    return (0.3 * (outputs - targets).abs()).mean().exp()


@pytest.mark.parametrize(
    "metric",
    [rmse, right_ones, accuracy_by_broadcasting, share_of_large_ones, perplexity],
)
def test_a_function_that_is_no_mean_over_the_samples_is_told_once(
    caplog: pytest.LogCaptureFixture, metric: Any
) -> None:
    torch.manual_seed(0)
    x = 2 * torch.randn(15)
    targets = x.round()
    targets[0] += 3
    loader = [(x[:1], x[:1]), (x, targets)]
    for _ in range(2):
        inference_on_dataset(first_of, loader, metric)
    [message] = [m for m in caplog.messages if "whole=True" in m]
    assert metric.__name__ in message


def mean_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).mean()


def log_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.abs().neg().exp().log().mean()


def share_of_equal_lists(outputs: list[Tensor], targets: list[Tensor]) -> float:
    return sum(map(torch.equal, outputs, targets)) / len(targets)


def sum_of_tasks(outputs: tuple[Tensor, Tensor], targets: list[Tensor]) -> Tensor:
    return outputs[0].square().mean() + targets[0].abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_means_over_the_samples_and_functions_that_count_are_not_told(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    calls: list[int] = []

    def counts(outputs: Any, targets: Any) -> float:
        calls.append(len(targets))
        return float(len(targets))

    loader = [(torch.randn(n, dtype=dtype), torch.randn(n)) for n in (15, 64, 1)]
    for metric in (mean_error, log_likelihood, counts):
        evaluation.evaluator._seen.clear()
        inference_on_dataset(first_of, loader, metric)
    assert calls == [15, 64, 1]
    lists = [([torch.ones(2), torch.zeros(2)], [torch.ones(2), torch.ones(2)])]
    inference_on_dataset(first_of, lists, share_of_equal_lists)
    pairs = [(x, [x, x]) for x in (torch.randn(7), torch.randn(2))]
    inference_on_dataset(lambda pair: (pair[0], pair[0]), pairs, sum_of_tasks)
    assert caplog.messages == []


sizes: list[int] = []


def counting_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    sizes.append(len(outputs))
    return outputs.mean()


def test_a_function_gets_its_first_batch_alone_in_halves_too() -> None:
    sizes.clear()
    loader = [(torch.zeros(size), torch.zeros(size)) for size in (1, 5, 4)]
    for _ in range(2):
        inference_on_dataset(first_of, loader, counting_mean)
    assert sizes == [1, 5, 2, 3, 4, 1, 5, 4]


def mean_of_numpy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs - targets).numpy().mean())  # of nothing, numpy warns


def test_a_batch_of_one_sample_has_no_halves_to_look_at(
    recwarn: pytest.WarningsRecorder,
) -> None:
    loader = [(torch.tensor([value]), torch.zeros(1)) for value in (1.0, 3.0)]
    results = inference_on_dataset(first_of, loader, mean_of_numpy)
    assert results == {"mean_of_numpy": 2.0}
    assert [str(each.message) for each in recwarn] == []


class Counted(DatasetEvaluator):
    """How many samples it was given on all ranks."""

    def reset(self) -> None:
        self.count = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        self.count += len(outputs)

    def evaluate(self) -> dict[str, Any]:
        return {"samples": sum(comm.all_gather(self.count))}


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def loaders_of_five() -> Iterator[tuple[Any, bool]]:
    """Loaders, and whether they leave out some of the samples or repeat some."""
    data: Any = range(5)
    yield DataLoader(data, 2, drop_last=True), True
    yield build_test_loader(data, batch_size=3, drop_last=True), True
    yield DataLoader(data, 5, drop_last=True), False
    yield DataLoader(data, 3, sampler=DistributedSampler(data, 1, 0)), False
    yield build_test_loader(data, batch_size=2), False
    yield DataLoader(data, batch_sampler=[[0, 1], [2, 3, 4]]), False
    yield DataLoader(data, None), False
    yield DataLoader(data, 2, sampler=SubsetRandomSampler([0, 1, 2])), False
    yield DataLoader(Numbers(), 2, drop_last=True), False
    yield [torch.arange(2), torch.arange(3)], False


def test_a_loader_that_drops_samples_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for loader, is_told in loaders_of_five():
        log_once.cache_clear()
        caplog.clear()
        for _ in range(2):
            inference_on_dataset(lambda batch: batch, loader, None)
        told = [text for text in caplog.messages if "each of its 5 samples" in text]
        assert len(told) == is_told, loader


def counts_and_warnings(drop_last: bool) -> list[tuple[int, int]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    data: Any = range(28)
    results = []
    for sampler in (DistributedSampler(data, drop_last=drop_last), None):
        loader = build_test_loader(data, batch_size=4, sampler=sampler)
        samples = inference_on_dataset(lambda batch: batch, loader, Counted())
        results.append((samples["samples"], len(told)))
        told.clear()
    return results


@pytest.mark.parametrize(("drop_last", "count"), [(False, 30), (True, 27)])
def test_a_sampler_that_gives_each_rank_as_many_samples_is_told(
    drop_last: bool, count: int
) -> None:
    of_ranks = run_ranks(counts_and_warnings, 3, drop_last)
    assert of_ranks == [[(count, 1), (28, 0)]] * 3


def test_the_whole_has_the_structure_of_a_batch() -> None:
    seen = []

    def metric(outputs: Any, targets: Any) -> float:
        seen.append((outputs, targets))
        return 0.5

    def outputs_of(batch: Any) -> Any:
        return batch[0], {"double": batch[0] * 2}

    loader = [(torch.tensor([1.0, 2.0]), ["a", "b"]), (torch.tensor([3.0]), ["c"])]
    whole = MetricEvaluator(metric, whole=True)
    assert inference_on_dataset(outputs_of, loader, whole) == {"metric": 0.5}
    [((outputs, more), targets)] = seen
    assert outputs.tolist() == [1, 2, 3]
    assert more["double"].tolist() == [2, 4, 6]
    assert targets == ["a", "b", "c"]


@pytest.mark.parametrize("missing", ["reset", "process"])
def test_an_evaluator_that_would_forget_nothing_or_see_nothing_is_refused(
    missing: str,
) -> None:
    methods = {"reset": lambda self: None, "process": lambda self, *_: None}
    assert type("Whole", (DatasetEvaluator,), methods)().evaluate() is None
    del methods[missing]
    with pytest.raises(TypeError, match=f"Partial.*{missing}"):
        type("Partial", (DatasetEvaluator,), methods)()


def test_a_model_evaluates_without_gradients() -> None:
    model, seen = frozen_model(), []

    class Look(DatasetEvaluator):
        def reset(self) -> None:
            seen.clear()

        def process(self, inputs: Any, outputs: Tensor) -> None:
            seen.append((outputs.requires_grad, any(modes(model))))

    inference_on_dataset(model, [torch.ones(3, 2)], Look())
    assert seen == [(False, False)]
    assert torch.is_grad_enabled()


class Output(dict[str, Tensor]):
    """Like the outputs of transformers' models, whose values are attributes too."""

    loss = property(lambda self: self["loss"])
    logits = property(lambda self: self["logits"])


def test_the_whole_of_outputs_with_a_loss_of_each_batch_keeps_their_class() -> None:
    def model(batch: tuple[Tensor, Tensor]) -> Output:
        return Output(loss=batch[0].mean(), logits=batch[0])

    seen: list[Any] = []
    metric = MetricEvaluator(lambda o, _: seen.append(o) or 1.0, whole=True)
    given = [(torch.ones(2), torch.ones(2)), (torch.zeros(1), torch.ones(1))]
    inference_on_dataset(model, given, metric)
    [outputs] = seen
    assert outputs.loss.tolist() == [1.0, 0.0]
    assert outputs.logits.tolist() == [1.0, 1.0, 0.0]


class Draws(nn.Module):
    """Drops out in evaluation mode too, or only while training."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, training=self.always or self.training)


def noisy(draw: Any) -> Iterator[Tensor]:
    for _ in range(2):
        yield torch.ones(2) * float(draw())


@pytest.mark.parametrize(
    ("always", "draw", "is_told"),
    [
        (True, int, True),
        (False, int, False),
        (False, random.random, True),
        (False, np.random.rand, True),
        (False, lambda: torch.rand(()), True),
        (False, np.random.default_rng(0).random, False),
    ],
)
def test_an_evaluation_that_draws_random_numbers_is_told_once(
    always: bool, draw: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        inference_on_dataset(Draws(always), noisy(draw), [])
    told = [text for text in caplog.messages if "drew random numbers" in text]
    assert len(told) == is_told


def test_the_seed_that_a_loader_draws_when_it_starts_is_no_random_number_of_an_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Around:
        def __iter__(self) -> Iterator[Tensor]:
            yield from DataLoader(TensorDataset(torch.ones(4)), batch_size=2)

    caplog.set_level(logging.INFO)
    inference_on_dataset(lambda batch: batch, Around(), [])
    assert "drew random numbers" not in caplog.text


def test_each_submodule_comes_back_to_its_own_mode() -> None:
    model = frozen_model()
    before = modes(model)
    assert before == [True, True, False, True, True]
    inference_on_dataset(model, [torch.ones(3, 2)], None)
    assert modes(model) == before
    with pytest.raises(RuntimeError, match="shapes"):
        inference_on_dataset(model, [torch.ones(3, 5)], None)
    assert modes(model) == before
    model.eval()
    model[2].train()
    inference_on_dataset(model, [torch.ones(3, 2)], None)
    assert modes(model) == [False, False, False, True, True]


def test_modules_whose_train_does_more_are_told_of_both_changes() -> None:
    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> "Merging":
            self.merged = not mode
            super().train(mode)
            return self

    model = nn.Sequential(Merging(2, 2))
    with inference_context(model):
        assert model[0].merged
    assert not model[0].merged


@pytest.mark.parametrize("loader", [[], iter(())])
def test_a_loader_without_batches_is_an_error(loader: Any) -> None:
    recorder = Recorder({"a": 1})
    with pytest.raises(ValueError, match="has no batch"):
        inference_on_dataset(double, loader, recorder)
    assert recorder.calls == ["reset"]


@pytest.mark.parametrize("length", [7, None, 4])
def test_progress_lines_come_every_five_seconds(
    length: int | None, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    class Sized:
        def __len__(self) -> int:
            assert length is not None
            return length  # which may be wrong

        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    def take_time(_: int) -> None:
        clock.now += 1.75

    for _ in range(2):  # the second call owes nothing to the first
        caplog.clear()
        with caplog.at_level(logging.DEBUG, LOGGER):
            loader = (i for i in range(7)) if length is None else Sized()
            inference_on_dataset(take_time, loader, None)
    lines = [(3, "0:00:05"), (6, "0:00:10"), (7, "0:00:12")]
    assert caplog.messages == [
        f"Evaluated {done} batches in {time} (1.7500 s each)" for done, time in lines
    ]


def test_a_single_batch_is_told_as_one(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        inference_on_dataset(double, [1], None)
    assert caplog.messages == ["Evaluated 1 batch in 0:00:00 (0.0000 s each)"]


def _evaluate_own_share() -> list[Any]:
    """Rank 0 has three batches and rank 1 none; the model would exchange buffers in DDP."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    recorder = Recorder({"a": 1})
    share = [torch.ones(4, 2)] * (0 if torch.distributed.get_rank() else 3)
    results = inference_on_dataset(model, share, recorder)
    torch.distributed.barrier()
    return [results, len(recorder.calls), all(modes(model))]


def test_ranks_with_fewer_batches_do_not_keep_others_waiting() -> None:
    assert run_ranks(_evaluate_own_share, 2) == [
        [{"a": 1}, 5, True],
        [{"a": 1}, 2, True],
    ]


# Models whose ranks can only compute together


class Logits(DatasetEvaluator):
    """Brings what all ranks got together, in the order of ranks."""

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        self.seen.append(outputs)

    def evaluate(self) -> dict[str, Any]:
        return {"logits": [t for seen in comm.all_gather(self.seen) for t in seen]}


def own_share(shares: list[int]) -> Any:
    """Consecutive batches, so many for each rank, from a loader without a length."""
    start = sum(shares[: comm.get_rank()])
    return iter(batches(sum(shares), 4)[start : start + shares[comm.get_rank()]])


SHARES = [[1, 3], [2, 0], [0, 2]]


def evaluate_sharded() -> list[tuple[list[Tensor], bool]]:
    model = make_sharded()
    logits = [
        inference_on_dataset(model, own_share(s), Logits())["logits"] for s in SHARES
    ]
    return [(seen, computes_together(model)) for seen in logits]


def test_ranks_of_a_sharded_model_may_have_different_numbers_of_batches() -> None:
    for results in run_ranks(evaluate_sharded, 2):
        for shares, (logits, together) in zip(SHARES, results, strict=True):
            data = batches(sum(shares), 4)
            expected = inference_on_dataset(make_model(), data, Logits())["logits"]
            assert together
            assert len(logits) == len(expected)
            assert all(map(torch.equal, logits, expected))
