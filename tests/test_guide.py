"""The blocks of docs/guide.md run one after the other, as they stand there."""

import re
from pathlib import Path

from processes import run_program

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"


def test_the_blocks_of_the_guide_run_in_one_session(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 10
    script = tmp_path / "guide.py"
    script.write_text("import warnings\nwarnings.simplefilter('error')\n" + "\n\n".join(blocks))
    done = run_program(script, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "CountBig" in done.stdout
