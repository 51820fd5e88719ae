"""Parameter schedulers: MMEngine's values, what it cannot do, and their states."""

import copy
import inspect
import json
import logging
import pickle
import warnings
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hooktrain.compat import mmengine as ours
from hooktrain.compat.mmengine.param_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LinearParamScheduler,
    PolyLR,
    StepLR,
    _ParamScheduler,
    adapted,
)
from hooktrain.compat.mmengine.registry import PARAM_SCHEDULERS
from processes import run_program
from scheduler_toys import (
    SAME_EACH_TIME,
    chains,
    rates,
    run,
    schedulers,
    sgd,
    theirs,
    values,
)

# MMEngine wants optimizer.step() to be called first, which needs gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")

OUR_MIXINS = (ours.LRSchedulerMixin, ours.MomentumSchedulerMixin)
THEIR_MIXINS = (
    theirs.lr_scheduler.LRSchedulerMixin,
    theirs.momentum_scheduler.MomentumSchedulerMixin,
)
Values = list[list[float]]


def near(reference: Values) -> list[Any]:
    return [pytest.approx(step, rel=1e-12, abs=1e-15) for step in reference]


def assert_same(specs: Any, **kwargs: Any) -> None:
    reference = values(theirs, specs, sgd(0.1, 0.37), **kwargs)
    assert values(ours, specs, sgd(0.1, 0.37), **kwargs) == near(reference)


@settings(SAME_EACH_TIME, max_examples=240)
@given(
    st.one_of(chains(), st.lists(schedulers(), min_size=1, max_size=3)),
    st.integers(0, 99),
    st.sampled_from([1.0, 1.0, 0.1, 0.7, 10.0]),
)
def test_schedulers_in_any_company_have_the_values_of_mmengine(
    specs: Any, at: int, factor: float
) -> None:
    def change(step: int, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor if step == at else 1.0

    assert_same(specs, change=change)


def test_any_number_of_the_groups_is_scheduled() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], weight_decay=0.5)
    scheduler = LinearParamScheduler(optimizer, "weight_decay", 0.0, end=3)
    seen = []
    for _ in range(4):
        seen.append(optimizer.param_groups[0]["weight_decay"])
        scheduler.step()
    assert seen == [0.0, 0.25, 0.5, 0.5]


@SAME_EACH_TIME
@given(
    st.integers(1, 30), st.sampled_from([{}, {"eta_min": 0.01}, {"eta_min_ratio": 0.3}])
)
def test_a_cosine_rises_again_after_its_floor(length: int, floor: Any) -> None:
    assert_same([("CosineAnnealing", {"T_max": length, **floor})])


@SAME_EACH_TIME
@given(schedulers(), st.integers(1, 7))
def test_epochs_become_iterations(spec: Any, epoch_length: int) -> None:
    family, args = spec

    def rates_of(library: Any) -> list[float]:
        optimizer = sgd(0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make = getattr(library, family + "LR").build_iter_from_epoch
            scheduler = make(optimizer, **args, epoch_length=epoch_length)
            assert not scheduler.by_epoch
            assert scheduler.end == args["end"] * epoch_length
            return run(optimizer, [scheduler], 100)

    assert rates_of(ours) == pytest.approx(rates_of(theirs), rel=1e-12, abs=1e-15)


FROM_MMENGINE = ("CosineRestart", "OneCycle", "ReduceOnPlateau")
NAMES = [
    name
    for name in dir(theirs)
    if name.endswith(("LR", "ParamScheduler", "Momentum"))
    and not name.startswith(("_", *FROM_MMENGINE))
]


@pytest.mark.parametrize("name", NAMES)
def test_each_scheduler_is_registered_and_pickled_by_mmengines_name(name: str) -> None:
    kind = getattr(ours, name)
    assert issubclass(kind, ours._ParamScheduler)
    assert PARAM_SCHEDULERS.find(name) is pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("ParamScheduler")])
def test_arguments_have_mmengines_names_and_defaults(name: str) -> None:
    def arguments(kind: Any) -> dict[str, Any]:
        named = inspect.signature(kind).parameters.values()
        return {parameter.name: parameter.default for parameter in named}

    expected = arguments(getattr(theirs, name))
    parameters = inspect.signature(getattr(ours, name)).parameters
    mine = arguments(getattr(ours, name))
    assert mine == expected
    positional = [
        key for key in mine if parameters[key].kind.name == "POSITIONAL_OR_KEYWORD"
    ]
    assert positional == list(expected)[: len(positional)]
    by_keyword = {"begin", "end", "last_step", "by_epoch", "verbose", "eta_min_ratio"}
    assert set(mine) - set(positional) <= by_keyword


@pytest.mark.parametrize("name", ["OneCycleLR", "CosineRestartMomentum"])
def test_other_schedulers_are_those_of_mmengine(name: str) -> None:
    found = getattr(ours, name)
    assert issubclass(found, getattr(theirs, name))
    assert issubclass(found, ours._ParamScheduler)
    assert PARAM_SCHEDULERS.find(name) is ours.PARAM_SCHEDULERS.get(name) is found
    # A class of mmengine's own, as code without the recipe imports it.
    assert adapted(getattr(theirs, name)) is adapted(found) is found


@pytest.mark.parametrize(
    ("registry", "name"),
    [
        ("PARAM_SCHEDULERS", "OneCycleLR"),
        ("PARAM_SCHEDULERS", "ReduceOnPlateauMomentum"),
        ("HOOKS", "CheckpointHook"),
        ("DATASETS", "ConcatDataset"),
        ("METRICS", "DumpResults"),
        ("MODELS", "MomentumAnnealingEMA"),
    ],
)
def test_what_only_mmengine_has_is_found_whatever_was_imported(
    registry: str, name: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import warnings
warnings.simplefilter("ignore")
from hooktrain.compat.mmengine import {registry}
assert {registry}.get("{name}").__name__ == "{name}"
""")
    done = run_program(script)
    assert done.returncode == 0, done.stdout


def test_a_type_is_found_by_build_param_scheduler_whatever_was_imported(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import warnings
warnings.simplefilter("ignore")
import torch
from hooktrain.compat.mmengine import OptimWrapper, build_param_scheduler
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
cfg = dict(type="CosineRestartLR", periods=[2], restart_weights=[1], eta_min=0.0)
[scheduler] = build_param_scheduler(cfg, OptimWrapper(optimizer))
assert optimizer.param_groups[0]["initial_lr"] == 0.5
""")
    done = run_program(script)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("family", ["Constant", "Linear", "Poly"])
def test_total_iters_is_that_of_mmengine(family: str) -> None:
    made = [
        getattr(library, f"{family}LR")(sgd(1.0), begin=3, end=30)
        for library in (ours, theirs)
    ]
    assert [scheduler.total_iters for scheduler in made] == [26, 26]


def test_the_last_step_has_exactly_the_final_value() -> None:
    optimizer = sgd(1.0)
    scheduler = PolyLR(optimizer, eta_min=0.25, end=30)
    assert run(optimizer, [scheduler], 30)[-1] == 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: StepLR(o, 2, begin=5, end=5), "begin=5, end=5"),
        (lambda o: StepLR(o, 2, last_step=-2), "last_step=-2"),
        (lambda o: ConstantLR(o, factor=1.5), "factor must .* 1.5"),
        (lambda o: LinearLR(o, start_factor=-0.5, end=5), "start_factor must .* -0.5"),
        (lambda o: LinearLR(o, end_factor=2, end=5), "end_factor must .* 2"),
        (
            lambda o: CosineAnnealingLR(o, 9, eta_min=0, eta_min_ratio=0.1),
            "eta_min=0, eta_min_ratio=0.1",
        ),
        (
            lambda o: StepLR.build_iter_from_epoch(o, step_size=2, epoch_length=-1),
            "epoch_length=-1",
        ),
    ],
)
def test_a_wrong_argument_writes_nothing(make: Any, message: str) -> None:
    optimizer = sgd(0.1)
    before = [*optimizer.param_groups[0].items()]
    with pytest.raises(ValueError, match=message):
        make(optimizer)
    assert [*optimizer.param_groups[0].items()] == before


class SawToothLR(_ParamScheduler):
    def __init__(self, optimizer: Any, period: int, **kwargs: Any) -> None:
        self.period = period
        super().__init__(optimizer, "lr", **kwargs)

    def _share(self, k: int) -> float:
        return 1 - (k % self.period) / self.period


# What MMEngine cannot do


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: [LinearLR(o, 0.0, end=5)], [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        (lambda o: [ConstantLR(o, 0.0, end=4)], [0.0, 0.0, 0.0, 1.0, 1.0]),
        (
            lambda o: [LinearLR(o, 0.0, end=5), StepLR(o, 2, gamma=0.5)],
            [0.0, 0.25, 0.25, 0.375, 0.25, 0.25, 0.125],
        ),
        (
            lambda o: [SawToothLR(o, 2, end=5), StepLR(o, 3, gamma=0.5)],
            [1.0, 0.5, 1.0, 0.25, 0.5, 0.5],
        ),
    ],
    ids=["a warm-up", "held", "composed", "of your own"],
)
def test_shares_of_0_compose(make: Any, expected: list[float]) -> None:
    optimizer = sgd(1.0)
    assert run(optimizer, make(optimizer), len(expected)) == pytest.approx(
        expected, rel=1e-12
    )


def test_the_base_stays_where_a_change_cannot_be_divided_by_0() -> None:
    optimizer = sgd(1.0)
    scheduler = CosineAnnealingLR(optimizer, T_max=2)
    run(optimizer, [scheduler], 2)
    assert rates(optimizer) == [0.0]
    optimizer.param_groups[0]["lr"] = 0.5
    scheduler.step()
    assert rates(optimizer) == pytest.approx([0.5])


def test_alone_it_does_not_drift(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = sgd(0.1)
    step = optimizer.step.__func__  # type: ignore[attr-defined]
    scheduler = ExponentialLR(optimizer, 0.999, verbose=True)
    with caplog.at_level(logging.INFO):
        seen = run(optimizer, [scheduler], 500)
    assert seen == [0.1 * 0.999**k for k in range(500)]
    assert "Step 1: lr becomes 9.9900e-02" in caplog.text
    assert optimizer.step.__func__ is step  # type: ignore[attr-defined]


# State


@SAME_EACH_TIME
@given(
    st.one_of(chains(), st.lists(schedulers(), min_size=1, max_size=3)),
    st.integers(0, 90),
)
def test_a_resumed_run_has_the_same_bits(specs: Any, at: int) -> None:
    def make(optimizer: Any) -> list[Any]:
        return [
            getattr(ours, family + "LR")(optimizer, **args) for family, args in specs
        ]

    def optimizers() -> Any:
        return sgd(0.1, torch.tensor(0.37))

    whole = optimizers()
    before = make(whole)
    run(whole, before, at)
    whole.param_groups[0]["lr"] *= 1.7  # by somebody else, after the last step
    saved = json.loads(json.dumps([scheduler.state_dict() for scheduler in before]))
    state = copy.deepcopy(whole.state_dict())
    rest = run(whole, before, 100 - at)
    for with_optimizer in (True, False):
        optimizer = optimizers()
        after = make(optimizer)
        if with_optimizer:
            optimizer.load_state_dict(copy.deepcopy(state))
        for scheduler, loaded in zip(after, saved, strict=True):
            scheduler.load_state_dict(loaded)
        assert run(optimizer, after, 100 - at) == rest
        assert [s.state_dict() for s in after] == [s.state_dict() for s in before]


@SAME_EACH_TIME
@given(st.lists(schedulers(), min_size=1, max_size=2), st.integers(0, 90))
def test_states_of_mmengine_load(specs: Any, at: int) -> None:
    reference, optimizer = sgd(0.1, 0.37), sgd(0.1, 0.37)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, after = (
            [getattr(library, family + "LR")(o, **args) for family, args in specs]
            for library, o in ((theirs, reference), (ours, optimizer))
        )
        run(reference, before, at)
        for scheduler, old in zip(after, before, strict=True):
            scheduler.load_state_dict(old.state_dict())
        mine, expected = (
            run(o, s, 100 - at) for o, s in ((optimizer, after), (reference, before))
        )
    assert mine == pytest.approx(expected, rel=1e-11, abs=1e-15)


def test_copied_schedulers_keep_their_initial_values() -> None:
    first = CosineAnnealingLR(sgd(1.0), 6, eta_min_ratio=0.1)
    second = CosineAnnealingLR(sgd(8.0), 6, eta_min_ratio=0.1)
    run(first.optimizer, [first], 2)
    second.load_state_dict(first.state_dict())
    copied = copy.deepcopy(first)
    rest = run(first.optimizer, [first], 4)
    for scheduler in (second, copied):
        assert run(scheduler.optimizer, [scheduler], 4) == rest


def test_another_range_than_that_of_the_state_is_used() -> None:
    first = LinearLR(sgd(1.0), 0.0, end=5)
    run(first.optimizer, [first], 2)
    optimizer = sgd(1.0)
    second = LinearLR(optimizer, 0.0, end=9)
    second.load_state_dict(first.state_dict())
    second.step()
    assert rates(optimizer) == [0.375]


def test_with_another_number_of_groups_their_own_values_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = sgd(1.0)
    first = LinearLR(whole, 0.0, end=5)
    run(whole, [first], 2)
    optimizer = sgd(1.0, 2.0)
    second = LinearLR(optimizer, 0.0, end=5)
    for group, lr in zip(optimizer.param_groups, (0.5, 1.0), strict=True):
        group["lr"] = lr
    second.load_state_dict(first.state_dict())
    assert "had 1 parameter groups when saved" in caplog.text
    second.step()
    assert rates(optimizer) == [0.75, 1.5]


@pytest.mark.parametrize(
    "change", [{"by_epoch": False}, {"param_name": "weight_decay"}]
)
def test_a_foreign_state_changes_nothing(change: dict[str, Any]) -> None:
    optimizer = sgd(1.0, 2.0)
    scheduler = StepLR(optimizer, 1)
    scheduler.step()
    before = scheduler.state_dict()
    ((key, value),) = change.items()
    with pytest.raises(ValueError, match=f"{key}={value!r}, but this is StepLR"):
        scheduler.load_state_dict(
            {**before, "_global_step": 7, "_last_value": [5.0] * 2, **change}
        )
    assert scheduler.state_dict() == before
    assert rates(optimizer) == [0.1, 0.2]


def test_a_run_goes_on_from_its_last_step_without_a_state() -> None:
    whole = sgd(0.8)
    expected = run(whole, [PolyLR(whole, begin=3, end=13)], 14)
    optimizer = sgd(0.8)
    optimizer.param_groups[0]["lr"] = expected[8]
    with pytest.raises(KeyError, match="initial_lr"):
        PolyLR(optimizer, begin=3, end=13, last_step=5)
    optimizer.param_groups[0]["initial_lr"] = 0.8
    scheduler = PolyLR(optimizer, begin=3, end=13, last_step=5)
    assert run(optimizer, [scheduler], 5) == pytest.approx(expected[9:], rel=1e-12)


# Tensors


def test_a_rate_in_a_tensor_composes() -> None:
    lr = torch.tensor(1.0)
    optimizer = sgd(lr)
    made = [LinearLR(optimizer, 0.25, end=4), StepLR(optimizer, 2, gamma=0.5)]
    assert run(optimizer, made, 5) == [0.25, 0.5, 0.375, 0.5, 0.25]
    assert rates(optimizer)[0] is lr
    assert type(optimizer.param_groups[0]["initial_lr"]) is float


# Momentum, and schedulers of users


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


class Copied(ours.MultiStepLR):
    """With a ``_get_value`` as copies of MMEngine's have it."""

    def _get_value(self) -> list[float]:
        values = [group["lr"] for group in self.optimizer.param_groups]
        if self.last_step not in self.milestones:
            return values
        factor = self.gamma ** self.milestones[self.last_step]
        return [value * factor for value in values]


def test_a_copy_of_mmengine_reads_how_often_a_milestone_is_there() -> None:
    optimizer = sgd(1.0)
    scheduler = Copied(optimizer, milestones=[1, 3, 3], gamma=0.5)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == [1.0, 0.5, 0.5, 0.125]
