"""What checkpoint files may hold, and what happens to damaged and malicious ones."""

import errno
import io
import os
import pickle
import random
import resource
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_toys import equal, small_state
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.files import (
    CorruptCheckpointError,
    load_file,
    save_file,
    storable,
    verify_file,
)


def test_a_state_comes_back_equal(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    generator = np.random.PCG64(3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": (random.getstate(), torch.get_rng_state(), generator.state),
        "nested": [1, ("a", [2.5, {"x": (None, True, b"\x00\xff", 1j)}]), {3, 4}],
        "types": [torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided],
        3: {(1, 2): "keys that are not strings"},
    }
    save_file(state, tmp_path / "a.pth")
    loaded = load_file(tmp_path / "a.pth")
    assert equal(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    assert [p.name for p in tmp_path.iterdir()] == ["a.pth"]


def test_a_parameter_and_a_shared_tensor_come_back_as_such(tmp_path: Path) -> None:
    shared = torch.arange(3.0)
    state = {"p": nn.Parameter(torch.ones(2)), "a": shared, "b": shared}
    save_file(state, tmp_path / "a.pth")
    loaded = load_file(tmp_path / "a.pth")
    assert isinstance(loaded["p"], nn.Parameter)
    loaded["a"][0] = 9
    assert loaded["b"].tolist() == [9, 1, 2]


class IntSubclass(int):
    pass


REFUSED = {
    "a numpy string": np.str_("a"),
    "a numpy array": np.ones(2),
    "numpy's generator state": np.random.RandomState(0).get_state(),
    "a defaultdict": defaultdict(int),
    "a deque": deque([1]),
    "a frozenset": frozenset([1]),
    "a path": Path("x"),
    "a function": len,
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


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_could_indeed_not_be_loaded(value: Any) -> None:
    file = io.BytesIO()
    if isinstance(value, torch.Tensor) and value.is_meta and not nn.parameter.is_lazy(value):
        return  # loads, but its numbers are gone
    torch.save(value, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)


def test_keys_and_attributes_are_checked_too() -> None:
    with pytest.raises(TypeError, match=r"epochs.*the key itself"):
        storable({"epochs": {object(): 1}})
    state = OrderedDict(w=torch.ones(1))
    state._metadata = {"": {"version": object()}}  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"model\._metadata\.\.version"):
        storable({"model": state})
    tensor = torch.ones(1)
    tensor.note = object()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"w\.note"):
        storable({"w": tensor})


@pytest.mark.parametrize(
    "value",
    [Counter("aab"), bytearray(b"ab"), 1 << 128],
    ids=["a counter", "a bytearray", "a long integer"],
)
def test_the_limits_of_what_can_be_loaded_are_met(value: Any, tmp_path: Path) -> None:
    save_file({"x": value}, tmp_path / "a.pth")
    assert equal(load_file(tmp_path / "a.pth"), {"x": value})


def test_a_flip_of_any_byte_is_detected_or_does_no_harm(tmp_path: Path) -> None:
    state, path = small_state(), tmp_path / "a.pth"
    save_file(state, path)
    raw, detected = path.read_bytes(), 0
    # The lowest bit everywhere; in the directory at the end also bit 4, which marks a part as a
    # folder, so that torch leaves its tensor uninitialised.
    directory = raw.index(b"PK\x01\x02")
    for bit, start in ((0x01, 0), (0x10, directory)):
        for position, byte in enumerate(raw[start:], start):
            altered = bytearray(raw)
            altered[position] = byte ^ bit
            path.write_bytes(altered)
            try:
                assert equal(load_file(path), state), f"byte {position} differs silently"
            except CorruptCheckpointError:
                detected += 1
    assert detected > len(raw) / 2  # the others lie in padding


def test_a_hole_of_zeros_is_detected_or_does_no_harm(tmp_path: Path) -> None:
    state, path = small_state(), tmp_path / "a.pth"
    save_file(state, path)
    raw, detected = path.read_bytes(), 0
    for position in range(0, len(raw), 4):
        for length in (16, 512):
            hole = raw[position : position + length]
            path.write_bytes(raw[:position] + bytes(len(hole)) + raw[position + len(hole) :])
            try:
                assert equal(load_file(path), state), f"hole at {position} differs silently"
            except CorruptCheckpointError:
                detected += 1
    assert detected > len(raw) / 4


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    save_file(small_state(), path)
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(CorruptCheckpointError, match=r"a\.pth"):
            verify_file(path)


def test_checksums_are_written_even_where_torch_was_told_not_to(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_file(small_state(), tmp_path / "a.pth")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    verify_file(tmp_path / "a.pth")


def test_a_file_without_checksums_is_not_called_corrupt(tmp_path: Path) -> None:
    state = small_state()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert equal(load_file(tmp_path / "a.pth"), state)


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    save_file({"zeros": torch.zeros(1 << 20)}, tmp_path / "a.pth")
    with (
        zipfile.ZipFile(tmp_path / "a.pth") as plain,
        zipfile.ZipFile(tmp_path / "b.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CorruptCheckpointError, match=r"data/0.* are compressed"):
        load_file(tmp_path / "b.pth")


def resume_with_little_memory(folder: Path) -> str:
    """Runs in a process of its own, as the limit holds for all of it."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (30 << 20), resource.RLIM_INFINITY))
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


class RunsCode:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("content", [b"", b"hello" * 100, b"PK\x03\x04hello", pickle.dumps({})])
def test_an_empty_or_foreign_file_is_corrupt(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(content)
    for read in (verify_file, load_file):
        with pytest.raises(CorruptCheckpointError, match=r"a\.pth"):
            read(tmp_path / "a.pth")


def test_a_zip_file_of_another_program_is_corrupt(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as file:
        file.writestr("word/document.xml", "<xml/>")
    with pytest.raises(CorruptCheckpointError, match=r"not of torch\.save"):
        verify_file(tmp_path / "a.pth")


def test_a_missing_file_is_not_called_corrupt(tmp_path: Path) -> None:
    for read in (verify_file, load_file):
        with pytest.raises(FileNotFoundError, match=r"none\.pth"):
            read(tmp_path / "none.pth")


def test_a_file_of_the_old_format_loads(tmp_path: Path) -> None:
    state, path = small_state(), tmp_path / "a.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert equal(load_file(path), state)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorruptCheckpointError, match=r"a\.pth"):
        load_file(path)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(new_format: bool, tmp_path: Path) -> None:
    path, trace = tmp_path / "a.pth", tmp_path / "the code ran"
    torch.save({"model": RunsCode(trace)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CorruptCheckpointError, match=r"refused.*mkdir.*Nothing was run"):
        load_file(path)
    path.write_bytes(pickle.dumps(RunsCode(trace)))
    with pytest.raises(CorruptCheckpointError):
        load_file(path)
    assert not trace.exists()


def test_no_environment_variable_makes_loading_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"model": RunsCode(tmp_path / "the code ran")}, tmp_path / "a.pth")
    with pytest.raises(CorruptCheckpointError, match="refused"):
        load_file(tmp_path / "a.pth")
    assert not (tmp_path / "the code ran").exists()


class FailingFile(io.BytesIO):
    def __init__(self, failing_write: int) -> None:
        super().__init__()
        self.left = failing_write

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "the disk failed")
        return super().write(data)


def test_a_failure_of_any_write_comes_out_as_the_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = FailingFile(-1)
    torch.save(small_state(), counting)
    writes = -1 - counting.left
    assert writes > 20
    save_file({"old": 1}, tmp_path / "a.pth")
    real_open = open
    for n in range(1, writes + 1):

        def open_failing(path: Any, mode: str = "r", *args: Any, n: int = n, **kwargs: Any) -> Any:
            file = real_open(path, mode, *args, **kwargs)
            if mode == "wb":
                failing = FailingFile(n)
                real_write = file.write

                def write(data: Any) -> int:
                    failing.write(data)
                    return real_write(data)

                return WithWrite(file, write)
            return file

        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", open_failing)
            with pytest.raises(OSError, match="the disk failed"):
                save_file(small_state(), tmp_path / "a.pth")
        assert load_file(tmp_path / "a.pth") == {"old": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["a.pth"]


class WithWrite:
    """An open file with another ``write``."""

    def __init__(self, file: Any, write: Any) -> None:
        self.file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "WithWrite":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
