import copy
from typing import Any

import pytest
from scheduler_toys import sgd
from torch.optim.lr_scheduler import StepLR as TorchStepLR

from hooktrain.solver import (
    ConstantParamScheduler,
    OptimWrapper,
    OptimWrapperDict,
    build_param_scheduler,
)
from hooktrain.solver.param_scheduler import (
    LinearLR,
    LinearMomentum,
    PolyLR,
    StepLR,
)

RUN = {"max_epochs": 12, "max_iters": 48, "epoch_length": 4}


def two() -> OptimWrapperDict:
    return OptimWrapperDict(a=OptimWrapper(sgd(1.0)), b=OptimWrapper(sgd(2.0)))


@pytest.mark.parametrize(
    "kind", ["StepLR", StepLR, "hooktrain.solver.param_scheduler.StepLR"]
)
def test_one_configuration_becomes_a_list_of_one(kind: Any) -> None:
    optimizer = sgd(1.0)
    config = {"type": kind, "step_size": 3, "by_epoch": False, "begin": 1, "end": 9}
    (scheduler,) = build_param_scheduler(config, optimizer)
    assert type(scheduler) is StepLR
    assert (scheduler.optimizer, scheduler.step_size) == (optimizer, 3)
    assert (scheduler.begin, scheduler.end, scheduler.by_epoch) == (1, 9, False)


def test_a_list_may_mix_configurations_with_schedulers_that_are_built_and_classes_of_your_own() -> (
    None
):
    class Mine:
        def __init__(self, optimizer: Any, speed: int) -> None:
            self.speed = speed

    optimizer = sgd(1.0)
    built = [
        StepLR(optimizer, 2),
        TorchStepLR(optimizer, 2),
        ConstantParamScheduler(1.0),
    ]
    more = [{"type": "LinearLR"}, {"type": Mine, "speed": 3}]
    result = build_param_scheduler([*built, *more], optimizer, RUN)
    assert result[:3] == built
    assert (type(result[3]), type(result[4]), result[4].speed) == (LinearLR, Mine, 3)


def test_a_schedule_ends_with_the_run_unless_it_says_otherwise() -> None:
    def end(run: Any = RUN, **config: Any) -> Any:
        return build_param_scheduler({"type": "LinearLR", **config}, sgd(1.0), run)[
            0
        ].end

    assert end() == end(end=None) == 12
    assert end(by_epoch=False) == end({**RUN, "by_epoch": False}) == 48
    assert end(end=5) == end(end=5, by_epoch=False) == 5
    with pytest.raises(ValueError, match="begin=12"):  # others are arguments too
        end({**RUN, "begin": 12})


@pytest.mark.parametrize(
    "config",
    [
        {"type": "LinearLR", "end": 7},
        {"type": "CosineAnnealingLR", "T_max": 7},
        {"type": "OneCycleLR", "eta_max": 1.0, "total_steps": 7},
        {"type": "StepLR", "step_size": 7},
        {"type": "ConstantMomentum"},
        {"type": "ReduceOnPlateauLR"},
    ],
)
def test_the_length_of_the_run_is_not_needed_where_nothing_depends_on_it(
    config: Any,
) -> None:
    (scheduler,) = build_param_scheduler(config, sgd(1.0))
    assert scheduler.end == config.get("end", 10**9)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "LinearLR"}, "LinearLR needs end, or the run's max_epochs"),
        (
            {"type": "PolyMomentum", "by_epoch": False},
            "PolyMomentum needs end, or the run's max_",
        ),
        ({"type": "CosineAnnealingLR"}, "CosineAnnealingLR needs end or T_max"),
        (
            {"type": "OneCycleLR", "eta_max": 1.0},
            "needs end or total_steps, or the run's",
        ),
    ],
)
def test_the_length_of_the_run_is_needed_where_the_values_depend_on_it(
    config: Any, message: str
) -> None:
    optimizer = sgd(1.0)
    with pytest.raises(ValueError, match=message):
        build_param_scheduler(config, optimizer, {"epoch_length": 4})
    assert "initial_lr" not in optimizer.param_groups[0]


def test_epochs_become_iterations_if_asked_for() -> None:
    config = {
        "type": "MultiStepLR",
        "milestones": [1, 2],
        "end": 3,
        "convert_to_iter_based": True,
    }
    (scheduler,) = build_param_scheduler(config, sgd(1.0), RUN)
    assert (scheduler.milestones, scheduler.end, scheduler.by_epoch) == (
        [4, 8],
        12,
        False,
    )
    config = {
        "type": "CosineAnnealingLR",
        "convert_to_iter_based": True,
        "epoch_length": 10,
    }
    assert build_param_scheduler(config, sgd(1.0), RUN)[0].end == 120
    config = {"type": "StepLR", "step_size": 2, "convert_to_iter_based": True}
    with pytest.raises(ValueError, match="epoch_length must be at least 1: None"):
        build_param_scheduler(config, sgd(1.0), {"max_epochs": 3})
    with pytest.raises(ValueError, match="by_epoch=False"):
        build_param_scheduler({**config, "by_epoch": False}, sgd(1.0), RUN)


def test_each_of_several_optimizers_gets_schedulers_of_its_own() -> None:
    wrappers, defaults = two(), {**RUN}
    same = [{"type": "LinearLR"}, {"type": "LinearMomentum", "by_epoch": False}]
    different = {
        "b": StepLR(wrappers["b"], 2),
        "a": [{"type": "LinearLR"}, {"type": "PolyLR"}],
    }
    before = copy.deepcopy(same)
    result: Any = build_param_scheduler(same, wrappers, defaults)
    kinds = {name: [(type(s), s.end) for s in made] for name, made in result.items()}
    assert kinds == {name: [(LinearLR, 12), (LinearMomentum, 48)] for name in "ab"}
    assert [result[name][0].optimizer for name in ("a", "b")] == [
        wrappers["a"],
        wrappers["b"],
    ]
    assert (same, defaults) == (before, RUN)
    result = build_param_scheduler(different, wrappers, defaults)
    assert list(result) == ["a", "b"]
    assert [type(s) for s in result["a"]] == [LinearLR, PolyLR]
    assert result["b"] == [different["b"]]


def test_several_optimizers_need_schedulers_by_their_names_or_configurations() -> None:
    for names in (["a"], ["a", "b", "c"], ["a", "B"]):
        with pytest.raises(KeyError, match=r"and optimizers are \['a', 'b'\]"):
            build_param_scheduler(
                {name: {"type": "LinearLR"} for name in names}, two(), RUN
            )
    wrappers = two()
    with pytest.raises(ValueError, match=r"by name of the optimizer: \['a', 'b'\]"):
        build_param_scheduler(
            [{"type": "PolyLR"}, StepLR(wrappers["a"], 2)], wrappers, RUN
        )


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"step_size": 2}, TypeError, "dict with 'type', but got {'step_size': 2}"),
        ([None], TypeError, "but got None"),
        ({"type": "LinaerLR"}, KeyError, "did you mean 'LinearLR'"),
        ({"type": "StepLR", "step_sise": 2}, TypeError, "did you mean 'step_size'"),
    ],
)
def test_what_is_no_configuration_is_refused(
    config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_param_scheduler(config, sgd(1.0), RUN)
