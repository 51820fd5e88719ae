"""The migration guide: its scripts can be found and run, and its tables name what is there."""

import ast
import builtins
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooktrain import (
    checkpoint,
    config,
    data,
    demos,
    engine,
    evaluation,
    events,
    model,
    solver,
    strategy,
)
from hooktrain.compat import detectron2, mmengine
from hooktrain.compat.mmengine import registry
from hooktrain.engine import hooks
from hooktrain.model import wrappers
from hooktrain.utils import comm, env, logger
from processes import run_program
from toys import linear_trainer

GUIDE = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text(
    encoding="utf-8"
)
SCRIPTS = dict(
    re.findall(r"<!-- test: ([\w-]+) -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
)
IN_THE_GUIDE = tuple(
    SCRIPTS
)  # the modules of tests that import this one add what they join

Weights = dict[str, Tensor]


def write_script(name: str, folder: Path) -> Path:
    """Put a script of the guide, or several that are joined by "+", into a new folder."""
    (folder / name).mkdir()
    path = folder / name / "script.py"
    path.write_text("\n".join(SCRIPTS[part] for part in name.split("+")))
    return path


# Runs each script in a folder of its own, as `python script.py` there would. The trainer seeds each
# iteration, and the others draw from one stream. Without that, both draw the same numbers.
_RUN = """
import os, runpy, sys, torch, warnings
from hooktrain.engine import train_loop
_, how, *folders = sys.argv
warnings.simplefilter(how)
train_loop.seed_step = lambda *_: None
sys.modules["torchvision"] = None  # MMEngine looks for its version; not every build can be imported
sys.modules["transformers"] = None  # MMEngine imports it for one optimizer, which takes seconds
for folder in folders:
    os.chdir(folder)
    sys.argv = ["script.py"]
    model = runpy.run_path("script.py", run_name="__main__").get("model")
    if model is not None:
        torch.save(model.state_dict(), "weights.pth")
"""


def run_scripts(
    names: list[str], folder: Path, warnings: str = "error"
) -> dict[str, Weights]:
    """Run scripts one after the other in a new process; returns the weights of their `model`."""
    folders = [write_script(name, folder).parent for name in names]
    (folder / "run.py").write_text(_RUN)
    done = run_program(folder / "run.py", warnings, *folders)
    assert done.returncode == 0, done.stdout
    files = {path.name: path / "weights.pth" for path in folders}
    return {name: torch.load(file) for name, file in files.items() if file.exists()}


def assert_same_weights(ours: Weights, theirs: Weights) -> None:
    assert list(ours) == list(theirs)
    assert len(ours) > 0
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_every_script_of_the_guide_is_run() -> None:
    assert len(IN_THE_GUIDE) == GUIDE.count("```python") == GUIDE.count("<!-- test: ")
    tests = "".join(
        path.read_text() for path in Path(__file__).parent.glob("test_migrating_*.py")
    )
    for name in IN_THE_GUIDE:
        pair, _, side = name.rpartition("-")
        assert name in tests or (
            f'"{pair}"' in tests and f"{{pair}}-{side}" in tests
        ), name


@pytest.mark.parametrize("name", IN_THE_GUIDE)
def test_every_script_of_the_guide_is_valid_python(name: str) -> None:
    compile(SCRIPTS[name], name, "exec")


# Where a name in the tables' right column can be from, in this order.
MODULES: list[ModuleType] = [
    *(engine, hooks, solver, model, wrappers, data, checkpoint, evaluation, config),
    *(registry, events, env, logger, strategy, mmengine, detectron2, demos),
    *(torch, nn.parallel, torch.amp, torch.utils.data, torch.optim.lr_scheduler),
]


def calls_and_classes() -> list[str]:
    """The code in the tables' right column that is a call, an attribute or a class."""
    cells = [
        line.split("|")[-2] for line in GUIDE.splitlines() if line.startswith("| ")
    ]
    code = {span for cell in cells for span in re.findall(r"`([^`]+)`", cell)}
    wanted = re.compile(
        r"[A-Z][a-z]+[A-Z]\w*$|[A-Za-z_][\w.]*\(|(hooks|trainer|checkpointer)\."
    )
    return sorted(span for span in code if wanted.match(span))


TRAINER = linear_trainer()
# What stands in the code for an object.
OBJECTS = {
    "checkpointer": checkpoint.Checkpointer(nn.Linear(1, 1)),
    "comm": comm,
    "hooks": hooks,
    "model": model.BaseModel,
    "optim_wrapper": TRAINER.optim_wrapper,
    "strategy": mmengine.SingleDeviceStrategy(),
    "torch": torch,
    "trainer": TRAINER,
    "update_params": TRAINER.optim_wrapper.update_params,
}


def resolve(name: str) -> Any:
    first, *rest = name.split(".")
    found = OBJECTS.get(first)
    if first == "self":  # a model or a trainer
        found = next(e for e in (model.BaseModel, TRAINER) if hasattr(e, rest[0]))
    if found is None:
        found = next(
            getattr(place, first)
            for place in (*MODULES, builtins)
            if first in vars(place)
        )
    for attribute in rest:
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("code", calls_and_classes())
def test_what_the_tables_name_takes_these_arguments(code: str) -> None:
    if re.fullmatch(r"[\w.]+", code):
        resolve(code)
    for node in ast.walk(ast.parse(code, mode="eval")):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if (
            isinstance(node, ast.Call)
            and re.fullmatch(r"[\w.]+", name)
            and name != "dict"
        ):
            # "..." stands for any number of arguments.
            given = [a for a in node.args if ast.unparse(a) != "..."]
            keywords = {keyword.arg or "": None for keyword in node.keywords}
            inspect.signature(resolve(name)).bind_partial(*given, **keywords)
