import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_toys import linear, loss_of, same, sgd

from hooktrain.config import ConfigDict, LazyCall, resolve
from hooktrain.solver.amp_optim_wrapper import AmpOptimWrapper
from hooktrain.solver.build_optim_wrapper import build_optim_wrapper
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.utils.registry import OPTIM_WRAPPER_CONSTRUCTORS

SGD = {"type": "SGD", "lr": 0.1, "momentum": 0.9}


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 2)
        self.discriminator = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


GAN_CFG: dict[str, Any] = {
    "generator": {"optimizer": {"type": "Adam", "lr": 2e-4}},
    "discriminator": {
        "type": "AmpOptimWrapper",
        "dtype": "bfloat16",
        "optimizer": {"type": "SGD", "lr": 0.1, "weight_decay": 1.0},
        "paramwise_cfg": {"norm_decay_mult": 0.0},
    },
}


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def built(model: nn.Module | None, cfg: Any) -> OptimWrapper:
    wrapper = build_optim_wrapper(model, cfg)
    assert isinstance(wrapper, OptimWrapper)
    return wrapper


def built_dict(model: nn.Module | None, cfg: Any) -> OptimWrapperDict:
    wrappers = build_optim_wrapper(model, cfg)
    assert isinstance(wrappers, OptimWrapperDict)
    return wrappers


# One optimizer


def test_a_wrapper_is_returned_as_it_is() -> None:
    wrapper = OptimWrapper(sgd(linear()))
    several = OptimWrapperDict(a=wrapper)
    assert build_optim_wrapper(None, wrapper) is wrapper
    assert build_optim_wrapper(linear(), several) is several


def test_a_torch_optimizer_is_wrapped() -> None:
    optimizer = sgd(linear())
    wrapper = built(None, optimizer)
    assert type(wrapper) is OptimWrapper
    assert wrapper.optimizer is optimizer


def test_a_dict_with_an_optimizer_gives_the_wrapper_of_its_type() -> None:
    optimizer = sgd(linear())
    assert type(built(None, {"optimizer": optimizer})) is OptimWrapper
    cfg = {"type": "AmpOptimWrapper", "optimizer": optimizer, "accumulative_counts": 3}
    before = dict(cfg)
    wrapper = built(None, cfg)
    assert isinstance(wrapper, AmpOptimWrapper)
    assert wrapper.optimizer is optimizer
    assert wrapper.accumulative_counts == 3
    assert cfg == before


def test_a_configuration_steps_as_the_optimizer_built_by_hand() -> None:
    ours, by_hand = linear(), linear()
    wrapper = built(ours, {"optimizer": SGD})
    optimizer = sgd(by_hand)
    for _ in range(3):
        batch = torch.randn(8, 4)
        wrapper.update_params(loss_of(ours, batch))
        optimizer.zero_grad()
        loss_of(by_hand, batch).backward()
        optimizer.step()
    assert same(ours, by_hand)


def test_rules_for_parameters_reach_the_constructor() -> None:
    cfg = {"optimizer": SGD, "paramwise_cfg": {"bias_lr_mult": 2.0}}
    assert built(linear(), cfg).get_lr() == {"base_lr": [0.1], "lr": [0.1, 0.2]}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIM_WRAPPER_CONSTRUCTORS, "_objects", dict(OPTIM_WRAPPER_CONSTRUCTORS))


@pytest.mark.usefixtures("registered")
def test_a_constructor_gets_the_rest_of_the_configuration() -> None:
    @OPTIM_WRAPPER_CONSTRUCTORS.register_module()
    class Own:
        def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
            self.cfg = (optim_wrapper_cfg.pop("lr"), optim_wrapper_cfg, paramwise_cfg)

        def __call__(self, model: nn.Module) -> OptimWrapperDict:
            assert self.cfg == (0.5, {"more": [1]}, {"rule": 2})
            return OptimWrapperDict(a=OptimWrapper(sgd(model, lr=0.5)))

    for constructor in ("Own", Own):
        cfg = OrderedDict(constructor=constructor, lr=0.5, more=[1], paramwise_cfg={"rule": 2})
        before = copy.deepcopy(cfg)
        assert built_dict(linear(), cfg).get_lr() == {"a.lr": [0.5]}
        assert cfg == before


def test_a_constructor_must_give_a_wrapper() -> None:
    with pytest.raises(TypeError, match="must give an OptimWrapper, but gave 3"):
        build_optim_wrapper(linear(), {"constructor": lambda **kwargs: lambda model: 3})
    with pytest.raises(TypeError, match=r"<class 'dict'> must give an OptimWrapper, but gave {"):
        build_optim_wrapper(linear(), {"type": dict, "optimizer": sgd(linear())})


def test_references_and_lazy_calls_of_a_configuration_are_resolved() -> None:
    model = linear()
    lazy = LazyCall(torch.optim.SGD)(params=model.parameters(), lr="${lr}")
    cfg = ConfigDict(lr=0.5, optim_wrapper={"optimizer": lazy, "clip_grad": {"max_norm": 1.0}})
    resolve(cfg)
    assert built(model, cfg.optim_wrapper).get_lr() == {"lr": [0.5]}
    lazy = LazyCall(OptimWrapper)(LazyCall(torch.optim.SGD)(model.parameters(), lr=0.25))
    assert built(model, lazy).get_lr() == {"lr": [0.25]}


# Several


def test_wrappers_and_optimizers_by_name() -> None:
    gan = GAN()
    wrapper, optimizer = OptimWrapper(sgd(gan.generator)), sgd(gan.discriminator)
    wrappers = built_dict(None, {"generator": wrapper, "other": {"optimizer": optimizer}})
    assert list(wrappers) == ["generator", "other"]
    assert wrappers["generator"] is wrapper
    assert wrappers["other"].optimizer is optimizer
    assert built_dict(gan, {"bare": optimizer})["bare"].optimizer is optimizer
    assert built_dict(gan, {"x": {"optimizer": optimizer}})["x"].optimizer is optimizer


def test_configurations_by_name_are_for_the_submodules_of_these_names() -> None:
    gan, cfg = GAN(), copy.deepcopy(GAN_CFG)
    wrappers = built_dict(gan, cfg)
    assert cfg == GAN_CFG
    generator, discriminator = wrappers["generator"], wrappers["discriminator"]
    assert type(generator.optimizer) is torch.optim.Adam
    assert generator.optimizer.param_groups[0]["params"] == [*gan.generator.parameters()]
    assert generator.optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert isinstance(discriminator, AmpOptimWrapper)
    names = [g["param_names"] for g in discriminator.optimizer.param_groups]
    assert names == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert wrappers.get_lr()["generator.lr"] == [2e-4]


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        compiled,
        lambda gan: nn.DataParallel(compiled(gan)),
        lambda gan: compiled(nn.DataParallel(gan)),
    ],
)
def test_submodules_are_found_inside_of_wrappers(wrap: Any) -> None:
    gan = GAN()
    wrappers = built_dict(wrap(gan), GAN_CFG)
    assert wrappers["generator"].optimizer.param_groups[0]["params"][0] is gan.generator.weight


def test_the_type_of_several_may_be_written_down() -> None:
    assert list(built_dict(GAN(), {"type": "OptimWrapperDict", **GAN_CFG})) == [*GAN_CFG]


# Errors

NOT_AN_ITEM = "without 'optimizer' and 'constructor', each item must be an optimizer wrapper or"


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        (3, TypeError, "should be an OptimWrapper, a torch optimizer or a dict, but got 3"),
        ("SGD", TypeError, "should be an OptimWrapper, .*but got 'SGD'"),
        ({}, ValueError, "at least one wrapper"),
        ({"a": 3}, ValueError, f"{NOT_AN_ITEM}.* got a=3"),
        ({"optimizer": None}, ValueError, f"{NOT_AN_ITEM}.* got optimizer=None"),
        ({"optimiser": SGD}, ValueError, f"{NOT_AN_ITEM}.* got optimiser="),
        (
            {"type": "OptimWrapper", "optimiser": SGD},
            ValueError,
            "the configuration of a 'OptimWrapper' needs 'optimizer'; did you mean 'optimiser'",
        ),
        ({"type": "OptimWraper"}, KeyError, "did you mean 'OptimWrapper'"),
        (
            {"genrator": {"optimizer": SGD}},
            ValueError,
            "'genrator' is to be .*, and no submodule of that name; did you mean 'generator'",
        ),
        (
            {"constructor": "DefaultConstructor", "optimizer": SGD},
            KeyError,
            "mean 'DefaultOptimWrapperCons",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(cfg: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build_optim_wrapper(GAN(), cfg)


@pytest.mark.parametrize(
    "cfg", [{"optimizer": SGD}, {"constructor": "x"}, {"generator": {"optimizer": SGD}}]
)
def test_a_configuration_of_an_optimizer_needs_a_model(cfg: Any) -> None:
    with pytest.raises(ValueError, match="a model is needed to build an optimizer for"):
        build_optim_wrapper(None, cfg)


@pytest.mark.parametrize("key", ["constructor", "paramwise_cfg"])
def test_a_built_optimizer_cannot_be_given_rules_any_more(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' is for building an optimizer"):
        build_optim_wrapper(None, {"optimizer": sgd(linear()), key: {"bias_lr_mult": 2.0}})


def test_arguments_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model, the first argument, must be a torch.nn.Module"):
        build_optim_wrapper({"optimizer": SGD}, linear())  # type: ignore[arg-type]
