"""Brings the fixtures to every process that runs tests."""

from contextlib import suppress

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # The process that hands the tests out to others has no need of torch, which takes seconds.
    hands_out = config.getoption("numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if not hands_out:
        config.pluginmanager.import_plugin("every_test")
        return
    # MMEngine imports yapf, which in a new environment writes files of its grammar. One process
    # could read what another has written in part.
    with suppress(ImportError):
        import yapf  # noqa: F401


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have recorded by ``record_property``."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
