"""docs/reliability.md names tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_the_page_names_is_there() -> None:
    page = (TESTS.parent / "docs" / "reliability.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 80
    missing = [
        (file, name)
        for file, name in named
        if not re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
    ]
    assert missing == []
