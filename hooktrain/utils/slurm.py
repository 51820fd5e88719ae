"""SLURM's short forms: lists of nodes, and of the number of tasks on each."""

import re
import shutil
import subprocess

__all__ = ["expand_node_list", "expand_task_counts", "first_node"]


def first_node(nodes: str) -> str:
    """The first name in a list of nodes: by SLURM's own ``scontrol``, if it is installed.

    Raises:
        ValueError: see :func:`expand_node_list`.
    """
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()[0]
    return expand_node_list(nodes)[0]


def expand_node_list(nodes: str) -> list[str]:
    """The names in a list of nodes.

    Args:
        nodes: such as ``"gpu[01-03,07],login1"``.

    Raises:
        ValueError: if it cannot be read.

    Examples:
        >>> expand_node_list("gpu[01-03,07],login1")
        ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'login1']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if not parts or ",".join(parts) != nodes:
        raise ValueError(f"cannot read the list of nodes {nodes!r}")
    return [name for part in parts for name in _expand(part, nodes)]


def expand_task_counts(counts: str) -> list[int]:
    """The number of tasks on each node.

    Args:
        counts: such as ``"2(x3),1"``.

    Raises:
        ValueError: if it cannot be read.

    Examples:
        >>> expand_task_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    sizes: list[int] = []
    for count in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", count)
        if match is None:
            raise ValueError(f"cannot read the numbers of tasks {counts!r}")
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def _expand(part: str, nodes: str) -> list[str]:
    """The names in one part of a list; it may have several brackets: ``r[1-2]n[1-4]``."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    names = []
    for numbers in match[2].split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers)
        if span is None:
            raise ValueError(f"cannot read {numbers!r} in the list of nodes {nodes!r}")
        for number in range(int(span[1]), int(span[2] or span[1]) + 1):
            names.append(f"{match[1]}{number:0{len(span[1])}d}")
    return [name + rest for name in names for rest in _expand(match[3], nodes)]
