"""Which file an address stands for; downloads from a server on this machine or by fsspec."""

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    load_checkpoint,
    local_path,
    register_scheme,
    sources,
)
from hooktrain.utils import comm


def weights(value: float) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.full((1, 1), value)}, file)
    return file.getvalue()


def loaded(address: str) -> float:
    model = nn.Linear(1, 1, bias=False)
    load_checkpoint(model, address, strict=True)
    return model.weight.item()


GOOD = weights(3)
DIGEST = hashlib.sha256(GOOD).hexdigest()


def test_the_longest_prefix_of_an_address_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "_loaders", dict(sources._loaders))
    register_scheme("s3://", lambda address: tmp_path / "short")
    register_scheme("s3://zoo/", lambda address: f"zoo:{address}")
    assert local_path("s3://a") == str(tmp_path / "short")
    assert local_path("s3://zoo/a") == "zoo:s3://zoo/a"
    assert local_path("a/s3://zoo") == "a/s3://zoo"


def fetch_with_four_ranks_on_two_machines(folder: Path) -> Any:
    machine, place = divmod(comm.get_rank(), 2)
    os.environ["LOCAL_RANK"] = str(place)

    def fetch(address: str) -> Path:
        if "broken" in address and machine == 1:
            raise ConnectionError("the cable is cut")
        path = folder / f"machine{machine}.pth"
        path.write_bytes(weights(5))
        (folder / f"fetched-by-{comm.get_rank()}").touch()
        return path

    register_scheme("test://", fetch)
    model = nn.Linear(1, 1, bias=False)
    Checkpointer(model).load("test://good")
    with pytest.raises(ConnectionError) as caught:
        local_path("test://broken")
    name = Path(local_path("test://good")).name
    return model.weight.item(), name, str(caught.value)


def test_one_process_of_each_machine_fetches(tmp_path: Path) -> None:
    results = run_ranks(fetch_with_four_ranks_on_two_machines, 4, tmp_path)
    assert results == [
        (5.0, f"machine{machine}.pth", "the cable is cut") for machine in (0, 0, 1, 1)
    ]
    fetched = sorted(path.name for path in tmp_path.glob("fetched-*"))
    assert fetched == ["fetched-by-0", "fetched-by-2"]


class Handler(BaseHTTPRequestHandler):
    """The first folder of an address says what is wrong; the server may be mended."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        kind = self.path.split("/")[1]
        if self.server.is_mended:  # type: ignore[attr-defined]
            kind = "good"
        if kind == "missing":
            self.send_error(404)
            return
        body = GOOD
        if kind in ("other", "altered"):
            body = weights(5)
        if kind == "page":
            body = b"<html>Please log in</html>"
        size = len(body)
        if kind == "cut":
            body = body[:-100]
        self.send_response(200)
        if kind != "chunked":
            self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Counts requests; downloads go to the temporary folder."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.requests = []  # type: ignore[attr-defined]
        http.is_mended = False  # type: ignore[attr-defined]
        serve = partial(http.serve_forever, poll_interval=0.01)
        thread = threading.Thread(target=serve)
        thread.start()
        host, port = http.server_address[:2]
        yield SimpleNamespace(
            url=f"http://{host!s}:{port}",
            requests=http.requests,  # type: ignore[attr-defined]
            mend=lambda: setattr(http, "is_mended", True),
        )
        http.shutdown()
        thread.join()


def test_a_checkpoint_is_downloaded_once(server: Any) -> None:
    for _ in range(2):
        assert loaded(f"{server.url}/a/model.pth?version=1") == 3
    assert server.requests == ["/a/model.pth?version=1"]


def test_files_of_one_name_from_two_addresses_are_not_confused(server: Any) -> None:
    for place, value in (("a", 3), ("other", 5), ("a", 3)):
        assert loaded(f"{server.url}/{place}/model.pth") == value


def test_a_file_with_a_digest_lies_where_torch_hub_has_it(
    server: Any, tmp_path: Path
) -> None:
    name = f"model-{DIGEST[:32]}.pth"
    path = local_path(f"{server.url}/a/{name}")
    assert path == str(tmp_path / "home" / "hub" / "checkpoints" / name)


@pytest.mark.parametrize("path", ["a/model.pth", "chunked/model.pth", "?file=model"])
def test_a_file_of_unknown_size_or_name_is_downloaded(path: str, server: Any) -> None:
    assert loaded(f"{server.url}/{path}") == 3


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("missing/a.pth", OSError, "404"),
        ("cut/a.pth", CorruptCheckpointError, "zip"),
        (f"cut/m-{DIGEST[:32]}.txt", RuntimeError, DIGEST[:32]),
        ("page/a.pth", CorruptCheckpointError, "not a zip file"),
        (f"altered/m-{DIGEST[:32]}.pth", RuntimeError, DIGEST[:32]),
    ],
)
def test_a_bad_download_is_an_error_and_is_not_kept(
    address: str, kind: type[Exception], message: str, server: Any, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        local_path(f"{server.url}/{address}")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    server.mend()
    assert Path(local_path(f"{server.url}/{address}")).read_bytes() == GOOD


@pytest.mark.parametrize("how", ["page", "cut"])
def test_of_safetensors_too_a_bad_download_is_not_kept(
    how: str, server: Any, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(CorruptCheckpointError, match="safetensors"):
        local_path(f"{server.url}/{how}/model.safetensors")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemoryFileSystem:
    """Its files are at ``memory://bucket/run``; downloads go to the temporary folder."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    system = MemoryFileSystem()
    system.pipe_file("/bucket/run/model.pth", GOOD)
    return system


def test_a_file_of_a_store_is_downloaded_again_when_it_was_replaced(
    bucket: MemoryFileSystem,
) -> None:
    address = "memory://bucket/run/model.pth"
    assert loaded(address) == 3
    bucket.pipe_file("/bucket/run/model.pth", weights(5))
    assert loaded(address) == 5


def test_a_broken_file_of_a_store_is_not_kept(
    bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    bucket.pipe_file("/bucket/run/model.pth", GOOD[:-100])
    with pytest.raises(CorruptCheckpointError, match="zip"):
        local_path("memory://bucket/run/model.pth")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
