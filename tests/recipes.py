"""The recipes by which code for other frameworks changes its imports."""

import subprocess
from pathlib import Path

TOOLS = Path(__file__).parent.parent / "tools"


def after_recipe(framework: str, text: str) -> str:
    """Some Python code after `tools/from_<framework>.sed`."""
    command = ["sed", "-E", "-f", str(TOOLS / f"from_{framework}.sed")]
    done = subprocess.run(
        command, input=text, stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout
