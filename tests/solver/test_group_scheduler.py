"""What all parameter schedulers do, where they differ from MMEngine's, and their states."""

import copy
import json
import logging
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from scheduler_toys import (
    SAME_EACH_TIME,
    THEIR_MIXINS,
    chains,
    ours,
    rates,
    run,
    schedulers,
    sgd,
    theirs,
)

from hooktrain.solver.param_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    GroupParamScheduler,
    LinearLR,
    PolyLR,
    StepLR,
)


class SawToothLR(GroupParamScheduler):
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
def test_shares_of_0_and_shares_of_your_own_compose(
    make: Any, expected: list[float]
) -> None:
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


def test_alone_it_does_not_drift_and_logs_each_change_if_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_resumed_and_copied_schedulers_keep_their_initial_values() -> None:
    def make(optimizer: Any) -> Any:
        return ours.CosineRestartLR(optimizer, [3, 3], [1.0, 0.5], eta_min_ratio=0.1)

    first, second = make(sgd(1.0)), make(sgd(8.0))
    run(first.optimizer, [first], 2)
    second.load_state_dict(first.state_dict())
    copies = [second, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    rest = run(first.optimizer, [first], 4)
    for scheduler in copies:
        assert run(scheduler.optimizer, [scheduler], 4) == rest
        assert scheduler.base_values == [1.0]


def test_a_plateau_goes_on_where_it_was_and_loads_the_state_of_mmengine() -> None:
    def make(library: Any) -> Any:
        return library.ReduceOnPlateauLR(
            sgd(1.0), "loss", factor=0.5, patience=3, cooldown=2
        )

    def feed(scheduler: Any, times: int) -> list[float]:
        seen = []
        for _ in range(times):
            scheduler.step({"loss": 1.0})
            scheduler.step()
            seen += rates(scheduler.optimizer)
        return seen

    whole = feed(make(ours), 20)
    assert whole[-1] == 0.125
    for library in (ours, theirs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second = make(library), make(ours)
        feed(first, 7)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert feed(second, 13) == whole[7:]


def test_the_state_names_what_it_holds() -> None:
    optimizer = sgd(1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5, begin=1, end=8, by_epoch=False)
    run(optimizer, [scheduler], 3)
    fixed = {"param_name": "lr", "by_epoch": False, "begin": 1, "end": 8}
    values = {"base_values": [1.0], "start_values": [1.0], "written_values": [0.25]}
    expected = {**fixed, **values, "_global_step": 3, "_last_value": [0.25]}
    assert scheduler.state_dict() == expected


def test_another_range_than_that_of_the_state_is_used_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = LinearLR(sgd(1.0), 0.0, end=5)
    run(first.optimizer, [first], 2)
    optimizer = sgd(1.0)
    second = LinearLR(optimizer, 0.0, end=9)
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(first.state_dict())
    assert "LinearLR(begin=0, end=9, " in caplog.text
    assert "had the range [0, 5) when it was saved" in caplog.text
    second.step()
    assert rates(optimizer) == [0.375]


@pytest.mark.parametrize("change", [{"by_epoch": False}, {"param_name": "momentum"}])
def test_a_foreign_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    optimizer = sgd(1.0, 2.0)
    scheduler = StepLR(optimizer, 1)
    scheduler.step()
    before = scheduler.state_dict()
    ((key, value),) = change.items()
    with pytest.raises(ValueError, match=f"{key}={value!r}, and this is StepLR"):
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


# Schedulers of your own


OUR_MIXINS = (ours.LRSchedulerMixin, ours.MomentumSchedulerMixin)


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
            if self.last_step == 0:
                return [base_value * rise for base_value in self.base_values]
            return [
                group[self.param_name] + base_value * rise
                for base_value, group in zip(
                    self.base_values, self.optimizer.param_groups, strict=True
                )
            ]

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


@pytest.mark.parametrize(
    "name", ["QuadraticLR", "QuadraticMomentum", "HalvingLR", "converted"]
)
@pytest.mark.parametrize(
    "make", [sgd, lambda *lrs: torch.optim.Adam(sgd(*lrs).param_groups)]
)
@pytest.mark.parametrize("at", [1, 7, 25])
def test_a_subclass_written_for_mmengine_has_its_values_here_and_resumes(
    name: str, make: Any, at: int
) -> None:
    def values(optimizer: Any, scheduler: Any, steps: int) -> list[Any]:
        seen = []
        for _ in range(steps):
            scheduler.step()
            seen.append(
                [
                    (group["lr"], group.get("momentum"))
                    for group in optimizer.param_groups
                ]
            )
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = make(0.1, 0.37)
        expected = values(
            reference,
            subclasses_for_mmengine(theirs, THEIR_MIXINS)[name](reference),
            40,
        )
    whole, resumed = make(0.1, 0.37), make(0.1, 0.37)
    first, second = (
        subclasses_for_mmengine(ours, OUR_MIXINS)[name](o) for o in (whole, resumed)
    )
    assert values(whole, first, at) == expected[:at]
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    second.load_state_dict(first.state_dict())
    assert values(resumed, second, 40 - at) == expected[at:]
    if "Momentum" in name and "betas" in resumed.param_groups[0]:
        assert resumed.param_groups[0]["betas"][0] == expected[-1][0][1]


# What is refused later


def test_what_cannot_be_scheduled_is_refused() -> None:
    optimizer = sgd(1.0)
    scheduler = StepLR(optimizer, 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(
        ValueError, match=r"are 2 parameter groups now: make a new StepLR"
    ):
        scheduler.step()
    several: Any = SimpleNamespace(param_groups={"a": [], "b": []})
    with pytest.raises(TypeError, match="one optimizer or OptimWrapper"):
        StepLR(several, 2)
    with pytest.raises(
        NotImplementedError, match=r"must define _share\(k\) or _get_value\(\)"
    ):
        GroupParamScheduler(sgd(1.0), "lr")


# Tensors


def test_a_rate_in_a_tensor_is_filled_in_place_and_composes() -> None:
    lr = torch.tensor(1.0)
    optimizer = sgd(lr)
    made = [LinearLR(optimizer, 0.25, end=4), StepLR(optimizer, 2, gamma=0.5)]
    assert run(optimizer, made, 5) == [0.25, 0.5, 0.375, 0.5, 0.25]
    assert rates(optimizer)[0] is lr
    assert type(optimizer.param_groups[0]["initial_lr"]) is float


def test_a_rate_in_a_tensor_is_not_read_while_nobody_else_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = sgd(torch.tensor(0.1))
    scheduler = ExponentialLR(optimizer, 0.9)

    def refuse(tensor: Any) -> None:
        raise AssertionError("a host-device synchronisation")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", refuse)
        patch.setattr(torch.Tensor, "__float__", refuse)
        for _ in range(10):
            scheduler.step()
    assert rates(optimizer)[0].item() == pytest.approx(0.1 * 0.9**10, rel=1e-6)
