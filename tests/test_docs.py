"""Every link of the documents leads somewhere, and every document that the code names is there."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hooktrain.utils.names import locate

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/**/*.md"),
    *ROOT.glob("hooktrain/**/*.md"),
]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^]\n]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")


def prose(path: Path) -> str:
    """The text of a document without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Those of the headings, as GitHub and the site's generator make them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "document", [str(path.relative_to(ROOT)) for path in DOCUMENTS]
)
def test_the_links_of_a_document_lead_to_files_and_headings(document: str) -> None:
    path = ROOT / document
    dead = []
    for groups in LINK.findall(prose(path)):
        link = "".join(groups)
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_documents_have_many_links() -> None:
    links = [link for path in DOCUMENTS for link in LINK.findall(prose(path))]
    assert len(links) > 60


def test_the_chapters_of_the_code_are_as_long_as_they_are_said_to_be() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    said = r"some ([\d,]+) lines.*?:\n\n\| File.*?\n((?:\|.*\n)+)"
    chapters = re.findall(said, text)
    assert len(chapters) == 2
    for lines, table in chapters:
        files = re.findall(r"^\| `(.+?)`", table, re.MULTILINE)
        found = [(ROOT / "hooktrain" / file).read_text().count("\n") for file in files]
        assert sum(found) == pytest.approx(int(lines.replace(",", "")), rel=0.03)
    assert f"of some {chapters[0][0]} lines" in (ROOT / "README.md").read_text()


def test_the_documents_that_the_code_names_exist() -> None:
    sources = [
        path
        for folder in ("hooktrain", "configs", "tools", "tests", "examples")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    named = {
        (name, str(path.relative_to(ROOT)))
        for path in sources
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 15
    assert [each for each in sorted(named) if not (ROOT / each[0]).is_file()] == []


def test_the_reference_has_a_page_for_each_package() -> None:
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in ROOT.glob("hooktrain/**/__init__.py")
    }
    pages = {
        re.sub(r".*\.\. package:: (\S+)\s*", r"\1", path.read_text(), flags=re.DOTALL)
        for path in ROOT.glob("docs/reference/*.rst")
    }
    assert pages == packages - {"hooktrain"} | {"hooktrain.api"}


def test_references_of_docstrings_name_what_there_is() -> None:
    for path in ROOT.glob("hooktrain/**/*.py"):
        text = path.read_text("utf-8")
        for name in re.findall(r":(?:class|func|mod|meth|attr|data):`(.*?)`", text):
            assert "~" not in name, f"{path}: a page would show {name}"
            if name.startswith("hooktrain."):
                locate(name)


def first_lines(node: ast.FunctionDef) -> Iterator[str]:
    """The first lines of what a function returns, as its docstring says."""
    lines = (ast.get_docstring(node) or "").splitlines()
    if any("property" in ast.unparse(each) for each in node.decorator_list):
        yield from lines[:1]
    for line, following in pairwise(lines):
        if line in ("Returns:", "Yields:"):
            yield following


def test_no_result_has_a_colon_that_the_site_takes_for_the_end_of_a_type() -> None:
    found = []
    for path in (ROOT / "hooktrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name[0] != "_":
                lines = first_lines(node)
                found += [line for line in lines if re.match("[^`]*: ", line)]
    assert found == []
