"""Names that hooktrain lacks, from packages that may be installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hooktrain.compat.peers import import_from_peers
from recipes import installed

# A package of the peers' kind.
FILES = {
    "__init__.py": "",
    "first.py": "both = 'first'",
    "second.py": "both = 'second'\nonly = 2",
    "broken.py": "import what_it_needs",
}


@pytest.fixture(autouse=True)
def peer(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, "a_peer", FILES):
        yield


def test_the_first_installed_module_that_has_a_name_gives_it() -> None:
    modules = ["not_installed.module", "a_peer.first", "a_peer.second", "a_peer.gone"]
    assert import_from_peers("both", modules, "") == "first"
    assert import_from_peers("only", modules, "") == 2


def test_a_whole_module_is_found_in_its_package() -> None:
    assert import_from_peers("second", ["a_peer.first", "a_peer"], "").only == 2


def test_a_name_that_is_nowhere_says_in_one_line_who_has_it_and_what_failed() -> None:
    modules = ["not_installed", "a_peer.first", "a_peer.gone", "a_peer.broken"]
    with pytest.raises(ImportError) as raised:
        import_from_peers("name", modules, "'name' is a_friend's: pip install a_friend")
    assert str(raised.value) == (
        "'name' is a_friend's: pip install a_friend; a_peer.broken cannot be imported: "
        "No module named 'what_it_needs'"
    )


def test_what_python_itself_asks_for_is_no_name_of_a_peer() -> None:
    with pytest.raises(AttributeError):
        import_from_peers("__path__", ["a_peer"], "")
