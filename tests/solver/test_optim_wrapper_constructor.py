import copy
from typing import Any

import pytest
import torch
from paramwise_toys import Net
from torch import nn

from hooktrain.config import ConfigDict, resolve
from hooktrain.solver.amp_optim_wrapper import AmpOptimWrapper
from hooktrain.solver.build import ParamGroup
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_constructor import DefaultOptimWrapperConstructor
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.utils.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS

SGD = {"type": "SGD", "lr": 0.1, "momentum": 0.9}


def construct(model: nn.Module, cfg: Any, paramwise_cfg: Any = None) -> OptimWrapper:
    return DefaultOptimWrapperConstructor(cfg, paramwise_cfg)(model)


def test_wrappers_and_the_constructor_are_registered() -> None:
    for wrapper in (OptimWrapper, AmpOptimWrapper, OptimWrapperDict):
        assert OPTIM_WRAPPERS.get(wrapper.__name__) is wrapper
    found = OPTIM_WRAPPER_CONSTRUCTORS.get("DefaultOptimWrapperConstructor")
    assert found is DefaultOptimWrapperConstructor


def test_without_rules_there_is_one_group_of_all_parameters() -> None:
    model = Net()
    wrapper = construct(model, {"optimizer": SGD})
    assert type(wrapper) is OptimWrapper
    (group,) = wrapper.optimizer.param_groups
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert all(p is q for p, q in zip(group["params"], model.parameters(), strict=True))
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    assert wrapper.base_param_settings is None


def test_a_shared_parameter_is_in_the_group_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    (group,) = construct(model, {"optimizer": SGD}).optimizer.param_groups
    assert group["param_names"] == ["0.weight", "0.bias", "1.bias"]


def test_type_and_arguments_of_the_wrapper() -> None:
    cfg = {"type": "AmpOptimWrapper", "dtype": "bfloat16", "accumulative_counts": 2}
    wrapper = construct(nn.Linear(1, 1), {**cfg, "optimizer": SGD, "clip_grad": {"max_norm": 1.0}})
    assert isinstance(wrapper, AmpOptimWrapper)
    assert wrapper.dtype is torch.bfloat16
    assert wrapper.accumulative_counts == 2


@pytest.mark.parametrize("kind", ["AdamW", torch.optim.AdamW, "torch.optim.AdamW"])
def test_the_type_of_an_optimizer_is_a_name_a_class_or_a_dotted_name(kind: Any) -> None:
    wrapper = construct(nn.Linear(1, 1), {"optimizer": {"type": kind, "betas": (0.5, 0.9)}})
    assert type(wrapper.optimizer) is torch.optim.AdamW
    assert wrapper.optimizer.defaults["betas"] == (0.5, 0.9)


class ModelParamsSGD(torch.optim.SGD):
    def __init__(self, model_params: Any, lr: float = 0.1) -> None:
        super().__init__(model_params, lr)


def test_an_optimizer_may_call_its_parameters_otherwise() -> None:
    wrapper = construct(nn.Linear(1, 1), {"optimizer": {"type": ModelParamsSGD, "lr": 0.5}})
    assert wrapper.get_lr() == {"lr": [0.5]}


def test_a_registered_optimizer_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_objects", dict(OPTIMIZERS))
    OPTIMIZERS.register_module(module=ModelParamsSGD)
    wrapper = construct(nn.Linear(1, 1), {"optimizer": {"type": "ModelParamsSGD"}})
    assert type(wrapper.optimizer) is ModelParamsSGD


def test_the_configurations_are_not_changed_and_serve_several_models() -> None:
    cfg = {"optimizer": {**SGD, "weight_decay": 1.0}, "clip_grad": {"type": "norm", "max_norm": 1}}
    rules = {"custom_keys": {"bias": {"lr_mult": 2.0}}, "norm_decay_mult": 0.0}
    before = copy.deepcopy((cfg, rules))
    constructor = DefaultOptimWrapperConstructor(cfg, rules)
    first, second = constructor(nn.Linear(1, 1)), constructor(nn.Linear(2, 2))
    assert (cfg, rules) == before
    assert first.get_lr() == second.get_lr() == {"base_lr": [0.1], "lr": [0.1, 0.2]}
    assert first.optimizer is not second.optimizer


def test_what_an_optimizer_gets_of_a_config_dict_can_be_saved_and_loaded(tmp_path: Any) -> None:
    optimizer = {"type": "Adafactor", "lr": "${lr}", "eps": [1e-30, 1e-3]}
    cfg = resolve(ConfigDict(lr=0.5, optim_wrapper={"optimizer": optimizer}))
    rules = ConfigDict(custom_keys={"bias": {"tags": ["a", {"b": 1}]}})
    model = nn.Linear(1, 1)
    wrapper = construct(model, cfg.optim_wrapper, rules)
    assert wrapper.get_lr()["lr"] == [0.5, 0.5]
    torch.save(wrapper.state_dict(), tmp_path / "state.pth")
    state = torch.load(tmp_path / "state.pth", weights_only=True)
    assert state["param_groups"][1]["eps"] == [1e-30, 1e-3]
    assert state["param_groups"][1]["tags"] == ["a", {"b": 1}]


def test_names_are_those_inside_of_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.DataParallel(torch.compile(model, backend="eager"))
    groups = construct(model, {"optimizer": SGD}).param_groups
    assert groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    rules = {"custom_keys": {"1.": {"lr_mult": 0.0}}}
    groups = construct(model, {"optimizer": SGD}, rules).param_groups
    assert [g.get("param_names") for g in groups[:2]] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]


def test_a_subclass_makes_groups_of_its_own() -> None:
    class HeadOnly(DefaultOptimWrapperConstructor):
        def param_groups(self, model: nn.Module) -> list[ParamGroup]:
            return [{"params": list(model.get_submodule("head").parameters()), "lr": 0.5}]

    assert HeadOnly({"optimizer": SGD})(Net()).get_lr() == {"lr": [0.5]}


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        (3, TypeError, "optim_wrapper_cfg must be a dict, but got 3"),
        ({"optimiser": SGD}, ValueError, "needs 'optimizer'; did you mean 'optimiser'"),
        ({"optimizer": "SGD"}, TypeError, "optimizer must be a dict with 'type', but got 'SGD'"),
        ({"optimizer": {"lr": 0.1}}, KeyError, "optimizer needs 'type', but got {'lr': 0.1}"),
        ({"optimizer": {"type": "SDG"}}, KeyError, "'optimizers'; did you mean 'SGD'"),
        ({"optimizer": {**SGD, "params": []}}, ValueError, "'params': it cannot be configured"),
        ({"optimizer": {**SGD, "momentun": 1}}, TypeError, "SGD .*did you mean 'momentum'"),
        ({"optimizer": {**SGD, "lr": -1.0}}, ValueError, "Invalid learning rate: -1.0"),
        ({"optimizer": {"type": "LBFGS"}}, TypeError, "LBFGS computes the loss several times"),
        ({"optimizer": SGD, "type": "AmpOptimWraper"}, KeyError, "mean 'AmpOptimWrapper'"),
        ({"optimizer": SGD, "clip_grads": {}}, TypeError, "OptimWrapper .*mean 'clip_grad'"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(cfg: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        construct(nn.Linear(1, 1), cfg)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, but got \[\]"):
        construct([], {"optimizer": SGD})  # type: ignore[arg-type]
