"""Write the API reference of hooktrain into a folder: a page for each package and module.

    python tools/api_reference.py output/api

The page of a package has all that people import from it. Needs the extra `docs`.
"""

import importlib
import pkgutil
import sys
from inspect import ismodule
from pathlib import Path

import pdoc

import hooktrain


def main(folder: Path) -> None:
    """Tell pdoc what packages export, by `__all__`, and let it write the pages."""
    names = ["hooktrain"]
    for info in pkgutil.walk_packages(hooktrain.__path__, "hooktrain."):
        names.append(info.name)
        module = importlib.import_module(info.name)
        public = [name for name in vars(module) if not name.startswith("_")]
        exported = [name for name in public if not ismodule(getattr(module, name))]
        if info.ispkg and exported:
            modules = [inner.name for inner in pkgutil.iter_modules(module.__path__)]
            module.__all__ = [*exported, *modules]
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*names, output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
