"""docs/reliability.md names tests that are there, and one for each of its promises."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
PROMISES = "| What happens | What the run does | Its test, in `tests/` |"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 200
    for file, test in named:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), (file, test)


def test_every_promise_of_the_page_stands_beside_its_test() -> None:
    tables = [part.split("\n\n")[0] for part in PAGE.split(PROMISES)[1:]]
    rows = [row for table in tables for row in table.splitlines()[2:]]
    assert len(rows) > 170
    assert [
        row for row in rows if not re.search(r"`[^`]+\.py::test_\w+` \|$", row)
    ] == []
