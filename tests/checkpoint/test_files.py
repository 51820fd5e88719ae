"""What checkpoint files may hold, and what happens to damaged and malicious ones."""

import errno
import io
import os
import pickle
import random
import re
import resource
import sys
import zipfile
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equality import assert_equal, equal
from faults import RunsCode, fail_at_write
from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, load_checkpoint
from hooktrain.checkpoint.files import (
    CorruptCheckpointError,
    load_file,
    save_file,
    verify_file,
)


def small_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(3, 4), "zeros": torch.zeros(5)},
        "trainer": {"iteration": 3, "hooks": [1, (2.5, "x")]},
        "iteration": 3,
    }


def overwrite(path: Path, content: bytes) -> None:
    """Forty times as fast as to make a file empty first, which counts where many are written."""
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()


def test_a_state_comes_back_equal(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": (random.getstate(), np.random.PCG64(3).state),
        "nested": [1, ("a", [2.5, {"x": (None, True, b"\x00\xff", 1j)}]), {3, 4}],
        "types": [torch.float16, torch.device("cpu"), torch.Size([2]), torch.strided],
        3: {(1, 2): "keys that are not strings"},
    }
    save_file(state, tmp_path / "a.pth")
    loaded = load_file(tmp_path / "a.pth")
    assert_equal(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    assert [p.name for p in tmp_path.iterdir()] == ["a.pth"]


class IntSubclass(int):
    pass


REFUSED = {
    "a numpy array": np.ones(2),
    "numpy's generator state": np.random.RandomState(0).get_state(),
    "a defaultdict": defaultdict(int),
    "a deque": deque([1]),
    "a path": Path("x"),
    "an object": object(),
    "a subclass of int": IntSubclass(3),
    "an uninitialised parameter": nn.UninitializedParameter(),
    "empty bytes": b"",
    "a tensor without data": torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_what_could_not_be_loaded_is_refused_before_the_disk_is_touched(
    value: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.pth").write_bytes(b"the old file")
    before = os.stat(tmp_path)
    with pytest.raises(TypeError, match=r"trainer\.hooks\.1\.best") as caught:
        save_file({"trainer": {"hooks": [0, {"best": value}]}}, tmp_path / "a.pth")
    if not isinstance(value, tuple):
        assert type(value).__qualname__ in str(caught.value)
    assert (tmp_path / "a.pth").read_bytes() == b"the old file"
    assert os.stat(tmp_path).st_mtime_ns == before.st_mtime_ns


def damaged(path: Path, versions: Iterable[bytes]) -> int:
    """How many of these versions of a file are detected; the others hold its state all the same."""
    state, detected = load_file(path), 0
    for content in versions:
        overwrite(path, content)
        try:
            assert equal(load_file(path), state), "a file differs silently"
        except CorruptCheckpointError:
            detected += 1
    return detected


@pytest.mark.parametrize("background", [False, True])
def test_a_view_is_saved_without_the_rest_of_its_memory(
    background: bool, tmp_path: Path
) -> None:
    large = torch.arange(1_000_000.0)
    whole = torch.ones(8)
    state = {
        "rows": large[:4],
        "turned": large[:6].view(2, 3).t(),
        "every": [large[::250_000]],
        "expanded": torch.ones(1).expand(3),
        "whole": (whole, whole),
        "weight": nn.Parameter(large[:2]),
        "empty": large[:0],
        "sparse": torch.eye(2).to_sparse(),
    }
    module = nn.Module()
    module.state_dict = lambda: state  # type: ignore[method-assign, assignment]
    checkpointer = Checkpointer(module, tmp_path, background=background)
    checkpointer.save("a")
    checkpointer.wait()
    assert (tmp_path / "a.pth").stat().st_size < 10_000
    loaded = load_file(tmp_path / "a.pth")["model"]
    assert [loaded[name].tolist() for name in ("rows", "expanded")] == [
        [0, 1, 2, 3],
        [1, 1, 1],
    ]
    assert loaded["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded["every"][0].tolist() == [0, 250_000, 500_000, 750_000]
    assert loaded["weight"].tolist() == [0, 1]
    assert loaded["empty"].shape == (0,)
    assert loaded["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    # Tensors that are one stay one.
    first, second = loaded["whole"]
    assert first.data_ptr() == second.data_ptr()


def test_numbers_of_numpy_that_others_have_saved_are_read(tmp_path: Path) -> None:
    kinds = [
        "bool_",
        "int8",
        "uint16",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
    ]
    numbers = {kind: getattr(np, kind)(1) for kind in kinds}
    torch.save({"weight": torch.ones(1), "best": numbers}, tmp_path / "a.pth")
    assert load_file(tmp_path / "a.pth")["best"] == numbers
    for release in (b"numpy.core.", b"numpy._core."):  # numpy 1, and numpy 2
        path = tmp_path / "c.pth"
        with (
            zipfile.ZipFile(tmp_path / "a.pth") as old,
            zipfile.ZipFile(path, "w") as new,
        ):
            for name in old.namelist():
                content = re.sub(rb"numpy\._?core\.", release, old.read(name))
                new.writestr(name, content)
        assert release in path.read_bytes()
        assert load_file(path)["best"] == numbers
    objects = np.array([RunsCode(tmp_path / "ran")], dtype=object)
    torch.save({"best": objects}, tmp_path / "b.pth")
    with pytest.raises(CorruptCheckpointError, match="_reconstruct"):
        load_file(tmp_path / "b.pth")
    assert not (tmp_path / "ran").exists()


def test_a_class_in_a_file_is_named_with_the_way_to_trust_it(tmp_path: Path) -> None:
    content = {"model": {"a": torch.ones(1)}, "args": Namespace(lr=0.1)}
    torch.save(content, tmp_path / "a.pth")
    way = re.escape("torch.serialization.add_safe_globals([argparse.Namespace])")
    way += r".*weights_only=False\)\['model'\]\.state_dict\(\)"
    with pytest.raises(CorruptCheckpointError, match=way):
        load_file(tmp_path / "a.pth")
    with torch.serialization.safe_globals([Namespace]):
        assert load_file(tmp_path / "a.pth")["args"] == Namespace(lr=0.1)


def test_safetensors_are_read_wherever_a_file_is(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    source, path = nn.Linear(3, 2), tmp_path / "model.safetensors"
    package.save_file(source.state_dict(), path)
    verify_file(path)
    assert load_file(path, "meta")["weight"].is_meta
    for load in (
        lambda model: load_checkpoint(model, path, strict=True),
        lambda model: Checkpointer(model).load(path),
        lambda model: Checkpointer(model, tmp_path / "new").resume_or_load(path),
        lambda model: load_checkpoint(model, f"file://{path}"),
    ):
        model = nn.Linear(3, 2)
        load(model)
        assert torch.equal(model.weight, source.weight)
    raw = path.read_bytes()
    for broken in (raw[:-1], raw[:9], b"", raw + b"x"):
        path.write_bytes(broken)
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            load_checkpoint(nn.Linear(3, 2), path)


def test_without_the_package_of_safetensors_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(8) + b"{}")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="safetensors"):
        load_checkpoint(nn.Linear(3, 2), tmp_path / "a.safetensors")


def test_a_flip_of_any_byte_is_detected_or_does_no_harm(tmp_path: Path) -> None:
    save_file(small_state(), tmp_path / "a.pth")
    raw = (tmp_path / "a.pth").read_bytes()
    # The lowest bit everywhere; in the directory at the end also bit 4, which marks a part as a
    # folder, so that torch leaves its tensor uninitialised.
    places = [*product([0x01], range(len(raw)))]
    places += product([0x10], range(raw.index(b"PK\x01\x02"), len(raw)))
    flipped = (raw[:i] + bytes([raw[i] ^ bit]) + raw[i + 1 :] for bit, i in places)
    assert (
        damaged(tmp_path / "a.pth", flipped) > len(raw) / 2
    )  # the others lie in padding


def test_a_hole_of_zeros_is_detected_or_does_no_harm(tmp_path: Path) -> None:
    save_file(small_state(), tmp_path / "a.pth")
    raw = (tmp_path / "a.pth").read_bytes()
    begins = range(0, len(raw) - 512, 4)
    holes = (raw[:i] + bytes(n) + raw[i + n :] for i in begins for n in (16, 512))
    assert damaged(tmp_path / "a.pth", holes) > len(raw) / 4


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    save_file(small_state(), tmp_path / "a.pth")
    raw = (tmp_path / "a.pth").read_bytes()
    beginnings = (raw[:length] for length in range(len(raw)))
    assert damaged(tmp_path / "a.pth", beginnings) == len(raw)


def test_a_file_without_checksums_is_not_called_corrupt(tmp_path: Path) -> None:
    state = small_state()
    torch.serialization.set_crc32_options(False)
    try:
        save_file(state, tmp_path / "ours.pth")
        assert not torch.serialization.get_crc32_options()
        torch.save(state, tmp_path / "torchs.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    for name, has_checksums in (("ours.pth", True), ("torchs.pth", False)):
        assert_equal(load_file(tmp_path / name), state)
        with zipfile.ZipFile(tmp_path / name) as parts:
            assert any(part.CRC for part in parts.infolist()) == has_checksums


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    save_file({"zeros": torch.zeros(1 << 20)}, tmp_path / "a.pth")
    with (
        zipfile.ZipFile(tmp_path / "a.pth") as plain,
        zipfile.ZipFile(tmp_path / "b.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        load_file(tmp_path / "b.pth")


def resume_with_little_memory(folder: Path) -> str:
    """Runs in a process of its own, as the limit holds for all of it."""
    in_use = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    )
    resource.setrlimit(
        resource.RLIMIT_AS, (in_use + (30 << 20), resource.RLIM_INFINITY)
    )
    try:
        Checkpointer(nn.Linear(1, 1), folder).resume_or_load("")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "resumed"


def test_too_little_memory_is_not_taken_for_a_broken_file(tmp_path: Path) -> None:
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    checkpointer.save("model_0000001", iteration=1)
    checkpointer.save("model_0000002", iteration=2, large=torch.zeros(15 << 20))
    (outcome,) = run_ranks(resume_with_little_memory, 1, tmp_path)
    assert "allocate memory" in outcome or outcome.startswith("MemoryError")


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as parts:
        parts.writestr("word/document.xml", "<xml/>")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a zip file"),
        (b"hello" * 100, "not a zip file"),
        (b"PK\x03\x04hello", "not a zip file"),
        (pickle.dumps({}), "not a zip file"),
        (zipped(), ""),
    ],
)
def test_an_empty_or_foreign_file_is_corrupt(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=rf"a\.pth.*{problem}"):
        load_file(tmp_path / "a.pth")


def test_a_file_of_the_old_format_loads(tmp_path: Path) -> None:
    state, path = small_state(), tmp_path / "a.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert_equal(load_file(path), state)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorruptCheckpointError, match=r"a\.pth"):
        load_file(path)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_malicious_pickle_is_not_run(
    new_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trace = tmp_path / "a.pth", tmp_path / "the code ran"
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # changes nothing
    torch.save(
        {"model": RunsCode(trace)}, path, _use_new_zipfile_serialization=new_format
    )
    with pytest.raises(CorruptCheckpointError, match="mkdir"):
        load_file(path)
    path.write_bytes(pickle.dumps(RunsCode(trace)))
    with pytest.raises(CorruptCheckpointError):
        load_file(path)
    assert not trace.exists()


def test_a_failure_of_any_write_comes_out_as_the_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"old": 1}, tmp_path / "a.pth")
    for n in count(1):
        with monkeypatch.context() as patch:
            fail_at_write(patch, n, OSError(errno.EIO, "the disk failed"))
            message = ""
            try:
                save_file(small_state(), tmp_path / "a.pth")
            except OSError as error:
                message = str(error)
        if not message:
            break  # there is no n-th write
        assert "the disk failed" in message
        assert load_file(tmp_path / "a.pth") == {"old": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["a.pth"]
    assert n > 20
