"""What a step costs, counted in instructions, which are the same on a busy machine."""

import shutil
from collections.abc import Callable

import pytest
import torch
from loading import load_tool


@pytest.mark.timeout(900)  # valgrind takes half a minute on an idle core
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="was counted with torch 2.13"
)
def test_a_step_takes_less_than_19_percent_more_instructions_than_a_bare_loop(
    record_property: Callable[[str, object], None],
) -> None:
    bare, ours, row = load_tool("benchmark").count_instructions().values()
    record_property(
        "a step's instructions, in those of a bare loop", f"{ours / bare:.3f}"
    )
    record_property("thousands of instructions of a row of metrics", f"{row:.0f}")
    assert 1 < ours / bare < 1.18
