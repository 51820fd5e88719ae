"""A short campaign of random faults, and that it would notice a run that is lost or bent."""

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from processes import CONTEXT

TOOLS = Path(__file__).parent.parent.parent / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("crash_campaign")
    monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    return module


def test_runs_that_random_faults_strike_end_as_undisturbed_ones(
    tool: Any, tmp_path: Path
) -> None:
    campaign = tool.Campaign(5, 4, tmp_path, rounds=(1, 1))
    one_of_each = [tool.TURNS.index(script) for script in tool.SCRIPTS]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(campaign.attempt, one_of_each))
    assert campaign.failures == []
    assert campaign.struck.total() >= 2


def test_a_run_that_is_bent_is_reported(tool: Any, tmp_path: Path) -> None:
    variant = tool.Variant("core", 1, 0, False, False)
    assert tool.run(tmp_path / "out", variant) == (0, False)
    expected = tool.outcome(tmp_path / "out")
    assert tool.differences(tool.outcome(tmp_path / "out"), expected) == []
    lines = (tmp_path / "out" / "metrics.json").read_text().splitlines()
    row = json.loads(lines[2]) | {"total_loss": 0.5}
    lines[2] = json.dumps(row)
    (tmp_path / "out" / "metrics.json").write_text("\n".join(lines))
    found = tool.differences(tool.outcome(tmp_path / "out"), expected)
    assert found == [".rows[2].total_loss"]
