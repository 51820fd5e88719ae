import copy
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.config import LazyCall
from hooktrain.strategy import SingleDeviceStrategy
from sharding_toys import batches, make_model, make_wrapper
from toys import Regression, batch

ORDER = ["setup", "build_model", "init_model_weights", "wrap_model", "compile_model"]


@pytest.fixture
def made() -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device="cpu")


def test_everything_is_built_in_the_written_order(made: SingleDeviceStrategy) -> None:
    calls: list[str] = []

    def tell(name: str) -> None:
        method = getattr(made, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        setattr(made, name, told)

    for name in ORDER:
        tell(name)
    made.prepare(Regression)
    assert calls == ORDER


def test_a_model_is_built_of_what_describes_it(made: SingleDeviceStrategy) -> None:
    module = Regression()
    assert made.build_model(module) is module
    assert made.build_model(lambda: module) is module
    lazy = LazyCall(nn.Linear)(in_features=1, out_features=2)
    assert isinstance(made.build_model(lazy), nn.Linear)


@pytest.mark.parametrize("wrong", [3, {"type": "Linear"}, lambda: 3])
def test_what_gives_no_model_is_refused(made: SingleDeviceStrategy, wrong: Any) -> None:
    with pytest.raises(TypeError, match="LazyCall"):
        made.build_model(wrong)


def test_what_was_prepared_is_returned(made: SingleDeviceStrategy) -> None:
    model = made.prepare(Regression)
    assert model is made.model
    assert made.prepare(model) is model


def test_a_second_model_is_refused(made: SingleDeviceStrategy) -> None:
    made.prepare(Regression())
    with pytest.raises(ValueError, match="another model"):
        made.prepare(Regression())


class Waiting(Regression):
    """A model whose weights are still to be initialised."""

    is_init = False


def test_only_weights_that_wait_for_it_are_initialised() -> None:
    for kind, times in ((Waiting, 1), (Regression, 0)):
        model: Any = SingleDeviceStrategy(device="cpu").prepare(kind)
        assert model.initialized == times


@pytest.mark.parametrize(
    # nn.Module.compile compiles the method that calls the forward and the hooks.
    ("target", "function"),
    [("forward", "_call_impl"), ("train_step", "train_step")],
)
def test_the_method_asked_for_is_compiled_each_time(
    made: SingleDeviceStrategy,
    target: str,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def fake(function: Any, *args: Any, **options: Any) -> Any:
        assert options == {"backend": "eager"}
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", fake)
    options = {"target": target, "backend": "eager"}
    for _ in range(2):
        made.compile_model(Regression(), options)
    assert compiled == [function] * 2


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(
    made: SingleDeviceStrategy,
) -> None:
    model: Any = made.prepare(Regression(), compile={"backend": "eager"})
    x, y = batch(2, 0)
    before = model(x, y)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.last.weight)
    assert torch.equal(model(x, y), before)
    assert torch.equal(copied(x, y), copied.last.bias.expand(2, 1))
    assert list(model.state_dict()) == list(Regression().state_dict())


def graphs_and_losses(by_blocks: bool, again: Any) -> tuple[list[int], list[float]]:
    """The number of checkpointed calls in each compiled graph; the losses of two steps."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [str(node.target) for node in graph.graph.nodes]
        graphs.append(sum("checkpoint" in call for call in calls))
        return graph.forward

    torch._dynamo.reset()
    strategy = SingleDeviceStrategy(
        device="cpu", activation_checkpointing=again, seed=3
    )
    model = make_model()
    if by_blocks:
        for block in model.blocks:
            block.compile(backend=backend)
    model = strategy.prepare(model, compile=not by_blocks and {"backend": backend})
    wrapper = make_wrapper(model)
    losses = []
    for inputs in batches(2):
        loss = model(inputs)["loss_lm"]
        wrapper.update_params(loss)
        losses.append(loss.item())
    return graphs, losses


# torch's compiler reads .grad of the inputs of a block.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("by_blocks", "graphs"), [(False, [2]), (True, [1])])
def test_what_is_computed_again_is_compiled_too(by_blocks: bool, graphs: Any) -> None:
    plain, losses = graphs_and_losses(by_blocks, ())
    assert set(plain) == {0}
    # One graph for the whole model, or one that all blocks share.
    assert graphs_and_losses(by_blocks, ["Block"]) == (graphs, losses)
