"""MMEngine's restarts, one cycle, plateaus and momentum; schedulers of users."""

import copy
import json
import pickle
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hooktrain.compat import mmengine as ours
from hooktrain.compat.mmengine import CosineRestartLR, OneCycleLR, ReduceOnPlateauLR
from hooktrain.compat.mmengine.registry import PARAM_SCHEDULERS
from hooktrain.solver import OptimWrapper
from scheduler_toys import SAME_EACH_TIME, rates, run, schedulers, sgd, theirs, values

# MMEngine wants optimizer.step() to be called first, which needs gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")

OUR_MIXINS = (ours.LRSchedulerMixin, ours.MomentumSchedulerMixin)
THEIR_MIXINS = (
    theirs.lr_scheduler.LRSchedulerMixin,
    theirs.momentum_scheduler.MomentumSchedulerMixin,
)


def near(reference: list[list[float]]) -> list[Any]:
    return [pytest.approx(step, rel=1e-12, abs=1e-15) for step in reference]


@SAME_EACH_TIME
@given(
    st.integers(2, 60),
    st.floats(0.0, 1.0),
    st.sampled_from(["cos", "linear"]),
    st.booleans(),
    st.integers(0, 5),
)
def test_one_cycle_has_the_values_of_mmengine(
    total: int, start: float, strategy: Any, three_phase: bool, begin: int
) -> None:
    # Corners closer than this to each other divide by (nearly) nothing in MMEngine.
    if abs(start * total - 1) < 1e-3 or abs((1 - start) * total) < 1e-3:
        return
    args = {"pct_start": start, "anneal_strategy": strategy, "three_phase": three_phase}
    spec = ("OneCycle", {"eta_max": 0.7, "begin": begin, "end": begin + total, **args})
    steps = begin + total + 2
    reference = values(theirs, [spec], sgd(0.1, 0.37), steps=steps)
    assert values(ours, [spec], sgd(0.1, 0.37), steps=steps) == near(reference)


def test_a_cycle_overwrites_what_others_do() -> None:
    optimizer = OptimWrapper(sgd(1.0, 1.0))
    scheduler = OneCycleLR(optimizer, 3.0, 10, div_factor=10.0)
    assert rates(optimizer) == pytest.approx([0.3, 0.3])
    optimizer.param_groups[0]["lr"] = 50.0
    scheduler.step()
    assert rates(optimizer)[0] == rates(optimizer)[1]
    run(optimizer, [scheduler], 8)
    with pytest.raises(ValueError, match="total_steps=10, and this is step 11"):
        run(optimizer, [scheduler], 2)


def test_a_cycle_ends_with_exactly_its_final_value() -> None:
    optimizer = sgd(1.0)
    scheduler = OneCycleLR(optimizer, 1.0, final_div_factor=5.0, end=30)
    assert run(optimizer, [scheduler], 30)[-1] == 0.04 / 5.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: OneCycleLR(o, 1.0, pct_start=30), "pct_start must lie .*: 30"),
        (lambda o: CosineRestartLR(o, [3, 3]), r"periods .*\[3, 3\], .*\(1,\)"),
        (lambda o: ReduceOnPlateauLR(o, rule="min"), "'less' or 'greater'.*'min'"),
        (lambda o: ReduceOnPlateauLR(o, threshold=-1), r"at least 0 .*threshold=-1"),
        (lambda o: ReduceOnPlateauLR(o, factor=1.0), r"in \[0, 1\): .*factor=1.0"),
        (lambda o: ReduceOnPlateauLR(o, min_value=[0, 0]), r"of the 1 .*\[0, 0\]"),
        (lambda o: OneCycleLR(o, 1.0, anneal_strategy="up"), "'cos' or 'linear'.*'up'"),
    ],
)
def test_a_wrong_argument_writes_nothing(make: Any, message: str) -> None:
    optimizer = sgd(0.1)
    before = [*optimizer.param_groups[0].items()]
    with pytest.raises(ValueError, match=message):
        make(optimizer)
    assert [*optimizer.param_groups[0].items()] == before


METRICS = st.lists(
    st.sampled_from([1.0, 0.9, 0.8999, 0.85, 0.5, -0.2, 2.0]), max_size=40
)


def plateau(library: Any, metrics: list[float], **args: Any) -> list[list[float]]:
    """The values after each metric; an epoch is counted after each."""
    optimizer, seen = sgd(0.1, 0.02), []
    scheduler = library.ReduceOnPlateauLR(optimizer, "acc", **args)
    for metric in metrics:
        scheduler.step({"acc": metric})
        scheduler.step()
        seen.append(rates(optimizer))
    return seen


PLATEAU = {
    "factor": st.floats(0.1, 0.9),
    "patience": st.integers(0, 3),
    "threshold": st.sampled_from([0.0, 1e-3, 0.1]),
    "cooldown": st.integers(0, 3),
    "eps": st.sampled_from([1e-8, 0.005]),
    "rule": st.sampled_from(["less", "greater"]),
    "threshold_rule": st.sampled_from(["rel", "abs"]),
    "min_value": st.sampled_from([0.0, 0.01, [0.03, 0.001]]),
    "begin": st.integers(0, 5),
}


@settings(SAME_EACH_TIME, max_examples=80)
@given(METRICS, st.fixed_dictionaries({"end": st.just(30)}, optional=PLATEAU))
def test_a_plateau_has_the_values_of_mmengine(metrics: Any, args: Any) -> None:
    assert plateau(ours, metrics, **args) == near(plateau(theirs, metrics, **args))


def test_a_plateau_asks_an_overridden_is_better_as_in_mmengine() -> None:
    class NeverBetter:
        def _is_better(self, a: float, best: float) -> bool:
            return False

    values = []
    for library in (ours, theirs):
        optimizer = sgd(0.1)
        kind = type("Own", (NeverBetter, library.ReduceOnPlateauLR), {})
        scheduler = kind(optimizer, "acc", patience=1)
        for metric in (3.0, 2.0, 1.0):
            scheduler.step({"acc": metric})
            values.append(rates(optimizer))
    assert values[0] != values[1]
    assert values[:3] == values[3:]


def fed(scheduler: Any, times: int) -> list[float]:
    """The rates of a plateau that gets no better."""
    seen = []
    for _ in range(times):
        scheduler.step({"loss": 1.0})
        scheduler.step()
        seen += rates(scheduler.optimizer)
    return seen


@pytest.mark.parametrize("library", [ours, theirs])
def test_a_plateau_goes_on_where_it_was(library: Any) -> None:
    options = {"factor": 0.5, "patience": 3, "cooldown": 2}
    whole = fed(ReduceOnPlateauLR(sgd(1.0), "loss", **options), 20)
    assert whole[-1] == 0.125
    first = library.ReduceOnPlateauLR(sgd(1.0), "loss", **options)
    fed(first, 7)
    second = ReduceOnPlateauLR(sgd(1.0), "loss", **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert fed(second, 13) == whole[7:]


@SAME_EACH_TIME
@given(st.lists(schedulers(), min_size=1, max_size=2))
def test_the_momentum_of_sgd_and_the_first_beta_of_adam_are_scheduled(
    specs: Any,
) -> None:
    momentum = itemgetter("momentum")

    def first_beta(group: dict[str, Any]) -> Any:
        return group["betas"][0]

    reference = values(theirs, specs, sgd(0.1, 0.37), momentum, form="Momentum")
    seen = values(ours, specs, sgd(0.1, 0.37), momentum, form="Momentum")
    assert seen == near(reference)
    optimizer = adam(0.1)
    reference = values(theirs, specs, adam(0.1), momentum, form="Momentum")
    seen = values(ours, specs, optimizer, form="Momentum", read=first_beta)
    assert seen == near(reference)
    (group,) = optimizer.param_groups
    assert group["betas"] == (group["momentum"], 0.95)


NAMES = [name for name in dir(theirs) if name.endswith("Momentum")]


@pytest.mark.parametrize("name", NAMES)
def test_momentum_schedulers_are_known_by_their_names(name: str) -> None:
    kind = getattr(ours, name)
    assert PARAM_SCHEDULERS.get(name) is pickle.loads(pickle.dumps(kind)) is kind


def adam(*lrs: float) -> torch.optim.Adam:
    return torch.optim.Adam(sgd(*lrs).param_groups, betas=(0.8, 0.95))


def subclasses_for_mmengine(library: Any, mixins: Any) -> dict[str, Any]:
    """Schedulers as users of MMEngine write them: recursive, by keyword, with a mixin."""

    class QuadraticParamScheduler(library._ParamScheduler):  # type: ignore[misc]
        def __init__(
            self,
            optimizer: Any,
            param_name: str,
            power: int = 2,
            begin: int = 0,
            end: int = 20,
            **kw: Any,
        ) -> None:
            self.total_iters, self.power = end - begin, power
            super().__init__(
                optimizer=optimizer, param_name=param_name, begin=begin, end=end, **kw
            )

        def _get_value(self) -> list[Any]:
            rise = (2 * self.last_step + 1) / self.total_iters**self.power
            values = []
            for base, group in zip(
                self.base_values, self.optimizer.param_groups, strict=True
            ):
                value = group[self.param_name] if self.last_step else 0
                values.append(value + base * rise)
            return values

    class QuadraticLR(mixins[0], QuadraticParamScheduler):  # type: ignore[misc]
        pass

    class QuadraticMomentum(mixins[1], QuadraticParamScheduler):  # type: ignore[misc]
        pass

    class HalvingLR(library.StepLR):  # type: ignore[misc]
        def _get_value(self) -> list[Any]:
            factor = 0.5 if self.last_step % self.step_size == 1 else 1.0
            return [
                group[self.param_name] * factor for group in self.optimizer.param_groups
            ]

    return {
        "QuadraticLR": lambda o: QuadraticLR(o, begin=3, end=13, by_epoch=False),
        "QuadraticMomentum": lambda o: QuadraticMomentum(o, 2, 0),
        "HalvingLR": lambda o: HalvingLR(o, step_size=4, end=30),
        "converted": lambda o: HalvingLR.build_iter_from_epoch(
            o, step_size=2, epoch_length=3
        ),
    }


def trajectory(optimizer: Any, scheduler: Any, steps: int) -> list[Any]:
    seen = []
    for _ in range(steps):
        scheduler.step()
        for group in optimizer.param_groups:
            seen.append((group["lr"], group.get("momentum"), group.get("betas")))
    return seen


@pytest.mark.parametrize(
    "name", ["QuadraticLR", "QuadraticMomentum", "HalvingLR", "converted"]
)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("at", [1, 7, 25])
def test_a_subclass_written_for_mmengine_resumes_with_its_values(
    name: str, make: Any, at: int
) -> None:
    build_theirs = subclasses_for_mmengine(theirs, THEIR_MIXINS)[name]
    build = subclasses_for_mmengine(ours, OUR_MIXINS)[name]
    optimizers = [make(0.1, 0.37) for _ in range(3)]
    reference, whole, resumed = optimizers
    expected = trajectory(reference, build_theirs(reference), 40)
    first, second = build(whole), build(resumed)
    assert trajectory(whole, first, at) == expected[: 2 * at]
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    second.load_state_dict(first.state_dict())
    assert trajectory(resumed, second, 40 - at) == expected[2 * at :]
