"""Optimizers and their wrappers from configurations."""

import copy
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR as TorchStepLR

from hooktrain.compat.mmengine import (
    AmpOptimWrapper,
    ConstantLR,
    DefaultOptimWrapperConstructor,
    LinearLR,
    OptimWrapper,
    OptimWrapperDict,
    PolyLR,
    StepLR,
    build_optim_wrapper,
    build_param_scheduler,
)
from hooktrain.compat.mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from hooktrain.config import ConfigDict, LazyCall, resolve
from scheduler_toys import sgd as groups_of
from toys import LinearLoss, sgd

SGD = {"type": "SGD", "lr": 0.1, "momentum": 0.9}


def built_dict(model: nn.Module | None, cfg: Any) -> OptimWrapperDict:
    wrappers = build_optim_wrapper(model, cfg)
    assert isinstance(wrappers, OptimWrapperDict)
    return wrappers


def built(model: nn.Module | None, cfg: Any) -> OptimWrapper:
    wrapper = build_optim_wrapper(model, cfg)
    assert isinstance(wrapper, OptimWrapper)
    return wrapper


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 2)
        self.discriminator = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def construct(model: nn.Module, cfg: Any) -> OptimWrapper:
    return DefaultOptimWrapperConstructor(cfg)(model)


def test_every_optimizer_of_torch_is_registered_by_its_name() -> None:
    public = {name for name in torch.optim.__all__ if name[0].isupper()}
    registered = {
        name for name, kind in OPTIMIZERS if kind.__module__.startswith("torch.optim")
    }
    assert registered == public | {"TorchAdafactor"}


# The constructor


def test_without_rules_there_is_one_group_of_all_parameters() -> None:
    model = GAN()
    wrapper = construct(model, {"optimizer": SGD})
    assert type(wrapper) is OptimWrapper
    (group,) = wrapper.optimizer.param_groups
    assert all(p is q for p, q in zip(group["params"], model.parameters(), strict=True))
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)


@pytest.mark.parametrize("kind", ["AdamW", torch.optim.AdamW, "torch.optim.AdamW"])
def test_the_type_of_an_optimizer_may_be_a_class(kind: Any) -> None:
    cfg = {"type": "AmpOptimWrapper", "dtype": "bfloat16"}
    optimizer = {"type": kind, "betas": (0.5, 0.9)}
    wrapper = construct(nn.Linear(1, 1), {**cfg, "optimizer": optimizer})
    assert type(wrapper.optimizer) is torch.optim.AdamW
    assert wrapper.optimizer.defaults["betas"] == (0.5, 0.9)
    assert isinstance(wrapper, AmpOptimWrapper)
    assert wrapper.dtype is torch.bfloat16


def test_an_optimizer_of_your_own_may_be_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr)

    monkeypatch.setattr(OPTIMIZERS, "_objects", dict(OPTIMIZERS))
    OPTIMIZERS.register_module(module=Own)
    wrapper = construct(nn.Linear(1, 1), {"optimizer": {"type": "Own", "lr": 0.5}})
    assert type(wrapper.optimizer) is Own
    assert wrapper.get_lr() == {"lr": [0.5]}


# One optimizer


def test_what_is_built_is_taken_as_it_is() -> None:
    optimizer, gan = sgd(LinearLoss()), GAN()
    wrapper = built(None, optimizer)
    assert type(wrapper) is OptimWrapper
    assert wrapper.optimizer is built(None, {"optimizer": optimizer}).optimizer
    several = OptimWrapperDict(a=wrapper)
    assert build_optim_wrapper(None, wrapper) is wrapper
    assert build_optim_wrapper(gan, several) is several
    cfg = {"type": "AmpOptimWrapper", "optimizer": optimizer, "accumulative_counts": 3}
    before = dict(cfg)
    amp = built(None, cfg)
    assert isinstance(amp, AmpOptimWrapper)
    assert (amp.optimizer, amp.accumulative_counts) == (optimizer, 3)
    assert cfg == before


def test_wrappers_may_have_names() -> None:
    first, second = OptimWrapper(sgd(GAN())), OptimWrapper(sgd(LinearLoss()))
    wrappers = built_dict(None, {"a": first, "b": second})
    assert dict(wrappers) == {"a": first, "b": second}


def test_a_configuration_of_an_optimizer_needs_a_model() -> None:
    with pytest.raises(TypeError, match="model must be"):
        build_optim_wrapper(None, {"optimizer": SGD})


def test_a_constructor_gets_the_rest_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = dict(OPTIM_WRAPPER_CONSTRUCTORS)
    monkeypatch.setattr(OPTIM_WRAPPER_CONSTRUCTORS, "_objects", registered)

    @OPTIM_WRAPPER_CONSTRUCTORS.register_module()
    class Own:
        def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
            self.cfg = (optim_wrapper_cfg.pop("lr"), optim_wrapper_cfg, paramwise_cfg)

        def __call__(self, model: nn.Module) -> OptimWrapperDict:
            assert self.cfg == (0.5, {"more": [1]}, {"rule": 2})
            return OptimWrapperDict(a=OptimWrapper(sgd(model, lr=0.5)))

    for constructor in ("Own", Own):
        cfg = OrderedDict(
            constructor=constructor, lr=0.5, more=[1], paramwise_cfg={"rule": 2}
        )
        before = copy.deepcopy(cfg)
        assert built_dict(LinearLoss(), cfg).get_lr() == {"a.lr": [0.5]}
        assert cfg == before


def test_lazy_calls_of_a_configuration_are_made() -> None:
    model = LinearLoss()
    lazy = LazyCall(torch.optim.SGD)(params=model.parameters(), lr="${lr}")
    cfg = resolve(ConfigDict(lr=0.5, optim_wrapper={"optimizer": lazy}))
    assert built(model, cfg.optim_wrapper).get_lr() == {"lr": [0.5]}
    lazy = LazyCall(OptimWrapper)(
        LazyCall(torch.optim.SGD)(model.parameters(), lr=0.25)
    )
    assert built(model, lazy).get_lr() == {"lr": [0.25]}


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ("SGD", TypeError, "OptimWrapper, .*but got 'SGD'"),
        ({}, TypeError, "but got {}"),
        ({"type": "OptimWrapper", "optimiser": 1}, ValueError, "'optimiser': 1"),
        ({"optimizer": {"lr": 0.1}}, KeyError, "a dict with 'type', got .*'lr': 0.1"),
        ({"optimizer": {"type": "SDG"}}, KeyError, "did you mean 'SGD'"),
        ({"optimizer": SGD, "type": "AmpWraper"}, KeyError, "mean 'AmpOptimWrapper'"),
        ({"constructor": "DefaultCnstructor"}, KeyError, "mean 'DefaultOptimWrapper"),
        ({"generator": {"optimizer": SGD}}, TypeError, "a dict of these by name"),
    ],
)
def test_what_cannot_be_meant_is_refused(cfg: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build_optim_wrapper(GAN(), cfg)


# Schedulers


RUN = {"max_epochs": 12, "max_iters": 48, "epoch_length": 4}


def two() -> OptimWrapperDict:
    return OptimWrapperDict(
        a=OptimWrapper(groups_of(1.0)), b=OptimWrapper(groups_of(2.0))
    )


@pytest.mark.parametrize("kind", ["StepLR", StepLR, "hooktrain.compat.mmengine.StepLR"])
def test_one_configuration_becomes_a_list_of_one(kind: Any) -> None:
    optimizer = groups_of(1.0)
    config = {"type": kind, "step_size": 3, "by_epoch": False, "begin": 1, "end": 9}
    (scheduler,) = build_param_scheduler(config, optimizer)
    assert type(scheduler) is StepLR
    assert (scheduler.optimizer, scheduler.step_size) == (optimizer, 3)
    assert (scheduler.begin, scheduler.end, scheduler.by_epoch) == (1, 9, False)


def test_a_list_may_mix_configurations_with_what_is_built() -> None:
    class Mine:
        def __init__(self, optimizer: Any, speed: int) -> None:
            self.speed = speed

    optimizer = groups_of(1.0)
    built = [StepLR(optimizer, 2), TorchStepLR(optimizer, 2)]
    more = [{"type": "LinearLR"}, {"type": Mine, "speed": 3}]
    result = build_param_scheduler([*built, *more], optimizer, RUN)
    assert result[:2] == built
    assert (type(result[2]), type(result[3]), result[3].speed) == (LinearLR, Mine, 3)


@pytest.mark.parametrize(
    ("config", "end"),
    [
        ({}, 12),
        ({"end": None}, 12),
        ({"by_epoch": False}, 48),
        ({"end": 5, "by_epoch": False}, 5),
    ],
)
def test_a_schedule_ends_with_the_run_unless_it_says_otherwise(
    config: Any, end: int
) -> None:
    linear = {"type": "LinearLR", **config}
    (scheduler,) = build_param_scheduler(linear, groups_of(1.0), RUN)
    assert scheduler.end == end


@pytest.mark.parametrize(
    "config", [{"type": "CosineAnnealingLR", "T_max": 7}, {"type": "ConstantLR"}]
)
def test_a_schedule_without_an_end_may_go_on(config: Any) -> None:
    (scheduler,) = build_param_scheduler(config, groups_of(1.0))
    assert scheduler.end == 10**9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"type": "PolyLR", "by_epoch": False},
            "run's max_epochs or max_iters, or end: PolyLR",
        ),
        ({"type": "CosineAnnealingLR"}, "or end: CosineAnnealingLR.*T_max=None"),
    ],
)
def test_the_length_of_the_run_is_needed_where_the_values_depend_on_it(
    config: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_param_scheduler(config, groups_of(1.0), {"epoch_length": 4})


def test_epochs_become_iterations_if_asked_for() -> None:
    config = {"type": "MultiStepLR", "milestones": [1, 2], "end": 3}
    config["convert_to_iter_based"] = True
    (scheduler,) = build_param_scheduler(config, groups_of(1.0), RUN)
    assert (scheduler.milestones, scheduler.end) == (Counter([4, 8]), 12)
    assert not scheduler.by_epoch
    del config["end"]
    (scheduler,) = build_param_scheduler(config, groups_of(1.0), RUN)
    assert scheduler.end == 48
    with pytest.raises(ValueError, match="epoch_length=None"):
        build_param_scheduler(config, groups_of(1.0), {"max_epochs": 3})


def test_each_of_several_optimizers_gets_schedulers_of_its_own() -> None:
    wrappers = two()
    same = [{"type": "LinearLR"}, {"type": "ConstantLR", "by_epoch": False}]
    result: Any = build_param_scheduler(same, wrappers, RUN)
    for name in "ab":
        assert [type(made) for made in result[name]] == [LinearLR, ConstantLR]
        assert [made.end for made in result[name]] == [12, 48]
        assert result[name][0].optimizer is wrappers[name].optimizer


def test_schedulers_may_have_the_names_of_their_optimizers() -> None:
    wrappers = two()
    step = StepLR(wrappers["b"], 2)
    different = {"b": step, "a": [{"type": "LinearLR"}, {"type": "PolyLR"}]}
    result: Any = build_param_scheduler(different, wrappers, RUN)
    assert list(result) == ["a", "b"]
    assert [type(made) for made in result["a"]] == [LinearLR, PolyLR]
    assert result["b"] == [step]


def test_an_optimizer_without_schedulers_of_its_name_is_refused() -> None:
    with pytest.raises(KeyError, match="'b'"):
        build_param_scheduler({"a": {"type": "LinearLR"}}, two(), RUN)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"step_size": 2}, TypeError, "dict with 'type', but got {'step_size': 2}"),
        ([None], TypeError, "but got None"),
        ({"type": "LinaerLR"}, KeyError, "did you mean 'LinearLR'"),
        (
            {"type": "StepLR", "step_sise": 2},
            TypeError,
            "unexpected keyword argument 'step_sise'",
        ),
    ],
)
def test_what_is_no_configuration_is_refused(
    config: Any, error: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error) as caught:
        build_param_scheduler(config, groups_of(1.0), RUN)
    # On Python 3.10 errors take no notes, and the log has them.
    notes = getattr(caught.value, "__notes__", caplog.messages)
    assert message in "\n".join([str(caught.value), *notes])
