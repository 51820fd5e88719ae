"""What SECURITY.md says that the other tests do not hold."""

import ast
import re
import sys
from pathlib import Path

import pytest

from processes import run_program
from test_architecture import modules

ROOT = Path(__file__).parent.parent
SECURITY = (ROOT / "SECURITY.md").read_text("utf-8")
REQUIRED = {"torch", "numpy", "tabulate", "termcolor", "filelock"}

WITHOUT_NETWORK = """
import sys

def refuse(event, arguments):
    opens = event in ("socket.connect", "socket.bind", "socket.getaddrinfo")
    if opens or event.startswith(("urllib", "http", "ftplib", "smtplib")):
        print("NETWORK", event, arguments)

sys.addaudithook(refuse)
"""


def test_importing_hooktrain_imports_no_package_but_the_required_ones() -> None:
    imported = {
        name.split(".")[0]
        for module, tree in modules().items()
        if not module.startswith("hooktrain.demos")
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported - sys.stdlib_module_names == REQUIRED | {"hooktrain"}


def test_a_run_and_its_resume_use_no_network(tmp_path: Path) -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    )
    script = tmp_path / "train_net.py"
    script.write_text(WITHOUT_NETWORK + program)
    first, again = (run_program(script, folder=tmp_path) for _ in range(2))
    assert [first.returncode, again.returncode] == [0, 0]
    assert "Nothing is left to train" in again.stdout
    assert "NETWORK" not in first.stdout + again.stdout


def test_the_hook_that_watches_the_network_sees_a_connection(tmp_path: Path) -> None:
    script = tmp_path / "connect.py"
    script.write_text(
        WITHOUT_NETWORK
        + "import socket\nsocket.create_server(('127.0.0.1', 0)).close()"
    )
    assert "NETWORK socket.bind" in run_program(script, folder=tmp_path).stdout


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`tests/([\w/.]+::\w+)`", SECURITY)))
)
def test_the_tests_that_security_md_names_exist(name: str) -> None:
    file, _, function = name.partition("::")
    assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text("utf-8")


def test_security_md_names_a_test_for_each_promise() -> None:
    rows = re.findall(r"^\| (?!Promise|---)(.+) \|$", SECURITY, re.M)
    assert len(rows) == 7
    assert [row for row in rows if "`tests/" not in row] == []
