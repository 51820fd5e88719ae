"""What is published: the wheel and the source distribution are those of the repository."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The files and folders of a clone; a test of the source distribution runs in one.
SOURCES = (
    *("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile"),
    *("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("CITATION.cff", ".ci", ".github"),
    *("hooktrain", "configs", "docs", "examples", "tests", "tools"),
)
TOOLS = {
    *("train_net.py", "plot.py", "checkpoint.py", "compare.py", "new.py"),
    "compare_trace.py",
    *("follow.py", "estimate.py", "estimate_rank.py", "estimate_watch.py"),
    *("from_detectron2.sed", "from_mmengine.sed"),
}
OF_THE_ROOT = "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"
# Pages of docs/ that only the site needs; three of them stand for a document of the root.
OF_THE_SITE = {"conf.py", "index.md", *map(str.lower, OF_THE_ROOT)}
WRITTEN_BY_A_BUILD = "PKG-INFO", "setup.cfg", "hooktrain.egg-info/*"


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def copy_sources(folder: Path) -> Path:
    """A copy of the repository's files, as of a clone."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
        else:
            folder.mkdir(exist_ok=True, parents=True)
            shutil.copy(ROOT / name, folder)
    return folder


def build(kind: str, sources: Path, **environment: str) -> Path:
    """Build a wheel or an sdist by the backend that pyproject.toml names."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('built')"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=sources,
        env={"SOURCE_DATE_EPOCH": "1700000000", "PATH": "/usr/bin:/bin", **environment},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (built,) = (sources / "built").iterdir()
    return built


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith("dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = copy_sources(tmp_path_factory.mktemp("first") / "hooktrain")
    return build("wheel", sources)


def test_two_builds_of_the_wheel_are_equal_in_every_byte(
    wheel: Path, tmp_path: Path
) -> None:
    again = build("wheel", copy_sources(tmp_path / "elsewhere"))
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_files_of_the_wheel_are_those_of_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        packed = {
            name: file.read(name)
            for name in file.namelist()
            if ".dist-info/" not in name
        }
    expected = {
        f"hooktrain/{name}": content
        for name, content in files_below(ROOT / "hooktrain").items()
    }
    for folder in ("configs", "examples"):
        for name, content in files_below(ROOT / folder).items():
            expected[f"hooktrain/{folder}/{name}"] = content
    for name, content in files_below(ROOT / "docs").items():
        if name not in OF_THE_SITE and not name.startswith(("_static", "reference")):
            expected[f"hooktrain/docs/{name}"] = content
    for name in TOOLS:
        expected[f"hooktrain/tools/{name}"] = (ROOT / "tools" / name).read_bytes()
    for name in OF_THE_ROOT:
        expected[f"hooktrain/{name}"] = (ROOT / name).read_bytes()
    assert packed == expected


def test_the_documents_of_the_wheel_link_to_files_of_the_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    package = tmp_path / "hooktrain"
    pages = [*package.glob("*.md"), *package.glob("docs/**/*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(((?!https?:|#)[\w./-]+)[#)]", page.read_text())
    ]
    assert len(links) > 60
    assert [page.name for page in pages if len(page.read_text()) < 500] == []
    assert [link for page, link in links if not (page.parent / link).exists()] == []


def test_the_description_of_a_release_links_to_the_files_of_its_version(
    wheel: Path, tmp_path: Path
) -> None:
    assert metadata_of(wheel).get_all("Project-URL") is None
    assert metadata_of(wheel)["License-Expression"] == "Apache-2.0"
    url = "https://host.invalid/owner/name"
    sources = copy_sources(tmp_path / "sources")
    metadata = metadata_of(build("wheel", sources, PROJECT_URL=url))
    assert f"Source, {url}" in metadata.get_all("Project-URL", [])
    tag = f"v{metadata['Version']}"
    text = metadata.get_payload()
    assert isinstance(text, str)
    linked = re.findall(r'\]\(([^)]+)\)|src="([^"]+)"', text)
    links = ["".join(link) for link in linked]
    assert f"{url}/blob/{tag}/docs/architecture.md#what-to-read-first" in links
    assert f"{url}/raw/{tag}/docs/run.png" in links
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_source_distribution_has_every_file_of_the_repository(
    tmp_path: Path,
) -> None:
    sources = copy_sources(tmp_path / "sources")
    expected = files_below(sources)
    packed = {}
    with tarfile.open(build("sdist", sources)) as file:
        for member in filter(tarfile.TarInfo.isfile, file):
            content = file.extractfile(member)
            assert content is not None
            _, _, name = member.name.partition("/")
            if not any(Path(name).match(pattern) for pattern in WRITTEN_BY_A_BUILD):
                packed[name] = content.read()
    assert packed == expected


def test_the_citation_names_the_version() -> None:
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "hooktrain/__init__.py").read_text(), re.M
    )
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()
