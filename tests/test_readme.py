"""The programs of README.md and of the guide, docs/guide, run as they stand there."""

import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from equality import assert_same_end
from gloo import run_ranks
from hooktrain.data import build_test_loader, build_train_loader
from hooktrain.data.batches import Batches
from hooktrain.engine import SimpleTrainer, hooks
from hooktrain.evaluation import DatasetEvaluator, inference_on_dataset
from hooktrain.strategy import build_strategy
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensors
from processes import run_program
from toys import linear_trainer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "guide"
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
PAGES = {
    name: (FOLDER / name).read_text(encoding="utf-8")
    for name in re.findall(r"^\| \[.+?\]\((.+?\.md)\) \|", INDEX, re.MULTILINE)
}
FIRST = ["data.md", "model.md", "run.md", "metrics.md"]
GUIDE = "\n".join(PAGES.values())
# torch 2.15 warns of Python 3.13.0, and of torchdata.
STRICT = """\
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Guards may run slower")
warnings.filterwarnings("ignore", ".*set_vital")
"""


def programs(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def write(folder: Path, program: str) -> Path:
    script = folder / "train_net.py"
    script.write_text(program)
    return script


def run(folder: Path, program: str, *launcher: str) -> str:
    done = run_program(*launcher, write(folder, STRICT + program), folder=folder)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_alone(folder: Path, program: str) -> str:
    """The same as `run`, by a new interpreter."""
    result = subprocess.run(
        [sys.executable, "-W", "error", write(folder, program)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_the_program_of_the_readme_agrees_with_itself_and_goes_on_when_started_again(
    tmp_path: Path,
) -> None:
    (program,) = programs(README)
    folders = [tmp_path / "one", tmp_path / "two"]
    for i, folder in enumerate(folders):
        folder.mkdir()
        start = run if i else run_alone
        start(folder, f"import torch; torch.manual_seed({i})\n{program}")
    output = folders[0] / "output" / "readme"
    assert_same_end(output, folders[1] / "output" / "readme")
    assert {
        "model_0000099.pth",
        "model_final.pth",
        "last_checkpoint",
        "metrics.json",
    } <= {path.name for path in output.iterdir()}
    final = (output / "model_final.pth").read_bytes()
    run(folders[0], program)
    assert (output / "model_final.pth").read_bytes() == final


def test_the_program_of_the_readme_is_short() -> None:
    (program,) = programs(README)
    lines = [line for line in program.splitlines() if line]
    assert len([line for line in lines if re.match("import|from", line)]) <= 4
    assert len(lines) <= 32


def without_numbers(line: str) -> str:
    """A line of the log without its times and measurements, and without the folder of the run."""
    line = re.sub(r"eta: [\d:]+  ", "", line)
    line = re.sub(r"/\S+/output/", "output/", line)
    return re.sub(r"\d+[\d.:]*(e-\d+)?", "N", line)


def test_the_readme_shows_what_its_program_prints(tmp_path: Path) -> None:
    (program,) = programs(README)
    printed = run(tmp_path, program).splitlines()
    (shown,) = re.findall(
        r"lines with those of a run. -->\n```\n(.*?)```", README, re.S
    )
    parts = shown.split("...\n")
    table = [line for line in parts[0].splitlines() if re.match(r"\D", line)]
    assert table == printed[4:11]
    lines = "\n".join(map(without_numbers, printed))
    first, middle, last = (
        "\n".join(map(without_numbers, p.splitlines())) for p in parts
    )
    assert lines.startswith(first)
    assert f"\n{middle}\n" in lines
    assert lines.endswith(last)


def test_the_program_of_the_readme_is_one_run_of_two_processes(tmp_path: Path) -> None:
    (program,) = programs(README)
    alone, both = tmp_path / "alone", tmp_path / "both"
    alone.mkdir()
    both.mkdir()
    run(alone, program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = run(both, program, *torchrun)
    assert printed.count("The model, on 2 x cpu") == 1
    assert printed.count("iter: 199") == 1
    one, two = (folder / "output" / "readme" for folder in (alone, both))
    rows = [
        [
            json.loads(line)
            for line in (folder / "metrics.json").read_text().splitlines()
        ]
        for folder in (one, two)
    ]
    assert [row["iteration"] for row in rows[1]] == list(range(19, 200, 20))
    # Batch norm sees half of each batch; else they are the same.
    first, second = (each[0]["mean_loss"] for each in rows)
    assert first == pytest.approx(second, rel=0.05)
    assert first != second
    saved = torch.load(two / "model_final.pth", weights_only=True)
    assert saved["trainer"]["meta"]["world_size"] == 2
    assert (two / "log.txt.rank1").exists()


# Runs the first pages, and after them each further page with the names that they have defined.
EACH_PAGE = """
import json, pathlib


def run_pages(names):
    first, further = json.loads(pathlib.Path("pages.json").read_text())
    for name, page in first.items():
        exec(compile(page, name, "exec"), names)
    before = dict(names)
    for name, page in further.items():
        print("page", name)
        exec(compile(page, name, "exec"), names)
        names.clear()
        names.update(before)


run_pages(globals())
"""


def test_the_blocks_of_each_page_of_the_guide_run_after_those_of_the_first_pages(
    tmp_path: Path,
) -> None:
    pages = {name: "\n\n".join(programs(page)) for name, page in PAGES.items()}
    first = {name: pages.pop(name) for name in FIRST}
    (tmp_path / "pages.json").write_text(json.dumps([first, pages]))
    start = "import os, vision; os.environ['TORCH_HOME'] = 'downloads'"
    start += "; os.environ.update(HF_HUB_OFFLINE='1', HF_HOME='downloads')"
    # torch's compiler looks at it while it reads the inputs of a block.
    start += "; warnings.filterwarnings('ignore', 'The .grad attribute of a Tensor')"
    # torch 2.10 warns of the files that torch.export has saved.
    start += "; warnings.filterwarnings('ignore', 'The given buffer is not writable')"
    printed = run(tmp_path, f"{start}\n{EACH_PAGE}")
    assert re.findall("^page (.+)$", printed, re.MULTILINE) == [*pages]
    assert "CountBig" in printed
    assert printed.count("refused: ") == 2
    assert re.search(r"rank 0 of 1 on cpu: loss 0\.00\d+", printed)


def test_the_script_of_the_guide_trains_on_any_number_of_processes(
    tmp_path: Path,
) -> None:
    (program,) = [block for block in programs(GUIDE) if "launch(" in block]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = run(tmp_path, program, *torchrun)
    assert sorted(re.findall(r"rank (\d) of 2 on cpu: loss 0\.00\d+", printed)) == [
        "0",
        "1",
    ]
    assert "Warning" not in printed


def test_the_guide_lists_its_pages_by_their_titles_and_the_first_ones_first() -> None:
    listed = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", INDEX, re.MULTILINE)
    titles = {name: page.partition("\n")[0] for name, page in PAGES.items()}
    assert [(f"# {title}", name) for title, name in listed] == [
        (title, name) for name, title in titles.items()
    ]
    assert [*titles][:4] == FIRST
    there = {path.name for path in FOLDER.iterdir()}
    assert there == {"index.md", *titles}


def with_a_slow_rank(program: str) -> str:
    """What the hook of the guide prints where rank 1 is slow."""
    names: dict[str, Any] = {"hooks": hooks, "comm": comm}
    exec(program.partition("\n\ntrainer.")[0], names)
    trainer = linear_trainer(names["Stragglers"]())
    if comm.get_rank() == 1:
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    printed = io.StringIO()
    with redirect_stdout(printed):
        trainer.train(max_iter=20)
    return printed.getvalue()


def test_the_hook_of_the_guide_names_the_slow_rank() -> None:
    (program,) = [block for block in programs(GUIDE) if "class Stragglers" in block]
    told = "the others wait for rank 1\n"
    assert run_ranks(with_a_slow_rank, 2, program) == [told, told]


def resumed_in_each_epoch(folder: str, text: str) -> list[bool]:
    """Whether streams of shards, of two lengths on two ranks, go on at the same samples."""
    own = Path(folder, str(comm.get_rank()))
    own.mkdir()
    os.chdir(own)
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME="downloads")
    first, second = (block for block in programs(text) if "stream_of_shards" in block)
    names: dict[str, Any] = {"comm": comm}
    exec(first + second, names)

    def labels(batches: Batches, count: int) -> list[Any]:
        return [next(batches)["point"].tolist() for _ in range(count)]

    def stream(workers: int) -> Batches:
        return Batches(names["PositionOfEachRank"](names["stream_of_shards"](workers)))

    same = []
    whole = {workers: labels(stream(workers), 80) for workers in (0, 2)}
    for workers, stop in ((0, 5), (0, 45), (2, 45)):
        before, after = stream(workers), stream(workers)
        read = labels(before, stop)
        after.load_state_dict(before.state_dict())
        read += labels(after, 80 - stop)
        same.append(read == whole[workers] and after.epoch == 2)
    return same


def test_the_stream_of_shards_of_the_guide_goes_on_where_each_rank_was(
    tmp_path: Path,
) -> None:
    results = run_ranks(resumed_in_each_epoch, 2, str(tmp_path), GUIDE)
    assert results == [[True] * 3] * 2


def read_by_the_ranks(program: str) -> tuple[str, Any, Any]:
    """What the block of the guide about several ranks prints, and the first shares of all."""
    names: dict[str, Any] = {"build_train_loader": build_train_loader}
    names["build_test_loader"] = build_test_loader
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(program, names)
    tested = names["shares"](build_test_loader(range(5), batch_size=5))
    return printed.getvalue().partition("\n")[0], names["of_ranks"], tested


def test_the_ranks_share_the_batches_of_the_guide_and_test_each_sample_once() -> None:
    (program,) = [block for block in programs(GUIDE) if "def shares" in block]
    first, alone, tested = read_by_the_ranks(program)
    assert tested == [[0, 1, 2, 3, 4]]
    for printed, of_ranks, shared in run_ranks(read_by_the_ranks, 2, program):
        assert printed == first
        assert [len(share) for share in of_ranks] == [2, 2]
        assert sorted(of_ranks[0] + of_ranks[1]) == sorted(alone[0])
        assert shared == [[0, 1, 2], [3, 4]]


def contrasted(program: str) -> tuple[list[float], list[float]]:
    """The losses of the guide's loss over pairs in some steps on 8 samples, and the weights."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    names["SimpleTrainer"] = SimpleTrainer
    exec(program.partition("\n\nx = ")[0], names)
    model = build_strategy(seed=0).prepare(lambda: torch.nn.Linear(8, 4))
    samples = torch.arange(64.0).sin().view(8, 8)
    own = samples.chunk(comm.get_world_size())[comm.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = names["Contrast"](model, [(own, own.flip(1))], optimizer)
    trainer.train(max_iter=5)
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    return losses, next(model.parameters()).flatten().tolist()


def test_the_loss_over_pairs_of_the_guide_is_the_same_on_two_ranks() -> None:
    (program,) = [block for block in programs(GUIDE) if "def of_all_ranks" in block]
    losses, weights = contrasted(program)
    assert losses[4] < losses[0]
    for of_rank in run_ranks(contrasted, 2, program):
        assert of_rank[0] == pytest.approx(losses, rel=1e-5)
        assert of_rank[1] == pytest.approx(weights, rel=1e-4, abs=1e-5)


def trained_in_turns(program: str) -> list[float]:
    """The weights of the guide's model that owns its step, trained on batches of this rank."""
    names: dict[str, Any] = {}
    exec(program, names)
    batch = torch.full((16, 8), float(comm.get_rank())) + torch.eye(16, 8)
    names["StepTrainer"](names["model"], [batch], names["optimizers"]).train(max_iter=5)
    model = names["unwrap_model"](names["model"])
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_the_model_of_the_guide_that_owns_its_step_is_the_same_on_two_ranks() -> None:
    own, with_ranks, _ = programs(PAGES["own-step.md"])
    first, second = run_ranks(trained_in_turns, 2, own + with_ranks)
    assert first == second
    assert first != trained_in_turns(own + with_ranks)


def predicted(folder: str, program: str) -> None:
    """Write the predictions of a model for 5 samples by the evaluator of the guide."""
    names: dict[str, Any] = {"DatasetEvaluator": DatasetEvaluator, "comm": comm}
    exec(program.partition("\n\nbest = ")[0], names)
    model = torch.nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [1.0]]))
        model.bias.copy_(torch.tensor([2.5, 0.0]))
    samples = torch.arange(5.0)[:, None]
    path = Path(folder, "predictions.csv")
    loader = build_test_loader(samples, batch_size=2)  # type: ignore[arg-type]
    inference_on_dataset(model, loader, names["Predictions"](path))


def test_the_predictions_of_two_ranks_are_in_the_order_of_the_data(
    tmp_path: Path,
) -> None:
    (program,) = [block for block in programs(GUIDE) if "class Predictions" in block]
    run_ranks(predicted, 2, str(tmp_path), program)
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    rows = [line.split(",")[:2] for line in lines]
    assert rows == [["0", "0"], ["1", "0"], ["2", "0"], ["3", "1"], ["4", "1"]]


def divided(program: str) -> tuple[float, Any]:
    """The loss of the guide's model on two ranks, and its weights."""
    names: dict[str, Any] = {}
    exec(program, names)
    model: Any = names["strategy"].prepare(names["Perceptron"])
    loss = model(torch.linspace(-1, 1, 32).view(4, 8))
    return loss.item(), full_tensors(model.state_dict())


def test_the_model_that_the_guide_divides_computes_what_it_did() -> None:
    (program,) = [block for block in programs(GUIDE) if "ColwiseParallel()" in block]
    (loss, weights), (other, _) = run_ranks(divided, 2, program)
    names: dict[str, Any] = {}
    exec(program, names)
    model: Any = names["Perceptron"]()
    model.load_state_dict(weights)
    whole = model(torch.linspace(-1, 1, 32).view(4, 8)).item()
    assert [loss, other] == pytest.approx([whole, whole], rel=1e-5)


@pytest.mark.parametrize(
    "name",
    sorted(
        set(
            re.findall(r"`((?:hooktrain|tools|configs|tests)/[\w/.]+)`", README + GUIDE)
        )
    ),
)
def test_files_that_they_name_exist(name: str) -> None:
    assert (ROOT / name).exists()
