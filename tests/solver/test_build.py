"""Optimizers and their wrappers from configurations."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_toys import linear, sgd

from hooktrain.config import ConfigDict, LazyCall, resolve
from hooktrain.solver import (
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
)
from hooktrain.utils.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS

SGD = {"type": "SGD", "lr": 0.1, "momentum": 0.9}


def built_dict(model: nn.Module | None, cfg: Any) -> OptimWrapperDict:
    wrappers = build_optim_wrapper(model, cfg)
    assert isinstance(wrappers, OptimWrapperDict)
    return wrappers


def built(model: nn.Module | None, cfg: Any) -> OptimWrapper:
    wrapper = build_optim_wrapper(model, cfg)
    assert isinstance(wrapper, OptimWrapper)
    return wrapper


GAN_CFG: dict[str, Any] = {
    "generator": {"optimizer": {"type": "Adam", "lr": 2e-4}},
    "discriminator": {
        "type": "AmpOptimWrapper",
        "dtype": "bfloat16",
        "optimizer": {"type": "SGD", "lr": 0.1, "weight_decay": 1.0},
        "paramwise_cfg": {"norm_decay_mult": 0.0},
    },
}


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 2)
        self.discriminator = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def construct(model: nn.Module, cfg: Any, paramwise_cfg: Any = None) -> OptimWrapper:
    return DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model)


def test_every_optimizer_of_torch_is_registered_by_its_name() -> None:
    found = {
        name: cls
        for name, cls in OPTIMIZERS
        if cls.__module__.startswith("torch.optim")
    }
    public = {
        n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n), type)
    }
    assert set(found) == public - {"Optimizer"} | {"TorchAdafactor"}
    assert (found["SGD"], found["TorchAdafactor"]) == (
        torch.optim.SGD,
        torch.optim.Adafactor,
    )


# The constructor


def test_without_rules_there_is_one_group_of_all_parameters() -> None:
    model = GAN()
    wrapper = construct(model, {"optimizer": SGD})
    assert type(wrapper) is OptimWrapper
    (group,) = wrapper.optimizer.param_groups
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert all(p is q for p, q in zip(group["params"], model.parameters(), strict=True))
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    assert wrapper.base_param_settings is None


@pytest.mark.parametrize("kind", ["AdamW", torch.optim.AdamW, "torch.optim.AdamW"])
def test_the_type_of_an_optimizer_is_a_name_a_class_or_a_dotted_name(kind: Any) -> None:
    cfg = {
        "type": "AmpOptimWrapper",
        "dtype": "bfloat16",
        "clip_grad": {"max_norm": 1.0},
    }
    wrapper = construct(
        nn.Linear(1, 1), {**cfg, "optimizer": {"type": kind, "betas": (0.5, 0.9)}}
    )
    assert type(wrapper.optimizer) is torch.optim.AdamW
    assert wrapper.optimizer.defaults["betas"] == (0.5, 0.9)
    assert isinstance(wrapper, AmpOptimWrapper)
    assert wrapper.dtype is torch.bfloat16


def test_an_optimizer_of_your_own_may_be_registered_and_call_its_parameters_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ModelParamsSGD(torch.optim.SGD):
        def __init__(self, model_params: Any, lr: float = 0.1) -> None:
            super().__init__(model_params, lr)

    monkeypatch.setattr(OPTIMIZERS, "_objects", dict(OPTIMIZERS))
    OPTIMIZERS.register_module(module=ModelParamsSGD)
    for kind in (ModelParamsSGD, "ModelParamsSGD"):
        wrapper = construct(nn.Linear(1, 1), {"optimizer": {"type": kind, "lr": 0.5}})
        assert type(wrapper.optimizer) is ModelParamsSGD
        assert wrapper.get_lr() == {"lr": [0.5]}


def test_the_configurations_are_not_changed_and_serve_several_models() -> None:
    cfg = {
        "optimizer": {**SGD, "weight_decay": 1.0},
        "clip_grad": {"type": "norm", "max_norm": 1},
    }
    rules = {"custom_keys": {"bias": {"lr_mult": 2.0}}, "norm_decay_mult": 0.0}
    before = copy.deepcopy((cfg, rules))
    constructor = DefaultOptimWrapperConstructor(cfg, rules)
    first, second = constructor(nn.Linear(1, 1)), constructor(nn.Linear(2, 2))
    assert (cfg, rules) == before
    assert first.get_lr() == second.get_lr() == {"base_lr": [0.1], "lr": [0.1, 0.2]}
    assert first.optimizer is not second.optimizer


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        (
            {"optimiser": SGD},
            ValueError,
            "give 'optimizer', a dict with 'type', not {'optimiser'",
        ),
        ({"optimizer": "SGD"}, ValueError, "give 'optimizer', a dict with 'type'"),
        (
            {"optimizer": {"lr": 0.1}},
            ValueError,
            "a dict with 'type', not .*{'lr': 0.1}",
        ),
        ({"optimizer": {"type": "SDG"}}, KeyError, "'optimizers'; did you mean 'SGD'"),
        (
            {"optimizer": SGD, "type": "AmpOptimWraper"},
            KeyError,
            "mean 'AmpOptimWrapper'",
        ),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    cfg: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        construct(nn.Linear(1, 1), cfg)


def test_a_subclass_makes_groups_of_its_own_by_rules_of_its_own() -> None:
    class HeadOnly(DefaultOptimWrapperConstructor):
        def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
            return [
                {
                    "params": list(model.get_submodule("generator").parameters()),
                    "lr": 0.5,
                }
            ]

    class ByLayer(DefaultOptimWrapperConstructor):
        def add_params(self, params: Any, module: nn.Module, **kwargs: Any) -> None:
            for layer, parameter in enumerate(module.parameters()):
                scale = self.paramwise_cfg["decay_rate"] ** layer
                params.append({"params": [parameter], "lr": self.base_lr * scale})

    class Both(ByLayer):
        def add_params(self, params: Any, module: nn.Module, **kwargs: Any) -> None:
            DefaultOptimWrapperConstructor.add_params(self, params, module)
            params[0]["lr"] *= self.paramwise_cfg["decay_rate"]

    assert HeadOnly({"optimizer": SGD})(GAN()).get_lr() == {"lr": [0.5]}
    rules = {"decay_rate": 0.5, "bias_lr_mult": 2.0}
    sgd = {"optimizer": {"type": "SGD", "lr": 1.0}}
    assert ByLayer(sgd, rules)(nn.Linear(1, 1)).get_lr()["lr"] == [1.0, 0.5]
    assert Both(sgd, rules)(nn.Linear(1, 1)).get_lr()["lr"] == [0.5, 2.0]


# One optimizer


def test_what_is_built_is_taken_as_it_is_alone_or_by_name() -> None:
    optimizer, gan = sgd(linear()), GAN()
    wrapper = built(None, optimizer)
    assert type(wrapper) is type(built(None, {"optimizer": optimizer})) is OptimWrapper
    assert wrapper.optimizer is optimizer
    several = OptimWrapperDict(a=wrapper)
    assert build_optim_wrapper(None, wrapper) is wrapper
    assert build_optim_wrapper(gan, several) is several
    cfg = {"type": "AmpOptimWrapper", "optimizer": optimizer, "accumulative_counts": 3}
    before = dict(cfg)
    amp = built(None, cfg)
    assert (type(amp), amp.optimizer, amp.accumulative_counts) == (
        AmpOptimWrapper,
        optimizer,
        3,
    )
    assert cfg == before
    by_name = {
        "a": OptimWrapper(sgd(gan)),
        "b": {"optimizer": optimizer},
        "generator": sgd(gan),
    }
    for model in (None, gan):
        wrappers = built_dict(model, by_name)
        assert list(wrappers) == ["a", "b", "generator"]
        assert wrappers["a"] is by_name["a"]
        assert wrappers["b"].optimizer is optimizer
        assert wrappers["generator"].optimizer is by_name["generator"]


@pytest.mark.parametrize(
    "cfg", [{"optimizer": SGD}, {"constructor": "x"}, {"generator": {"optimizer": SGD}}]
)
def test_a_configuration_of_an_optimizer_needs_a_model(cfg: Any) -> None:
    with pytest.raises(ValueError, match="a model is needed to build an optimizer for"):
        build_optim_wrapper(None, cfg)


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
        assert built_dict(linear(), cfg).get_lr() == {"a.lr": [0.5]}
        assert cfg == before


def test_lazy_calls_of_a_configuration_are_made_and_its_values_can_be_saved(
    tmp_path: Any,
) -> None:
    model = linear()
    lazy = LazyCall(torch.optim.SGD)(params=model.parameters(), lr="${lr}")
    cfg = resolve(ConfigDict(lr=0.5, optim_wrapper={"optimizer": lazy}))
    assert built(model, cfg.optim_wrapper).get_lr() == {"lr": [0.5]}
    lazy = LazyCall(OptimWrapper)(
        LazyCall(torch.optim.SGD)(model.parameters(), lr=0.25)
    )
    assert built(model, lazy).get_lr() == {"lr": [0.25]}
    rules = {"custom_keys": {"bias": {"tags": ["a", {"b": 1}]}}}
    plain = ConfigDict(
        optimizer={"type": "Adafactor", "eps": [1e-30, 1e-3]}, paramwise_cfg=rules
    )
    torch.save(built(model, plain).state_dict(), tmp_path / "state.pth")
    groups = torch.load(tmp_path / "state.pth", weights_only=True)["param_groups"]
    assert (groups[1]["eps"], groups[1]["tags"]) == ([1e-30, 1e-3], ["a", {"b": 1}])


def test_configurations_by_name_are_for_the_submodules_of_these_names_inside_of_wrappers() -> (
    None
):
    gan, cfg = GAN(), copy.deepcopy(GAN_CFG)
    wrappers = built_dict(gan, cfg)
    assert cfg == GAN_CFG
    generator, discriminator = wrappers["generator"], wrappers["discriminator"]
    assert type(generator.optimizer) is torch.optim.Adam
    assert generator.optimizer.param_groups[0]["params"] == [
        *gan.generator.parameters()
    ]
    assert generator.optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert isinstance(discriminator, AmpOptimWrapper)
    names = [g["param_names"] for g in discriminator.optimizer.param_groups]
    assert names == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert wrappers.get_lr()["generator.lr"] == [2e-4]
    compiled: Any = torch.compile(nn.DataParallel(gan), backend="eager")
    for wrapped in (compiled, nn.DataParallel(compiled)):
        wrappers = built_dict(wrapped, {"type": "OptimWrapperDict", **GAN_CFG})
        assert list(wrappers) == [*GAN_CFG]
        (group,) = wrappers["generator"].optimizer.param_groups
        assert group["params"][0] is gan.generator.weight


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ("SGD", TypeError, "expected an OptimWrapper, .*but got 'SGD'"),
        ({}, ValueError, "at least one wrapper"),
        ({"optimizer": None}, TypeError, "expected an OptimWrapper, .*but got None"),
        (
            {"type": "OptimWrapper", "optimiser": 1},
            ValueError,
            "; did you mean 'optimiser'",
        ),
        ({"type": "OptimWraper"}, KeyError, "did you mean 'OptimWrapper'"),
        (
            {"constructor": "DefaultCnstructor"},
            KeyError,
            "mean 'DefaultOptimWrapperCons",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(cfg: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build_optim_wrapper(GAN(), cfg)
