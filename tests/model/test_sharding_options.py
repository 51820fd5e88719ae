"""What is to be sharded, and how: the arguments of shard_model."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hooktrain.demos.text import Block
from hooktrain.model.sharding import build_mp_policy, select_modules, shard_model
from sharding_toys import make_model


def test_a_policy_of_mixed_precision_is_built_of_names() -> None:
    policy = build_mp_policy({"param_dtype": "bfloat16", "cast_forward_inputs": False})
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    assert build_mp_policy(policy) is policy
    assert build_mp_policy(None) == MixedPrecisionPolicy()
    with pytest.raises(ValueError, match="no option 'param_type'; did you mean 'param_dtype'"):
        build_mp_policy({"param_type": "bfloat16"})
    with pytest.raises(ValueError, match=r"mp_policy\['param_dtype'\] .* but got 'relu'"):
        build_mp_policy({"param_dtype": "relu"})
    with pytest.raises(TypeError, match="but got 'bfloat16'"):
        build_mp_policy("bfloat16")  # type: ignore[arg-type]


def test_a_rule_is_of_classes_or_a_function_of_name_and_module() -> None:
    model = make_model()
    assert select_modules(model, {Block}) == list(model.blocks)
    assert select_modules(model, lambda name, _: name.endswith(".1")) == [model.blocks[1]]
    assert select_modules(model, ()) == []
    with pytest.raises(ValueError, match="means no module of TextGPT, which has Block, Dropout"):
        select_modules(model, {nn.Conv2d})
    with pytest.raises(TypeError, match=r"wrap must be a collection .* but got <class"):
        select_modules(model, Block, "wrap")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="but got 'Block'"):
        select_modules(model, "Block")  # type: ignore[arg-type]


def test_without_other_processes_there_is_nothing_to_shard_over() -> None:
    with pytest.raises(RuntimeError, match="initialise the process group first"):
        shard_model(make_model())
