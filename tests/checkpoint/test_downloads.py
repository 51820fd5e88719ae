"""Checkpoints from addresses, with a real server on this machine."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from source_toys import DIGEST, GOOD, SHORT, files, model, weights

from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    load_checkpoint,
    local_path,
)
from hooktrain.utils import comm


class Handler(BaseHTTPRequestHandler):
    """``/cut/...`` ends too early, ``/missing/...`` is not there, ``/error/...`` is an error."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        kind = self.path.split("/")[1]
        if kind in ("missing", "error"):
            self.send_error(404 if kind == "missing" else 503)
            return
        body = weights(5) if kind == "other" else GOOD
        self.send_response(200)
        if kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"400\r\n" + body[:100])
            return
        if kind != "unknown-length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:-100] if kind == "cut" else body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Counts requests; downloads go to the temporary folder."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.requests = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=partial(http.serve_forever, poll_interval=0.01))
        thread.start()
        host, port = http.server_address[:2]
        yield SimpleNamespace(url=f"http://{host!s}:{port}", requests=http.requests)  # type: ignore[attr-defined]
        http.shutdown()
        thread.join()


def test_a_checkpoint_is_downloaded_once(
    server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{server.url}/a/model.pth?version=1"
    for load in (partial(load_checkpoint, strict=True), lambda m, url: Checkpointer(m).load(url)):
        target = model()
        with caplog.at_level(logging.INFO, "hooktrain.checkpoint.sources"):
            load(target, url)
        assert target.weight.item() == 3
    assert server.requests == ["/a/model.pth?version=1"]
    first, second = (r.getMessage() for r in caplog.records if r.name.endswith("sources"))
    assert first.startswith(f"Downloading {url} to {tmp_path}")
    assert second.endswith(f"downloaded earlier from {url}")


def test_a_run_starts_from_an_address_unless_it_resumes(server: Any, tmp_path: Path) -> None:
    target = model()
    checkpointer = Checkpointer(target, tmp_path / "run")
    checkpointer.resume_or_load(f"{server.url}/a/model.pth")
    assert target.weight.item() == 3
    checkpointer.save("model_0000004", iteration=4)
    assert checkpointer.resume_or_load("http://nobody.invalid/a.pth") == {"iteration": 4}


def test_files_of_one_name_from_two_addresses_are_not_confused(server: Any) -> None:
    for place, value in (("a", 3), ("other", 5), ("a", 3)):
        target = model()
        load_checkpoint(target, f"{server.url}/{place}/model.pth")
        assert target.weight.item() == value


def test_a_file_with_a_digest_lies_where_torch_hub_has_it(server: Any, tmp_path: Path) -> None:
    name = f"model-{SHORT}.pth"
    path = local_path(f"{server.url}/a/{name}")
    assert path == str(tmp_path / "home" / "hub" / "checkpoints" / name)
    assert Path(path).read_bytes() == GOOD


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("missing/a.pth", FileNotFoundError, "/missing/a.pth: HTTP Error 404"),
        ("error/a.pth", OSError, "/error/a.pth: HTTP Error 503"),
        ("cut/a.pth", OSError, f"/cut/a.pth: .*received .* of {len(GOOD):,} bytes"),
        ("chunked/a.pth", OSError, "/chunked/a.pth: IncompleteRead"),
        (f"a/m-{'0f' * 4}.pth", CorruptCheckpointError, f"begin with {'0f' * 4}, and is {DIGEST}"),
        ("a/", ValueError, "must end with the name of a file: 'http.*/a/'"),
        ("a/..", ValueError, "must end with the name of a file: 'http.*'"),
    ],
)
def test_a_download_that_fails_leaves_nothing(
    address: str, kind: type[Exception], message: str, server: Any, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message) as info:
        local_path(f"{server.url}/{address}")
    assert type(info.value) is kind
    assert files(tmp_path) == []


def test_a_server_that_does_not_answer_is_an_error_with_the_address(server: Any) -> None:
    with pytest.raises(OSError, match=r"cannot download http://127.0.0.1:9/a\.pth: URLError"):
        local_path("http://127.0.0.1:9/a.pth")


def test_a_file_of_unknown_length_is_taken(server: Any) -> None:
    path = local_path(f"{server.url}/unknown-length/model.pth")
    assert Path(path).read_bytes() == GOOD


def test_a_download_that_was_damaged_later_is_refused(server: Any) -> None:
    url = f"{server.url}/a/model-{SHORT}.pth"
    Path(local_path(url)).write_bytes(weights(5))
    with pytest.raises(CorruptCheckpointError, match=f"begin with {SHORT}, and is .*Remove"):
        load_checkpoint(model(), url)


class FakeWeights(dict[str, Any]):
    """Looks like an enumeration of torchvision."""

    def __init__(self, url: str) -> None:
        v1 = SimpleNamespace(name="IMAGENET1K_V1", url=f"{url}/a/v1.pth")
        v2 = SimpleNamespace(name="IMAGENET1K_V2", url=f"{url}/other/v2.pth")
        super().__init__(IMAGENET1K_V1=v1, IMAGENET1K_V2=v2, DEFAULT=v2)

    def __iter__(self) -> Iterator[Any]:
        return iter([self["IMAGENET1K_V1"], self["IMAGENET1K_V2"]])


def test_weights_of_torchvision_are_downloaded(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ModuleType("torchvision.models")
    models.get_model_weights = lambda name: FakeWeights(server.url)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    for address, value in (("resnet18", 5), ("resnet18.imagenet1k_v1", 3)):
        target = model()
        load_checkpoint(target, f"torchvision://{address}")
        assert target.weight.item() == value
    with pytest.raises(
        ValueError, match=r"no 'v9' of 'resnet18', only \['resnet18\.imagenet1k_v1'"
    ):
        local_path("torchvision://resnet18.v9")


def load_an_address_with_two_ranks(url: str, home: str) -> float:
    os.environ.update(TORCH_HOME=home, no_proxy="127.0.0.1")
    comm.create_local_process_group(2)
    target = model()
    Checkpointer(target).load(url)
    return target.weight.item()


def test_a_checkpoint_is_downloaded_once_for_all_ranks(server: Any, tmp_path: Path) -> None:
    url = f"{server.url}/a/model.pth"
    assert run_ranks(load_an_address_with_two_ranks, 2, url, str(tmp_path / "home")) == [3.0, 3.0]
    assert server.requests == ["/a/model.pth"]
