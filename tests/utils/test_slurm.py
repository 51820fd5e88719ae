from pathlib import Path

import pytest

from hooktrain.utils.slurm import expand_node_list, expand_task_counts, first_node


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("login1", ["login1"]),
        ("a1,b2", ["a1", "b2"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("r[1-2]n[1,3].hpc", ["r1n1.hpc", "r1n3.hpc", "r2n1.hpc", "r2n3.hpc"]),
    ],
)
def test_a_list_of_nodes_is_written_out(nodes: str, names: list[str]) -> None:
    assert expand_node_list(nodes) == names


@pytest.mark.parametrize("nodes", ["", "n[1-", "n[1-x]", "a,,b", "n]1"])
def test_a_list_of_nodes_that_cannot_be_read_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="list of nodes"):
        expand_node_list(nodes)


def test_numbers_of_tasks_are_written_out() -> None:
    assert expand_task_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="'2x3'"):
        expand_task_counts("2x3")


@pytest.mark.parametrize(("status", "node"), [(0, "from-scontrol"), (1, "node01")])
def test_scontrol_is_asked_first_and_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, node: str
) -> None:
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\n[ "$3" = "node[01-02]" ] && echo from-scontrol\nexit {status}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert first_node("node[01-02]") == node
