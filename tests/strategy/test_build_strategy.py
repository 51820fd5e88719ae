import pytest
from test_environment import torchrun

from hooktrain.strategy import DDPStrategy, SingleDeviceStrategy, build_strategy


def test_auto_is_ddp_for_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {
        "model_wrapper": {"static_graph": True},
        "sync_bn": "torch",
        "work_dir": "/here",
    }
    for auto in ("auto", {}, {"type": "auto"}, config):
        made = build_strategy(auto, fp16_compression=True)
        assert isinstance(made, SingleDeviceStrategy)
    assert made.work_dir == "/here"
    for size in (1, 2):
        for name, value in torchrun(size).items():
            monkeypatch.setenv(name, value)
        ddp = build_strategy(config, fp16_compression=True)
        assert isinstance(ddp, DDPStrategy) == (size == 2)
    assert isinstance(ddp, DDPStrategy)
    assert (ddp.sync_bn, ddp.fp16_compression) == ("torch", True)


def test_a_dict_wins_over_the_defaults() -> None:
    assert isinstance(build_strategy("DDPStrategy"), DDPStrategy)
    config = {
        "type": "DDPStrategy",
        "work_dir": "/here",
        "model_wrapper": {"static_graph": True},
    }
    before = dict(config)
    made = build_strategy(config, work_dir="/there")
    assert isinstance(made, DDPStrategy)
    assert made.work_dir == "/here"
    assert made.model_wrapper == {"static_graph": True}
    assert config == before
    assert build_strategy({"type": DDPStrategy}, work_dir="/there").work_dir == "/there"


def test_defaults_for_ddp_reach_no_other_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ddp = {"fp16_compression": True, "model_wrapper": {"static_graph": True}}
    for strategy in ("auto", "SingleDeviceStrategy", "FSDPStrategy"):
        made = build_strategy(strategy, ddp=ddp, work_dir="/here")
        assert not hasattr(made, "fp16_compression")
    made = build_strategy({"type": "DDPStrategy", "model_wrapper": None}, ddp=ddp)
    assert isinstance(made, DDPStrategy)
    assert (made.model_wrapper, made.fp16_compression) == (None, True)
    for name, value in torchrun(world_size=2).items():
        monkeypatch.setenv(name, value)
    made = build_strategy("auto", ddp=ddp)
    assert isinstance(made, DDPStrategy)
    assert made.model_wrapper == {"static_graph": True}


def test_what_is_no_strategy_is_refused() -> None:
    made = SingleDeviceStrategy()
    assert build_strategy(made) is made
    with pytest.raises(KeyError, match=r"DDPStratgy.*did you mean 'DDPStrategy'"):
        build_strategy("DDPStratgy")
    with pytest.raises(TypeError, match="wrk_dir"):
        build_strategy("SingleDeviceStrategy", wrk_dir=".")
