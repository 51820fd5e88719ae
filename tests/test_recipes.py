"""The guide's recipes for packages that the tests do not install: skipped where one is missing."""

import re
from pathlib import Path

import pytest

from processes import run_program
from test_readme import GUIDE, programs, write

BLOCKS = dict(
    re.findall(
        r"```py\n# (bar|float8|tune|grain_loader)\.py\n(.*?)```", GUIDE, re.DOTALL
    )
)
BEFORE = [
    next(block for block in programs(GUIDE) if text in block)
    for text in ("class Points(", "class Net(", '"output/points"', "def error_rate")
]


def run(folder: Path, recipe: str, then: str) -> str:
    before = [block.partition("\n\nmodel = build_strategy")[0] for block in BEFORE]
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


def test_a_loader_of_grain_goes_on_at_the_same_batch_on_each_rank(
    tmp_path: Path,
) -> None:
    pytest.importorskip("grain")
    then = """
import json
import numpy as np

class Numbers:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"number": np.array(index)}

class Rank:
    def __init__(self, rank, size):
        self.data_parallel_rank = lambda: rank
        self.data_parallel_size = lambda: size

def take(loader, count):
    batches = iter(loader)
    return [next(batches)["number"].tolist() for _ in range(count)]

first_epoch = []
for rank in (0, 1):
    comm = Rank(rank, 2)
    expected = take(GrainLoader(Numbers(), 8, seed=3), 12)
    before, after = GrainLoader(Numbers(), 8, seed=3), GrainLoader(Numbers(), 8, seed=3)
    read = take(before, 7)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    print(read + take(after, 5) == expected)
    first_epoch += sum(expected[:5], [])
print(sorted(first_epoch) == list(range(40)))
"""
    printed = run(tmp_path, "grain_loader", then).splitlines()
    assert printed[-3:] == ["True", "True", "True"]


def test_a_run_with_grain_that_is_resumed_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    pytest.importorskip("grain")
    then = """
class Trainer(SimpleTrainer):
    def compute_loss(self, data):
        return self.model(data["point"]).square().mean()

class Arrays(Points):
    def __getitem__(self, index):
        return {"point": self.points[index].numpy()}

def trained(folder, *ends):
    for end in ends:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, GrainLoader(Arrays(40, 0), 8, seed=3), optimizer)
        saver = Checkpointer(model, folder, trainer=trainer)
        trainer.register_hooks([hooks.PeriodicCheckpointer(saver, 100)])
        saver.resume_or_load("")
        trainer.train(max_iter=end)
    return model.state_dict()

whole, resumed = trained("whole", 12), trained("resumed", 7, 12)
print(all(torch.equal(whole[name], resumed[name]) for name in whole))
"""
    assert run(tmp_path, "grain_loader", then).splitlines()[-1] == "True"
