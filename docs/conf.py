"""Settings of Sphinx, which makes the site of these pages: `make docs`."""

import importlib
import inspect
import operator
import os
import pkgutil
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import hooktrain

project = "hooktrain"
version = release = hooktrain.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpicky = True  # a reference to nothing is a warning, and `make docs` fails by it

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4  # as GitHub's, so that one link serves both

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "hooktrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_show_copyright = False

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Pages that are files of the repository's root.
ROOT_PAGES = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
}
# What annotations name and other packages document.
EXTERNAL = {*sys.stdlib_module_names, "torch", "numpy", "matplotlib"}
FOR_TYPE_CHECKERS = {"SummaryWriter", "MixedPrecisionPolicy", "Figure"}

# The name in the reference of each class and function, by the name of its definition.
documented: dict[str, str] = {}


def public_names(module: Any) -> dict[str, Any]:
    """The classes and functions of hooktrain that a module has."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(inspect.unwrap(value)))
        and value.__module__.startswith("hooktrain")
    }


def definition(value: Any) -> str:
    """Where a class or function is defined."""
    return f"{value.__module__}.{value.__qualname__}"


def describe(name: str, value: Any) -> list[str]:
    """The directive that documents a public name."""
    if inspect.isclass(value):
        if name.endswith(".OmegaConf"):  # its metaclass refuses what Sphinx asks
            return [f".. class:: {name}", "", f"   {inspect.getdoc(value)}", ""]
        options = ["   :members:", "   :show-inheritance:"]
        return [f".. autoclass:: {name}", *options, ""]
    return [f".. autofunction:: {name}", ""]


def package_page(name: str) -> str:
    """The reference of a package: what users import from it, then the rest of its modules."""
    package = importlib.import_module(name)
    lines = [f".. automodule:: {name}", ""]
    inside = f"{name}."
    known = set()
    elsewhere = []
    for each, value in public_names(package).items():
        if f"{value.__module__}.".startswith(inside):
            lines += describe(f"{name}.{each}", value)
            known.add(each)
            documented[definition(value)] = f"{name}.{each}"
        else:
            elsewhere.append(f":py:obj:`{each} <{definition(value)}>`")
    if elsewhere:
        lines += ["These names of other packages can be imported from here too:", ""]
        lines += [", ".join(elsewhere), ""]
    for info in pkgutil.iter_modules(getattr(package, "__path__", []), inside):
        if info.ispkg:
            continue
        module = importlib.import_module(info.name)
        further = {
            each: value
            for each, value in public_names(module).items()
            if value.__module__ == info.name and each not in known
        }
        if further:
            lines += [info.name, "-" * len(info.name), ""]
            lines += [f".. automodule:: {info.name}", ""]
            for each, value in further.items():
                lines += describe(f"{info.name}.{each}", value)
    return "\n".join(lines)


def relink(text: str, folder: Path) -> str:
    """Links between pages of the site. Links to what it does not have become their text."""

    def change(match: re.Match[str]) -> str:
        label, name, anchor = match.groups()
        target = (folder / name).resolve()
        if not target.is_relative_to(ROOT):
            return match[0]
        for page, file in ROOT_PAGES.items():
            if target == ROOT / file:
                return f"[{label}]({os.path.relpath(DOCS / page, start)}.md{anchor})"
        elsewhere = target.suffix == ".md" and not target.is_relative_to(DOCS)
        if elsewhere or target.is_dir():
            return label
        return f"[{label}]({os.path.relpath(target, start)}{anchor})"

    start = folder if folder.is_relative_to(DOCS) else DOCS
    return re.sub(r"\[([^]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*|)\)", change, text)


def fill_page(app: Sphinx, document: str, source: list[str]) -> None:
    """Put a file of the root, or the reference of a package, into a page that stands for it."""
    path = Path(app.env.doc2path(document))
    text = source[0]
    if document in ROOT_PAGES:
        before = (ROOT / ROOT_PAGES[document]).read_text(encoding="utf-8")
        text = relink(before, ROOT).replace('src="docs/', 'src="') + text
    elif path.suffix == ".md":
        text = relink(text, path.parent)
    else:
        asked = re.compile(r"^\.\. package:: (\S+)$", re.MULTILINE)
        text = asked.sub(lambda match: package_page(match[1]), text)
    source[0] = text


def meant(target: str, module: str | None, owner: str | None) -> str:
    """The name in the reference of what Python would find under a name at this place."""
    here: Any = sys.modules.get(str(module))
    of = vars(here).get(owner) if here else None
    for scope in (of, sys.modules.get(str(getattr(of, "__module__", None))), here):
        with suppress(AttributeError, ImportError):
            found = operator.attrgetter(target)(scope)
            target = definition(found)
            break
    for known, name in documented.items():
        if target == known or target.startswith(f"{known}."):
            return name + target.removeprefix(known)
    return target


def find_reference(
    app: Sphinx, env: BuildEnvironment, node: Any, contnode: nodes.Element
) -> nodes.Element | None:
    """Find what a docstring names as its own module names it, or by its last part."""
    if node.get("refdomain") != "py":
        return None
    target = meant(node["reftarget"], node.get("py:module"), node.get("py:class"))
    places = {
        (entry.docname, entry.node_id)
        for name, entry in env.domains["py"].objects.items()
        if name == target or (name.endswith(f".{target}") and ".compat." not in name)
    }
    if len(places) == 1:
        ((document, anchor),) = places
        return make_refnode(app.builder, node["refdoc"], document, anchor, contnode)
    root, _, _ = target.partition(".")
    last = target.rpartition(".")[2]
    known = root in EXTERNAL or last in FOR_TYPE_CHECKERS or is_private(last)
    return contnode if known else None


def is_private(name: str) -> bool:
    """Whether annotations and lists of bases show a name that is not in the reference."""
    return name.startswith("_") or len(name) == 1  # a variable of types


def skip_member(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out methods that a class takes from the standard library."""
    own = str(getattr(value, "__module__", "hooktrain")).startswith("hooktrain")
    return None if own else True


def setup(app: Sphinx) -> None:
    """Connect the functions."""
    app.connect("autodoc-skip-member", skip_member)
    app.connect("source-read", fill_page)
    app.connect("missing-reference", find_reference)
