"""Packaging of hooktrain; the settings of the tools stand in pyproject.toml."""

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
PROGRESS = ["tqdm>=4.66"]
SAFETENSORS = ["safetensors>=0.4"]
DETECTION = ["pillow>=9.4", "pycocotools>=2.0.8"]
STORE = ["moto[server]>=5.0", "s3fs>=2024.2"]  # a server to test with, and its client

# The scripts of the command hooktrain, and what changes the imports of other projects.
TOOLS = [
    "train_net.py",
    "plot.py",
    "checkpoint.py",
    "new.py",
    "from_detectron2.sed",
    "from_mmengine.sed",
]


class BuildWithScripts(build_py):
    """Copies README, configurations and the tools of users into the package."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "hooktrain")
        shutil.copy(ROOT / "README.md", package)
        unwanted = shutil.ignore_patterns("__pycache__")
        configs = package / "configs"
        shutil.copytree(ROOT / "configs", configs, ignore=unwanted, dirs_exist_ok=True)
        (package / "tools").mkdir(exist_ok=True)
        for tool in TOOLS:
            shutil.copy(ROOT / "tools" / tool, package / "tools")


setup(
    name="hooktrain",
    version=VERSION.group(1),
    description="A hook-based minimal trainer for PyTorch that never loses or changes a run",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
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
        "progress": PROGRESS,
        "detection": DETECTION,
        "safetensors": SAFETENSORS,
        "store": STORE,
        "vision": ["torchvision>=0.24"],
        "trackers": ["wandb>=0.19", "mlflow>=2.15"],
        "docs": ["pdoc>=15", *TENSORBOARD],
        "dev": [
            *TENSORBOARD,
            *PLOT,
            *PROGRESS,
            *DETECTION,
            "datasets>=5.0",
            "hypothesis>=6.90",
            "mmengine==0.10.7",
            "mypy>=1.11",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.6",
            "torchdata>=0.10",
            "torchmetrics>=1.0",
            "transformers>=4.40",
            "types-tabulate",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
