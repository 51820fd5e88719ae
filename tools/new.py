"""Create a folder with the README's training script, to start from.

python tools/new.py FOLDER
"""

import argparse
import os
import re
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    """Write the script, unless it already exists."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("HOOKTRAIN_COMMAND"), description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="a folder, which need not exist")
    args = parser.parse_args(arguments)
    readme = Path(__file__).parent.parent / "README.md"
    found = re.search(r"```python\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
    assert found is not None
    path = args.folder / "train.py"
    if path.exists():
        parser.error(f"{path} already exists")
    args.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(found[1].replace("output/readme", "output"), encoding="utf-8")
    sys.stdout.write(f"{path} trains a network on handwritten digits: python {path}\n")


if __name__ == "__main__":
    main()
