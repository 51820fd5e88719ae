"""The guide's recipes for packages that the tests do not install: skipped where one is missing."""

import re
from pathlib import Path

import pytest

from processes import run_program
from test_readme import GUIDE, programs, write

BLOCKS = dict(re.findall(r"```py\n# (bar|float8|tune)\.py\n(.*?)```", GUIDE, re.DOTALL))
BEFORE = [
    next(block for block in programs(GUIDE) if text in block)
    for text in (
        "class Points(",
        "class Net(",
        "import SimpleTrainer, default",
        "def error_rate",
    )
]


def run(folder: Path, recipe: str, then: str) -> str:
    before = [block.partition("\n\ntorch.manual_seed")[0] for block in BEFORE]
    before = [block.partition("\n\nresults =")[0] for block in before]
    script = write(folder, "\n\n".join([*before, BLOCKS[recipe], then]))
    done = run_program(script, folder=folder)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_bar_of_tqdm_shows_the_losses(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    then = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
trainer = SimpleTrainer(model, train_loader, optimizer)
trainer.register_hooks([hooks.PeriodicWriter([Bar()], period=10)])
trainer.train(max_iter=20)
"""
    printed = run(tmp_path, "bar", then)
    assert re.search(r"20/20 .*total_loss=\d", printed)


def test_float8_by_torchao_trains_with_the_same_names(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    then = """
from torchao.float8.float8_linear import Float8Linear
kinds = [type(module) for module in model.modules()]
print(kinds.count(Float8Linear), model.state_dict().keys() == Net().state_dict().keys())
losses = trainer.storage.history("total_loss")
print(losses.median(20) < losses.values()[0][0] / 2)
"""
    printed = run(tmp_path, "float8", then).splitlines()
    assert printed[-2:] == ["1 True", "True"]


def test_optuna_finds_a_rate_and_prunes(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    then = """
pruned = study.get_trials(states=[optuna.trial.TrialState.PRUNED])
print(len(study.trials), 0 < len(pruned) < 7, study.best_value < 0.15)
"""
    printed = run(tmp_path, "tune", then).splitlines()
    assert printed[-1] == "10 True True"
