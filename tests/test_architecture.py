"""The import arrows of the package point downwards; here is the table, and what enforces it."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hooktrain"
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

# A module may import from a lower floor, or from its own folder without going round in a circle.
FLOORS = {
    "hooktrain.utils": 0,
    "hooktrain.config": 1,
    "hooktrain.events": 1,
    "hooktrain.utils.events": 2,  # the name that detectron2's users know
    "hooktrain.data": 2,
    "hooktrain.model": 2,
    "hooktrain.solver": 3,
    "hooktrain.checkpoint": 3,
    "hooktrain.evaluation": 3,
    "hooktrain.strategy": 4,
    "hooktrain.engine": 5,
    "hooktrain.demos": 6,
    "hooktrain.compat": 6,
    "hooktrain.__main__": 7,
}

# The most nodes of the syntax tree that each folder may have, without docstrings. Whoever wants to
# add something takes something away, or raises a number here.
BUDGETS = {
    "engine": 7_910,
    "engine/hooks": 5_100,
    "strategy": 3_640,
    "solver": 7_210,
    "checkpoint": 5_650,
    "evaluation": 2_120,
    "data": 2_530,
    "model": 3_410,
    "config": 2_250,
    "events": 3_540,
    "utils": 4_820,
    ".": 310,
    "compat": 9_640,
    "demos": 4_350,
}
WHOLE = 48_410  # without compat and demos
NODES_A_LINE = 5.2
CHARACTERS_A_LINE = 36

# What a newcomer reads to understand a run, in this order; docs/architecture.md says what to look
# for in each file.
READERS_PATH = re.findall(
    r"^\| `([\w/]+\.py)` \| ", ARCHITECTURE.read_text("utf-8"), re.M
)
# An hour at some 230 words a minute.
PATH_NODES, PATH_FILES, PATH_WORDS = 11_150, 14, 13_900

# They import torch.distributed.checkpoint or FSDP, and so are imported where they are used.
HEAVY = {"hooktrain.checkpoint.folders"}


def modules() -> dict[str, ast.Module]:
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def home(module: str) -> str:
    """The longest entry of FLOORS that the module lies in, or the package itself."""
    inside = [f for f in FLOORS if module == f or module.startswith(f + ".")]
    return max(inside, key=len, default="hooktrain")


def package_imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The modules of the package that a syntax tree imports, by their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.name for a in node.names if a.name.split(".")[0] == "hooktrain"
            )
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "hooktrain"
        ):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (
                    full
                    if full in known or f"{full}.__init__" in known
                    else str(node.module)
                )


def test_no_module_imports_from_its_own_floor_or_above() -> None:
    trees = modules()
    wrong = []
    for name, tree in trees.items():
        for target in package_imports(tree, set(trees)):
            here, there = home(name), home(target)
            if "hooktrain" in (here, there) or here == there:
                continue
            if FLOORS[there] >= FLOORS[here]:
                wrong.append(
                    f"{name} (floor {FLOORS[here]}) imports {target} ({FLOORS[there]})"
                )
    assert wrong == []


def test_imports_inside_a_folder_do_not_go_round_in_a_circle() -> None:
    trees = modules()
    graph = {
        name: {
            t if t in trees else f"{t}.__init__"
            for t in package_imports(tree, set(trees))
            if home(t) == home(name)
        }
        for name, tree in trees.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"imports in a circle: {' -> '.join((*path, name))}"
        if name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_imports_of_the_package_are_absolute_and_stand_at_the_top_of_a_file() -> None:
    trees = modules()
    wrong = []
    for name, tree in trees.items():
        relative = [
            n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level
        ]
        top = set(package_imports(ast.Module(tree.body, []), set(trees)))
        functions = [
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)
        ]
        inner = {t for f in functions for t in package_imports(f, set(trees))} - HEAVY
        if relative or inner:
            wrong.append((name, sorted(inner), len(relative), len(top)))
    assert wrong == []


def test_docs_architecture_names_every_file_of_the_package_with_its_floor() -> None:
    rows = re.findall(
        r"^\| (\d) \| `(.*?)` \| (.*) \|$", ARCHITECTURE.read_text("utf-8"), re.M
    )
    named = [
        (int(floor), f.removeprefix("./") + file)
        for floor, f, text in rows
        for file in re.findall(r"`(\w+\.py)`", text)
    ]
    there = [
        (FLOORS[home(name)], name.replace(".", "/").removeprefix("hooktrain/") + ".py")
        for name in modules()
        if not name.endswith("__init__")
    ]
    assert sorted(named) == sorted(there)


def test_the_engine_is_imported_without_what_is_heavy_and_seldom_used() -> None:
    heavy = [
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.elastic",
    ]
    code = (
        f"import sys, hooktrain.engine; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path]),
        },
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert done.stdout == "[]\n"


def count_nodes(path: Path) -> int:
    """The nodes of a file's syntax tree without docstrings, loads and stores."""
    tree = ast.parse(path.read_text("utf-8"))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = sum(
        ast.get_docstring(node) is not None
        for node in ast.walk(tree)
        if isinstance(node, documented)
    )
    contexts = ast.Load | ast.Store | ast.Del
    nodes = sum(not isinstance(node, contexts) for node in ast.walk(tree))
    return nodes - 2 * docstrings


def lines_of_code(path: Path) -> list[str]:
    """The lines that hold code, stripped: no docstrings, comments and blank lines."""
    text = path.read_text("utf-8")
    no_code = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            first = node.body[0]
            numbers.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = text.splitlines()
    return [lines[number - 1].strip() for number in sorted(numbers)]


def files_in(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).glob("*.py"))


def total(paths: Iterable[Path]) -> int:
    return sum(map(count_nodes, paths))


def test_every_folder_has_a_budget() -> None:
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    assert folders == set(BUDGETS)


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_its_budget_of_nodes(folder: str) -> None:
    assert total(files_in(folder)) <= BUDGETS[folder]


def test_the_framework_keeps_its_budget_of_nodes() -> None:
    framework = [files_in(f) for f in BUDGETS if f not in ("compat", "demos")]
    assert sum(map(total, framework)) <= WHOLE


@pytest.mark.parametrize("folder", BUDGETS)
def test_the_lines_of_a_folder_are_not_dense(folder: str) -> None:
    lines = [line for path in files_in(folder) for line in lines_of_code(path)]
    assert total(files_in(folder)) / len(lines) <= NODES_A_LINE
    assert sum(map(len, lines)) / len(lines) <= CHARACTERS_A_LINE


def test_the_readers_path_keeps_its_budget() -> None:
    paths = [PACKAGE / name for name in READERS_PATH]
    assert len(paths) <= PATH_FILES
    assert total(paths) <= PATH_NODES
    words = sum(len(path.read_text("utf-8").split()) for path in paths)
    assert words <= PATH_WORDS
