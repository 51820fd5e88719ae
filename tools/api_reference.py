"""Write the API reference of hooktrain into a folder: a page for each package and module.

    python tools/api_reference.py output/api

The page of a package has all names that users import from it. The script needs the extra `docs`.
"""

import importlib
import pkgutil
import sys
import warnings
from inspect import ismodule
from pathlib import Path
from types import ModuleType

import hooktrain


def modules() -> list[ModuleType]:
    """All packages and modules of hooktrain."""
    found = pkgutil.walk_packages(hooktrain.__path__, "hooktrain.")
    return [hooktrain, *(importlib.import_module(info.name) for info in found)]


def exports(package: ModuleType) -> list[str]:
    """What users import from a package: its modules and its names."""
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    for name, value in vars(package).items():
        is_known = name.startswith("_") or name in names
        # Names of other packages, such as Tensor, come along with an `import *`.
        home = str(getattr(value, "__module__", hooktrain.__name__))
        is_own = home.startswith(hooktrain.__name__) and not ismodule(value)
        if is_own and not is_known:
            names.append(name)
    return names


def main(folder: Path) -> None:
    """Tell pdoc what packages export, and let it write the pages."""
    import pdoc

    # Names that only type checkers import are not found.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    for module in modules():
        if hasattr(module, "__path__"):
            module.__all__ = exports(module)  # type: ignore[attr-defined]
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("hooktrain", output_directory=folder)
    for page in folder.rglob("*.html"):  # "Example::" comes before a block of code
        page.write_text(page.read_text("utf-8").replace("::</p>", ":</p>"), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
