"""Which file an address stands for; downloads from a real server on this machine or by fsspec."""

import hashlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


def model() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


GOOD = weights(3)
DIGEST = hashlib.sha256(GOOD).hexdigest()
# Eight digits or more, until there is a letter among them.
SHORT = next(DIGEST[:n] for n in range(8, 65) if not DIGEST[:n].isdecimal())


def files(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )


@pytest.fixture
def schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(sources, "_loaders", dict(sources._loaders))


def test_the_longest_prefix_of_an_address_counts(schemes: None, tmp_path: Path) -> None:
    register_scheme("s3://", lambda address: tmp_path / "short")

    @register_scheme(["s3://zoo/", "zoo://"])
    def from_zoo(address: str) -> str:
        return f"zoo:{address}"

    register_scheme("s3://z", lambda address: "middle")
    assert from_zoo("x") == "zoo:x"
    assert local_path("s3://a") == str(tmp_path / "short")
    assert local_path("s3://zoo/a") == "zoo:s3://zoo/a"
    assert local_path("zoo://a") == "zoo:zoo://a"
    assert local_path("s3://zo") == "middle"
    assert local_path("a/s3://zoo") == "a/s3://zoo"
    assert local_path(tmp_path) == str(tmp_path)


def test_a_prefix_has_one_loader_unless_it_is_replaced(schemes: None) -> None:
    taken = r"\['torchvision://'\] have a loader already.*force=True"
    for prefixes in ("torchvision://", ["new://", "torchvision://"]):
        with pytest.raises(KeyError, match=taken):
            register_scheme(prefixes, lambda address: "mine")
    with pytest.raises(ValueError, match="Protocol not known: new"):
        local_path("new://x")
    for prefix in ("torchvision://", "https://", "memory://"):
        register_scheme(prefix, lambda address: "mine", force=True)
        assert local_path(f"{prefix}a/b") == "mine"


def fetch_with_four_ranks_on_two_machines(folder: Path) -> Any:
    comm.create_local_process_group(2)
    machine = comm.get_rank() // 2

    @register_scheme("test://")
    def fetch(address: str) -> Path:
        if "broken" in address and machine == 1:
            raise ConnectionError("the cable is cut")
        path = folder / f"machine{machine}.pth"
        path.write_bytes(weights(machine))
        (folder / f"fetched-by-{comm.get_rank()}").touch()
        return path

    target = model()
    Checkpointer(target).load("test://good")
    with pytest.raises(ConnectionError) as caught:
        local_path("test://broken")
    return local_path("test://good"), target.weight.item(), str(caught.value)


def test_one_process_of_each_machine_fetches(tmp_path: Path) -> None:
    results = run_ranks(fetch_with_four_ranks_on_two_machines, 4, tmp_path)
    expected = [
        (str(tmp_path / f"machine{k}.pth"), k, "the cable is cut") for k in (0, 0, 1, 1)
    ]
    assert results == expected
    assert files(tmp_path) == [
        "fetched-by-0",
        "fetched-by-2",
        "machine0.pth",
        "machine1.pth",
    ]


class Handler(BaseHTTPRequestHandler):
    """``/cut/...`` ends too early, ``/missing/...`` is not there, ``/error/...`` is an error."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        kind = self.path.split("/")[1]
        if kind in ("missing", "error"):
            self.send_error(404 if kind == "missing" else 503)
            return
        body = {"other": weights(5), "text": b"{}"}.get(kind, GOOD)
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
        thread = threading.Thread(
            target=partial(http.serve_forever, poll_interval=0.01)
        )
        thread.start()
        host, port = http.server_address[:2]
        yield SimpleNamespace(url=f"http://{host!s}:{port}", requests=http.requests)  # type: ignore[attr-defined]
        http.shutdown()
        thread.join()


def test_a_checkpoint_is_downloaded_once(
    server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{server.url}/a/model.pth?version=1"
    for load in (
        partial(load_checkpoint, strict=True),
        lambda m, url: Checkpointer(m).load(url),
    ):
        target = model()
        with caplog.at_level(logging.INFO, "hooktrain.checkpoint.sources"):
            load(target, url)
        assert target.weight.item() == 3
    assert server.requests == ["/a/model.pth?version=1"]
    first, second = (
        r.getMessage() for r in caplog.records if r.name.endswith("sources")
    )
    assert first.startswith(f"Downloading {url} to {tmp_path}")
    assert second.endswith(f"downloaded earlier from {url}")


def test_a_file_of_another_kind_is_downloaded_once_too(server: Any) -> None:
    for _ in range(2):
        assert Path(local_path(f"{server.url}/text/names.json")).read_bytes() == b"{}"
    assert server.requests == ["/text/names.json"]


def test_what_a_killed_download_has_left_is_swept(server: Any) -> None:
    path = Path(local_path(f"{server.url}/a/model.pth"))
    path.unlink()
    left = path.with_name(".model.pth.tmp-1-0123abcd")
    left.write_bytes(GOOD[:100])
    local_path(f"{server.url}/a/model.pth")
    assert files(path.parent) == ["model.pth"]


def test_a_broken_download_is_fetched_again(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{server.url}/a/model.pth"
    Path(local_path(url)).write_text("<html>Please log in to the network</html>")
    target = model()
    load_checkpoint(target, url)
    assert target.weight.item() == 3
    assert len(server.requests) == 2
    assert "Downloading again: " in caplog.text


def test_a_run_starts_from_an_address_unless_it_resumes(
    server: Any, tmp_path: Path
) -> None:
    target = model()
    checkpointer = Checkpointer(target, tmp_path / "run")
    checkpointer.resume_or_load(f"{server.url}/a/model.pth")
    assert target.weight.item() == 3
    checkpointer.save("model_0000004", iteration=4)
    assert checkpointer.resume_or_load("http://nobody.invalid/a.pth") == {
        "iteration": 4
    }


def test_files_of_one_name_from_two_addresses_are_not_confused(server: Any) -> None:
    for place, value in (("a", 3), ("other", 5), ("a", 3)):
        target = model()
        load_checkpoint(target, f"{server.url}/{place}/model.pth")
        assert target.weight.item() == value


def test_a_file_with_a_digest_lies_where_torch_hub_has_it(
    server: Any, tmp_path: Path
) -> None:
    name = f"model-{SHORT}.pth"
    path = local_path(f"{server.url}/a/{name}")
    assert path == str(tmp_path / "home" / "hub" / "checkpoints" / name)
    assert Path(path).read_bytes() == GOOD


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("missing/a.pth", FileNotFoundError, "/missing/a.pth: .*HTTP Error 404"),
        ("error/a.pth", OSError, "/error/a.pth: .*HTTP Error 503"),
        ("cut/a.pth", OSError, f"/cut/a.pth: .*received .* of {len(GOOD):,} bytes"),
        ("chunked/a.pth", OSError, "/chunked/a.pth: IncompleteRead"),
        (
            f"a/m-{'0f' * 4}.pth",
            CorruptCheckpointError,
            f"begin with {'0f' * 4}, and is {DIGEST}",
        ),
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


def test_a_server_that_does_not_answer_is_an_error_with_the_address(
    server: Any,
) -> None:
    with pytest.raises(
        OSError, match=r"cannot download http://127.0.0.1:9/a\.pth: URLError"
    ):
        local_path("http://127.0.0.1:9/a.pth")


def test_a_file_of_unknown_length_is_taken_and_its_progress_shown(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(sources, "show_progress", lambda *args: drawn.append(args))
    path = local_path(f"{server.url}/unknown-length/model.pth")
    assert Path(path).read_bytes() == GOOD
    assert drawn == [("Downloading MiB", len(GOOD) >> 20, 0)]


class NoCredentialsError(Exception):
    """As the packages of stores have them: no OSError."""


class Cut(io.BytesIO):
    """Promises more than it holds."""

    size = len(GOOD)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemoryFileSystem:
    """Its files are at ``memory://bucket/run``; downloads go to the temporary folder."""

    def open_file(self: MemoryFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
        if "denied" in path:
            raise NoCredentialsError("Unable to locate credentials")
        return (
            Cut(GOOD[:-100]) if "cut" in path else opened(self, path, *args, **kwargs)
        )

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    system = MemoryFileSystem()
    for name in ("model", "model-0f0f0f0f", "cut", "denied"):
        system.pipe_file(f"/bucket/run/{name}.pth", GOOD)
    opened = MemoryFileSystem._open
    monkeypatch.setattr(MemoryFileSystem, "_open", open_file)
    return system


def test_a_file_of_a_store_is_downloaded_once_until_it_is_broken_or_replaced(
    bucket: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*expected: str) -> float:
        caplog.clear()
        target = model()
        with caplog.at_level(logging.INFO, "hooktrain.checkpoint.sources"):
            Checkpointer(target).load(address)
        told = [r.getMessage() for r in caplog.records if r.name.endswith("sources")]
        assert [line.split()[0] for line in told] == list(expected)
        return target.weight.item()

    address = "memory://bucket/run/model.pth"
    assert load("Downloading") == 3
    assert load("Using") == 3
    path = Path(local_path(address))
    path.write_bytes(path.read_bytes()[:-1])
    assert load("Downloading", "Downloading") == 3
    bucket.pipe_file("/bucket/run/model.pth", weights(5))
    assert load("Downloading") == 5
    assert load("Using") == 5


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        (
            "run/none.pth",
            FileNotFoundError,
            "memory://bucket/run/none.pth: FileNotFoundError",
        ),
        ("run/cut.pth", OSError, f"/cut.pth: .*received .* of {len(GOOD):,} bytes"),
        ("run/denied.pth", OSError, "denied.pth: NoCredentialsError: Unable to locate"),
        ("run", OSError, "memory://bucket/run: .*is a folder; copy it to a disk"),
        (
            "run/model-0f0f0f0f.pth",
            CorruptCheckpointError,
            f"with 0f0f0f0f, and is {DIGEST}",
        ),
    ],
)
def test_what_a_store_does_not_give_is_an_error_with_the_address_and_leaves_nothing(
    address: str,
    kind: type[Exception],
    message: str,
    bucket: MemoryFileSystem,
    tmp_path: Path,
) -> None:
    with pytest.raises(kind, match=message) as info:
        local_path(f"memory://bucket/{address}")
    assert type(info.value) is kind
    assert files(tmp_path) == []


def test_a_scheme_whose_package_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match="Install s3fs"):
        Checkpointer(model()).load("s3://bucket/model.pth")


def load_by_address_with_two_ranks(folder: Path) -> Any:
    comm.create_local_process_group(2)
    torch.hub.set_dir(folder / "hub")
    fetch = sources._write_download

    def write_download(url: str, path: str) -> None:
        (folder / f"fetched-by-{comm.get_rank()}").touch()
        fetch(url, path)

    sources._write_download = write_download
    target = model()
    Checkpointer(target).load(f"file://{folder}/model.pth")
    with pytest.raises(
        FileNotFoundError, match=f"cannot download file://{folder}/none.pth"
    ):
        Checkpointer(target).load(f"file://{folder}/none.pth")
    with pytest.raises(ValueError, match="Protocol not known: new"):
        Checkpointer(target).load("new://none.pth")
    return target.weight.item()


def test_of_several_ranks_one_downloads_and_all_raise_its_error(tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(GOOD)
    assert run_ranks(load_by_address_with_two_ranks, 2, tmp_path) == [3, 3]
    assert [p.name for p in tmp_path.glob("fetched-*")] == ["fetched-by-0"]


class FakeWeights(dict[str, Any]):
    """Looks like an enumeration of torchvision."""

    def __init__(self, url: str) -> None:
        v1 = SimpleNamespace(name="IMAGENET1K_V1", url=f"{url}/a/v1.pth")
        v2 = SimpleNamespace(name="IMAGENET1K_V2", url=f"{url}/other/v2.pth")
        super().__init__(IMAGENET1K_V1=v1, IMAGENET1K_V2=v2, DEFAULT=v2)


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
