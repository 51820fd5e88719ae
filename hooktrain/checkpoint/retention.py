"""Which old checkpoints to delete: a pure function of the names in the folder."""

import re
from collections.abc import Collection, Iterable

__all__ = ["files_to_delete", "iteration_in_name"]

_NUMBERED = re.compile(r"(?P<prefix>.+)_(?P<iteration>[0-9]{7,})(\.pth)?")


def iteration_in_name(name: str, prefix: str | None = None) -> int | None:
    """The number in ``{prefix}_{7 or more digits}`` with or without ``.pth``, or None.

    >>> iteration_in_name("model_0000099.pth")
    99
    >>> iteration_in_name("model_final.pth") is None
    True
    """
    match = _NUMBERED.fullmatch(name)
    if match is None or prefix not in (None, match["prefix"]):
        return None
    return int(match["iteration"])


def files_to_delete(
    names: Iterable[str],
    prefix: str,
    max_to_keep: int,
    *,
    newest: int | None = None,
    protected: Collection[str] = (),
) -> list[str]:
    """The numbered checkpoints beyond the newest ``max_to_keep``, oldest first.

    The order is that of the numbers, so that clocks do not matter. As it looks at nothing but the
    folder, it goes on where it was after a resume.

    Args:
        names: of all checkpoints in the folder, files and folders of shards; those not of the form
            ``{prefix}_0000099.pth`` or ``{prefix}_0000099`` stay.
        prefix: of those that are looked at.
        max_to_keep: how many to keep, at least 1.
        newest: the iteration just saved. Higher numbers come from another run in the same folder;
            they are neither counted nor deleted.
        protected: names that stay in any case, such as the best one and the resume point.

    Raises:
        ValueError: if ``max_to_keep`` is less than 1.
    """
    if max_to_keep < 1:
        raise ValueError(f"max_to_keep must be at least 1, got {max_to_keep!r}")
    numbers = {name: iteration_in_name(name, prefix) for name in names}
    ours = [
        (number, name)
        for name, number in numbers.items()
        if number is not None and (newest is None or number <= newest)
    ]
    return [name for _, name in sorted(ours)[:-max_to_keep] if name not in protected]
