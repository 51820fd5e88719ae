"""iopath's path manager: files made of others, and handlers as projects write them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hooktrain.compat.detectron2 import PathHandler, PathManager


class _Recording(PathHandler):
    """A handler as projects write them: it counts what is asked of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []

    def _get_supported_prefixes(self) -> list[str]:
        return ["bucket://"]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        self._check_kwargs(kwargs)
        self.calls.append(f"get {path} {force}")
        return str(self.root / path.removeprefix("bucket://"))

    def _opent(self, path: str, mode: str = "r", **kwargs: Any) -> Any:
        self._check_kwargs(kwargs)
        return [path, mode]

    def _copy(
        self, source: str, target: str, overwrite: bool = False, **kwargs: Any
    ) -> bool:
        self.calls.append(f"copy {source} {target} {overwrite}")
        return True

    def _copy_from_local(
        self, source: str, target: str, overwrite: bool = False, **kwargs: Any
    ) -> bool:
        self.calls.append(f"upload {Path(source).name} {target} {overwrite}")
        return True

    def _mv(self, source: str, target: str) -> bool:
        self.calls.append(f"mv {source} {target}")
        return True


@pytest.fixture
def bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, _Recording]]:
    """A path manager and a handler of it; the manager has none before and after the test."""
    monkeypatch.setattr("hooktrain.checkpoint.sources._loaders", {})
    monkeypatch.setattr(PathManager, "_handlers", {})
    handler = _Recording(tmp_path)
    PathManager.register_handler(handler)
    yield PathManager, handler
    PathManager.set_strict_kwargs_checking(True)


def test_the_path_manager_makes_other_files_and_says_whether_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c, link, there = (
        tmp_path / name for name in ("a", "b", "c", "link", "there")
    )
    a.write_text("new")
    there.write_text("old")
    assert PathManager.copy(a, b)
    assert PathManager.copy_from_local(a, c)
    assert PathManager.symlink(a, link)
    assert link.resolve() == a
    assert PathManager.mv(b, tmp_path / "moved")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a",
        "c",
        "link",
        "moved",
        "there",
    ]
    for make in (PathManager.copy, PathManager.mv, PathManager.symlink):
        caplog.clear()
        assert make(a, there) is False
        assert f"'{there}' already exists" in caplog.text
    assert there.read_text() == "old"
    assert PathManager.copy(a, there, overwrite=True)
    assert there.read_text() == "new"
    assert PathManager.copy(tmp_path / "missing", b) is False
    assert "missing" in caplog.text
    for change in (PathManager.copy, PathManager.mv, PathManager.symlink):
        with pytest.raises(ValueError, match="cannot write to 'https://a/b'"):
            change(a, "https://a/b")


def test_a_handler_copies_moves_and_reads_what_is_its_own(
    bucket: tuple[Any, _Recording], tmp_path: Path
) -> None:
    manager, handler = bucket
    (tmp_path / "x").write_text("x")
    assert manager.opent("bucket://t") == ["bucket://t", "r"]
    assert manager.copy("bucket://x", "bucket://y", overwrite=True)
    assert manager.copy(tmp_path / "x", "bucket://z")
    assert manager.copy_from_local(tmp_path / "x", "bucket://z", overwrite=True)
    assert manager.mv("bucket://x", "bucket://w")
    assert manager.get_local_path("bucket://x", force=True) == f"{tmp_path}/x"
    assert handler.calls == [
        "copy bucket://x bucket://y True",
        "upload x bucket://z False",
        "upload x bucket://z True",
        "mv bucket://x bucket://w",
        "get bucket://x True",
    ]
    with pytest.raises(NotImplementedError, match=f"{tmp_path}/x.*table"):
        manager.opent(tmp_path / "x")


def test_unknown_arguments_are_refused_unless_checking_is_switched_off(
    bucket: tuple[Any, _Recording], tmp_path: Path
) -> None:
    manager, _ = bucket
    (tmp_path / "x").write_text("x")
    with pytest.raises(ValueError, match=r"_Recording.*\{'ttl': 3\}"):
        manager.opent("bucket://x", ttl=3)
    with pytest.raises(TypeError, match="ttl"):
        manager.open(tmp_path / "x", ttl=3)
    manager.set_strict_kwargs_checking(False)
    assert manager.opent("bucket://x", ttl=3) == ["bucket://x", "r"]
    with manager.open(tmp_path / "x", mode="rb", ttl=3) as file:
        assert file.read() == b"x"
    assert manager.exists(tmp_path / "x", ttl=3)
    manager.set_logging(False)


def test_a_prefix_is_given_to_another_handler_only_if_that_is_allowed(
    bucket: tuple[Any, _Recording], tmp_path: Path
) -> None:
    manager, handler = bucket
    with pytest.raises(KeyError, match="bucket://"):
        manager.register_handler(_Recording(tmp_path), allow_override=False)
    manager.get_local_path("bucket://x", force=True)
    assert len(handler.calls) == 1
    manager.register_handler(_Recording(tmp_path))
    manager.get_local_path("bucket://x", force=True)
    assert len(handler.calls) == 1
