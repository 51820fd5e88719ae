"""Random parameter schedulers, and their values over time, here and in MMEngine."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from hypothesis import settings, strategies as st

import mmengine_itself  # noqa: F401  # before mmengine

# isort: split
import mmengine.optim.scheduler

theirs = mmengine.optim.scheduler
SAME_EACH_TIME = settings(
    deadline=None, derandomize=True, database=None, max_examples=40
)

Spec = tuple[str, dict[str, Any]]

FACTORS = st.floats(0.05, 1.0)
FLOORS = st.sampled_from([{}, {"eta_min": 0.003}, {"eta_min_ratio": 0.02}])
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "Constant": st.fixed_dictionaries({}, optional={"factor": FACTORS}),
    "Linear": st.fixed_dictionaries(
        {"end_factor": FACTORS}, optional={"start_factor": FACTORS}
    ),
    "Step": st.fixed_dictionaries({"step_size": st.integers(1, 20), "gamma": FACTORS}),
    "MultiStep": st.fixed_dictionaries(
        {"milestones": st.lists(st.integers(0, 40), max_size=4)},
        optional={"gamma": FACTORS},
    ),
    "Exponential": st.fixed_dictionaries({"gamma": st.floats(0.9, 1.0)}),
    "CosineAnnealing": st.builds(
        lambda floor, length: {**floor, **length},
        FLOORS,
        st.fixed_dictionaries({}, optional={"T_max": st.integers(60, 120)}),
    ),
    "Poly": st.fixed_dictionaries(
        {"power": st.floats(0.5, 2.0), "eta_min": st.floats(0, 0.01)}
    ),
}


@st.composite
def schedulers(draw: st.DrawFn, begin: int | None = None) -> Spec:
    """The name of a family, and the arguments of one of its schedulers."""
    family = draw(st.sampled_from(sorted(ARGUMENTS)))
    begin = draw(st.integers(0, 40)) if begin is None else begin
    end = begin + draw(st.integers(1, 60))
    return family, {**draw(ARGUMENTS[family]), "begin": begin, "end": end}


@st.composite
def chains(draw: st.DrawFn) -> list[Spec]:
    """Schedulers of which each begins where the one before ends, or some steps later."""
    chain: list[Spec] = []
    begin = 0
    for _ in range(draw(st.integers(2, 3))):
        chain.append(draw(schedulers(begin)))
        begin = chain[-1][1]["end"] + draw(st.sampled_from([0, 0, 3]))
    return chain


def sgd(*lrs: float | torch.Tensor) -> torch.optim.SGD:
    """An optimizer with a group for each learning rate."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def rates(optimizer: Any) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def run(optimizer: Any, made: list[Any], steps: int) -> list[float]:
    """The rate of the first group before each step of the schedulers."""
    seen = []
    for _ in range(steps):
        seen += [float(rates(optimizer)[0])]
        for scheduler in made:
            scheduler.step()
    return seen


def values(
    library: ModuleType,
    specs: list[Spec],
    optimizer: Any,
    read: Callable[[dict[str, Any]], Any] = lambda group: group["lr"],
    *,
    form: str = "LR",
    steps: int = 100,
    change: Callable[[int, Any], None] = lambda step, optimizer: None,
) -> list[list[float]]:
    """The values of the groups at each step, with the schedulers stepped in order."""
    seen = []
    with warnings.catch_warnings():
        # MMEngine wants optimizer.step() to be called first, which needs gradients.
        warnings.simplefilter("ignore")
        made = [
            getattr(library, family + form)(optimizer, **args) for family, args in specs
        ]
        for step in range(steps):
            seen.append([float(read(group)) for group in optimizer.param_groups])
            change(step, optimizer)
            for scheduler in made:
                scheduler.step()
    return seen
