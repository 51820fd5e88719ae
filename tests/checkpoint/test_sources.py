"""Which file an address stands for, and whether it is what its name tells."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from source_toys import DIGEST, GOOD, SHORT, files, model, weights

from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    load_checkpoint,
    local_path,
    register_scheme,
    sources,
)
from hooktrain.checkpoint.sources import digest_in_name
from hooktrain.utils import comm


@pytest.fixture
def schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(sources, "_loaders", dict(sources._loaders))


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("resnet18-f37072fd.pth", "f37072fd"),
        (f"m-{DIGEST}.pth", DIGEST),
        ("epoch_1-8c8e8d3a.pth.tar", "8c8e8d3a"),
        ("folder-f37072fd.d/model.pth", None),
        ("model_0000999.pth", None),
        ("model-0000999.pth", None),
        ("model-20240101.pth", None),
        ("model-abcdef1.pth", None),
        ("model-F37072FD.pth", None),
        ("model-f37072fd_0000999.pth", None),
        ("model-f37072fd-final.pth", None),
        (f"m-{DIGEST}0.pth", None),
    ],
)
def test_a_digest_is_recognised_in_a_name(name: str, digest: str | None) -> None:
    assert digest_in_name(name) == digest


def test_a_file_is_compared_with_the_digest_in_its_name(tmp_path: Path) -> None:
    for name in (f"m-{SHORT}.pth", f"m-{DIGEST}.pth", "m-20240101.pth"):
        (tmp_path / name).write_bytes(GOOD)
        load_checkpoint(model(), tmp_path / name)
    bad = tmp_path / "m-0123abcd.pth"
    bad.write_bytes(GOOD)
    for load in (partial(load_checkpoint, model()), Checkpointer(model()).load):
        with pytest.raises(
            CorruptCheckpointError, match=f"0123abcd.pth .*0123abcd, and is {DIGEST}"
        ):
            load(bad)


def test_nothing_is_saved_under_a_name_that_could_not_be_loaded(tmp_path: Path) -> None:
    checkpointer = Checkpointer(model(), tmp_path)
    with pytest.raises(ValueError, match=r"looks like a digest, got 'run-0123abcd'"):
        checkpointer.save("run-0123abcd")
    assert files(tmp_path) == []


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
    for prefixes in ("https://", ["new://", "https://"]):
        with pytest.raises(KeyError, match=r"\['https://'\] have a loader already.*force=True"):
            register_scheme(prefixes, lambda address: "mine")
    with pytest.raises(ValueError, match=r"load 'new://x': .*register_scheme\('new://', loader\)"):
        local_path("new://x")
    register_scheme("https://", lambda address: "mine", force=True)
    assert local_path("https://a/b") == "mine"


@pytest.mark.parametrize("prefixes", ["", [], ["a://", ""]])
def test_an_empty_prefix_is_refused(prefixes: Any) -> None:
    with pytest.raises(ValueError, match="prefixes must be such as 's3://'"):
        register_scheme(prefixes, lambda address: address)


def test_without_torchvision_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="'torchvision://resnet18' needs torchvision: pip"):
        local_path("torchvision://resnet18")


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

    path = local_path("test://good")
    try:
        local_path("test://broken")
    except ConnectionError as error:
        return os.path.basename(path), str(error)
    return None


def test_one_process_of_each_machine_fetches(tmp_path: Path) -> None:
    results = run_ranks(fetch_with_four_ranks_on_two_machines, 4, tmp_path)
    assert results == [(f"machine{k}.pth", "the cable is cut") for k in (0, 0, 1, 1)]
    assert files(tmp_path) == ["fetched-by-0", "fetched-by-2", "machine0.pth", "machine1.pth"]
