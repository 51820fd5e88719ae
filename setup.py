"""Packaging of hooktrain; the settings of the tools stand in pyproject.toml."""

import os
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "hooktrain/__init__.py").read_text()
)
assert VERSION is not None

TENSORBOARD = ["tensorboard>=2.14", "pillow>=9.4"]
PLOT = ["matplotlib>=3.7"]
SAFETENSORS = ["safetensors>=0.4"]
DETECTION = ["pillow>=9.4", "pycocotools>=2.0.8"]
STORE = ["s3fs>=2024.2"]

# The address of the repository, such as https://github.com/OWNER/NAME. The release workflow sets
# it; without it the package names no address, and the links of its description stay relative.
URL = os.environ.get("PROJECT_URL")


def description():
    """README.md, with links to the files of this version in the repository if it is known."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if URL is None:
        return text
    tag = f"v{VERSION.group(1)}"
    text = re.sub(r"\]\((?!https?:|#)", f"]({URL}/blob/{tag}/", text)
    return text.replace('src="', f'src="{URL}/raw/{tag}/')


# The scripts of the command hooktrain, and what changes the imports of other projects.
TOOLS = [
    "train_net.py",
    "plot.py",
    "checkpoint.py",
    "compare.py",
    "compare_trace.py",
    "follow.py",
    "estimate.py",
    "estimate_rank.py",
    "estimate_watch.py",
    "new.py",
    "from_detectron2.sed",
    "from_mmengine.sed",
]
# What only the site needs of docs/, whose pages a user of the package can read too.
OF_THE_SITE = ["__pycache__", "_static", "conf.py", "reference"]
# Documents of the root, and the pages of the site that stand for them.
OF_THE_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}


def project_urls(url):
    return {
        "Source": url,
        "Documentation": f"{url}/tree/v{VERSION.group(1)}/docs",
        "Changelog": f"{url}/blob/v{VERSION.group(1)}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


class BuildWithScripts(build_py):
    """Copies documents, examples, configurations and the tools of users into the package."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "hooktrain")
        unwanted = shutil.ignore_patterns("__pycache__")
        for name in ("configs", "examples"):
            copy = package / name
            shutil.copytree(ROOT / name, copy, ignore=unwanted, dirs_exist_ok=True)
        unwanted = shutil.ignore_patterns(*OF_THE_SITE)
        docs = package / "docs"
        shutil.copytree(ROOT / "docs", docs, ignore=unwanted, dirs_exist_ok=True)
        for name, page in OF_THE_ROOT.items():
            shutil.copy(ROOT / name, package)
            (docs / page).unlink()
        (package / "tools").mkdir(exist_ok=True)
        for tool in TOOLS:
            shutil.copy(ROOT / "tools" / tool, package / "tools")


setup(
    name="hooktrain",
    version=VERSION.group(1),
    description="A hook-based minimal trainer for PyTorch that never loses or changes a run",
    long_description=description(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    project_urls={} if URL is None else project_urls(URL),
    python_requires=">=3.10",
    # With this an editable installation is a path, which mypy and pyright follow too.
    package_dir={"": "."},
    packages=find_packages(include=["hooktrain", "hooktrain.*"]),
    package_data={"hooktrain": ["py.typed", "demos/digits_data/*"]},
    install_requires=[
        "torch>=2.10.0a0",
        "filelock>=3.30",  # torch needs it too, in any version
        "numpy>=1.24",
        "tabulate>=0.9",
        "termcolor>=2.3",
    ],
    entry_points={"console_scripts": ["hooktrain = hooktrain.__main__:main"]},
    cmdclass={"build_py": BuildWithScripts},
    extras_require={
        "tensorboard": TENSORBOARD,
        "plot": PLOT,
        "detection": DETECTION,
        "safetensors": SAFETENSORS,
        "store": STORE,
        "store-server": [*STORE, "moto[server]>=5.0"],  # to test stores with
        "examples": [
            "gymnasium>=1.0",
            "peft>=0.15",
            "timm>=1.0.9",
            "torch-geometric>=2.6",
            "transformers>=4.40",
        ],
        "vision": ["torchvision>=0.24"],
        "trackers": ["wandb>=0.19", "mlflow>=2.15", "trackio>=0.20"],
        "engines": ["openmpi>=5.0", "ray[train]>=2.40", "submitit>=1.5"],
        "docs": ["furo>=2024.8.6", "myst-parser>=4.0", "sphinx>=8.1", *TENSORBOARD],
        "types": ["pyright[nodejs]>=1.1.400"],
        "dev": [
            *TENSORBOARD,
            *PLOT,
            *DETECTION,
            "datasets>=5.0",
            "hypothesis>=6.90",
            "mmengine==0.10.7",
            "mypy>=1.11",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.6",
            "setuptools>=77",
            "torchdata>=0.10",
            "torchmetrics>=1.0",
            "transformers>=4.40",
            "types-tabulate",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        *[f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)],
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
