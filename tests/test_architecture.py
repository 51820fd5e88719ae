"""The import arrows of the package point downwards; here is the table, and what enforces it."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hooktrain"
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

# A module may import from a lower floor, or from its own folder without going round in a circle.
FLOORS = {
    "hooktrain.utils": 0,
    "hooktrain.config": 1,
    "hooktrain.events": 1,
    "hooktrain.data": 2,
    "hooktrain.model": 2,
    "hooktrain.solver": 3,
    "hooktrain.checkpoint": 3,
    "hooktrain.evaluation": 3,
    "hooktrain.strategy": 4,
    "hooktrain.engine": 5,
    "hooktrain.api": 6,
    "hooktrain.demos": 6,
    "hooktrain.compat": 6,
    "hooktrain.compat.detectron2": 7,
    "hooktrain.compat.mmengine": 7,
    "hooktrain.__main__": 8,
}

# The most nodes of the syntax tree, without docstrings. Who adds something takes something away.
CORE = 50_000  # all but compat and demos
COMPAT = 14_400

# They import torch.distributed.checkpoint or FSDP, and so are imported where they are used.
HEAVY = {"hooktrain.checkpoint.folders"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> dict[str, ast.Module]:
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        trees[name] = parsed(path)
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


def of_types_only(node: ast.stmt) -> bool:
    """Whether this is a block that only type checkers read."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_imports_inside_a_folder_do_not_go_round_in_a_circle() -> None:
    trees = modules()
    graph = {
        name: {
            t if t in trees else f"{t}.__init__"
            for node in tree.body
            if not of_types_only(node)
            for t in package_imports(node, set(trees))
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
    text = ARCHITECTURE.read_text("utf-8")
    named = re.findall(r"^\| (\d) \| `(?:\./)?([\w/]+)\.py` \| .+ \|$", text, re.M)
    there = [
        (str(FLOORS[home(name)]), name.replace(".", "/").removeprefix("hooktrain/"))
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


@cache
def count_nodes(path: Path) -> int:
    """The nodes of a file's syntax tree without docstrings, loads and stores."""
    tree = parsed(path)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = sum(
        ast.get_docstring(node) is not None
        for node in ast.walk(tree)
        if isinstance(node, documented)
    )
    contexts = ast.Load | ast.Store | ast.Del
    nodes = sum(not isinstance(node, contexts) for node in ast.walk(tree))
    return nodes - 2 * docstrings


def mass(paths: Iterable[Path]) -> int:
    return sum(map(count_nodes, paths))


def files_in(folder: str) -> set[Path]:
    return set((PACKAGE / folder).rglob("*.py"))


def test_compat_keeps_its_budget_of_nodes() -> None:
    assert mass(files_in("compat")) <= COMPAT


def test_the_core_keeps_its_budget_of_nodes() -> None:
    assert mass(files_in(".") - files_in("compat") - files_in("demos")) <= CORE


def test_no_class_name_has_two_meanings_in_the_core() -> None:
    homes: dict[str, list[str]] = {}
    for name, tree in modules().items():
        if home(name).startswith("hooktrain.compat"):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {kind: names for kind, names in homes.items() if len(names) > 1} == {}
