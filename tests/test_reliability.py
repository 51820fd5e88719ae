"""docs/reliability.md names files of tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_file_of_tests_that_the_page_names_exists() -> None:
    page = (TESTS.parent / "docs" / "reliability.md").read_text()
    named = set(re.findall(r"`([\w/]+/test_\w+\.py)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (TESTS / name).is_file()] == []
