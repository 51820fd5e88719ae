import pytest
from test_environment import torchrun

from hooktrain.strategy import DDPStrategy, SingleDeviceStrategy, build_strategy

STATIC = {"static_graph": True}


@pytest.mark.parametrize("given", ["auto", {}, {"type": "auto"}])
def test_auto_is_a_single_device_for_one_process(given: object) -> None:
    made = build_strategy(given, model_wrapper=STATIC, work_dir="/here")  # type: ignore[arg-type]
    assert isinstance(made, SingleDeviceStrategy)
    assert made.work_dir == "/here"


def test_one_configuration_serves_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"model_wrapper": STATIC, "work_dir": "/here"}
    assert isinstance(build_strategy(config), SingleDeviceStrategy)
    for name, value in torchrun(world_size=2).items():
        monkeypatch.setenv(name, value)
    made = build_strategy(config)
    assert isinstance(made, DDPStrategy)
    assert made.model_wrapper == {"broadcast_buffers": False, **STATIC}


def test_a_dict_wins_over_the_defaults() -> None:
    config = {"type": "DDPStrategy", "work_dir": "/here", "model_wrapper": {}}
    before = dict(config)
    made = build_strategy(config, work_dir="/there", model_wrapper=STATIC)
    assert isinstance(made, DDPStrategy)
    assert made.work_dir == "/here"
    assert made.model_wrapper == {"broadcast_buffers": False}
    assert config == before


def test_only_ddp_gets_the_default_wrapper() -> None:
    made = build_strategy({"type": DDPStrategy}, model_wrapper=STATIC)
    assert isinstance(made, DDPStrategy)
    assert made.model_wrapper == {"broadcast_buffers": False, **STATIC}
    for other in ("SingleDeviceStrategy", "FSDPStrategy"):
        assert not hasattr(build_strategy(other, model_wrapper=STATIC), "model_wrapper")


def test_what_is_no_strategy_is_refused() -> None:
    made = SingleDeviceStrategy()
    assert build_strategy(made) is made
    with pytest.raises(KeyError, match=r"DDPStratgy.*did you mean 'DDPStrategy'"):
        build_strategy("DDPStratgy")
    with pytest.raises(TypeError, match="wrk_dir"):
        build_strategy("SingleDeviceStrategy", wrk_dir=".")
