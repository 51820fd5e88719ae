"""Subclasses of fvcore's and detectron2's checkpointers, and files by address."""

import os
import pickle
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import CorruptCheckpointError, load_file, save_file
from hooktrain.compat.detectron2 import (
    Checkpointer,
    DetectionCheckpointer,
    HTTPURLHandler,
    PathHandler,
    PathManager,
    PeriodicCheckpointer,
    _IncompatibleKeys,
    _strip_prefix_if_present,
    comm,
    hooks,
)
from toys import linear_trainer

State = dict[str, Any]


def linear(value: float = 0.0) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def noting(name: str) -> Any:
    """An override that notes its call and goes on with the base class's."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.called.append(name)
        return getattr(super(Records, self), name)(*args, **kwargs)

    return method


class Records(Checkpointer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.called: list[str] = []


IN_A_LOAD = ["load", "_load_file", "_load_model"]
IN_A_LOAD += ["_convert_ndarray_to_tensor", "_log_incompatible_keys"]
for _name in ("has_checkpoint", *IN_A_LOAD):
    setattr(Records, _name, noting(_name))


@pytest.mark.parametrize("resume", [True, False])
def test_all_that_a_subclass_overrides_is_called(tmp_path: Path, resume: bool) -> None:
    Checkpointer(linear(2.0), tmp_path).save("model_0000004", iteration=4)
    checkpointer = Records(linear(), tmp_path)
    left = checkpointer.resume_or_load(tmp_path / "model_0000004.pth", resume=resume)
    assert left == {"iteration": 4}
    assert checkpointer.model.weight.item() == 2.0
    assert checkpointer.called == ["has_checkpoint"] * resume + IN_A_LOAD


def test_a_resume_passes_over_what_is_broken(tmp_path: Path) -> None:
    checkpointer = DetectionCheckpointer(linear(1.0), tmp_path)
    checkpointer.save("model_0000001", iteration=1)
    checkpointer.save("model_0000003", iteration=3)
    (tmp_path / "model_0000003.pth").write_bytes(b"broken")
    assert checkpointer.resume_or_load("", resume=True) == {"iteration": 1}


def test_a_resume_takes_what_is_newer_in_the_store(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    first = DetectionCheckpointer(linear(1.0), tmp_path / "a", store=store)
    for iteration in (1, 3):
        first.save(f"model_{iteration:07d}", iteration=iteration)
        first.finish()
        resumed = DetectionCheckpointer(linear(), tmp_path / "b", store=store)
        assert resumed.resume_or_load("", resume=True) == {"iteration": iteration}
        assert resumed.model.weight.item() == 1.0
    fresh = DetectionCheckpointer(linear(), tmp_path / "c", store=store)
    assert fresh.resume_or_load("", resume=False) == {}
    assert not (tmp_path / "c").exists()


class WithoutFirst(DetectionCheckpointer):
    """Changes the names in the file, and forgives what is missing."""

    def _load_model(self, checkpoint: State) -> Any:
        checkpoint["model"] = {
            k.removeprefix("first."): v for k, v in checkpoint["model"].items()
        }
        incompatible = super()._load_model(checkpoint)
        incompatible.missing_keys.remove("1.weight")
        return incompatible


def test_a_subclass_changes_what_is_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "bare.pth")
    save_file({"first.0.weight": torch.ones(1, 1)}, path)  # without "model"
    model = nn.Sequential(linear(), linear())
    checkpointer = WithoutFirst(model)
    assert checkpointer.load(path) == {}
    assert model[0].weight.item() == 1.0
    found = checkpointer._load_model(checkpointer._load_file(path))
    assert found == _IncompatibleKeys([], [], [])


def test_a_load_model_of_ones_own_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Student(DetectionCheckpointer):
        def _load_model(self, checkpoint: State) -> Any:
            state = checkpoint.pop("model")
            _strip_prefix_if_present(state, "module.")
            return self.model[0].load_state_dict(state, strict=False)

    state = {"module.weight": torch.ones(1, 1), "module.more": torch.ones(1)}
    save_file({"model": state}, tmp_path / "x.pth")
    model = nn.Sequential(linear())
    Student(model).load(tmp_path / "x.pth")
    assert model[0].weight.item() == 1.0
    assert "unexpected_keys=['more']" in caplog.text


class ByHand(Checkpointer):
    """Writes the file itself, with all that it is given."""

    def save(self, name: str, **kwargs: Any) -> None:
        data = {"model": self.model.state_dict()}
        data |= {key: item.state_dict() for key, item in self.checkpointables.items()}
        with self.path_manager.open(Path(self.save_dir, f"{name}.pth"), "wb") as file:
            torch.save(data | kwargs, file)
        self.tag_last_checkpoint(f"{name}.pth")


class Uploads(Checkpointer):
    """Does something with the file when it is there."""

    def save(self, name: str, **kwargs: Any) -> None:
        super().save(name, uploads=1, **kwargs)
        assert Path(self.save_dir, f"{name}.pth").exists()


@pytest.mark.parametrize("kind", [ByHand, Uploads])
def test_hooks_save_by_a_save_of_ones_own(
    tmp_path: Path, kind: type[Checkpointer]
) -> None:
    trainer = linear_trainer()
    checkpointer = kind(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks(
        [
            hooks.EvalHook(3, lambda: {"good": -trainer.iter}),
            hooks.BestCheckpointer(3, checkpointer, "good", "max"),
            hooks.PeriodicCheckpointer(checkpointer, 2, max_to_keep=1),
        ]
    )
    trainer.train(0, 7)
    names = {Path(path).name for path in checkpointer.get_all_checkpoint_files()}
    assert names == {"model_best.pth", "model_0000005.pth", "model_final.pth"}
    assert Path(checkpointer.get_checkpoint_file()).name == "model_final.pth"
    best = checkpointer.read(tmp_path / "model_best.pth").keys() - {"uploads"}
    assert best == {"model", "trainer", "iteration", "best"}


def test_the_path_manager_finds_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooktrain.checkpoint.sources._loaders", {})

    class Bucket(PathHandler):
        def _get_supported_prefixes(self) -> list[str]:
            return ["bucket://"]

        def _get_local_path(self, path: str, **kwargs: Any) -> str:
            return str(tmp_path / path.removeprefix("bucket://"))

        def _open(self, path: str, mode: str = "r") -> Any:
            opened.append(path)
            return open(self._get_local_path(path), mode)

    opened: list[str] = []
    manager = PathManager()
    manager.register_handler(Bucket())
    manager.register_handler(HTTPURLHandler())
    manager.mkdirs("bucket://sub/folder")
    assert PathManager.ls(tmp_path) == ["sub"]
    assert manager.isdir("bucket://sub")
    assert not manager.isfile("bucket://sub")
    with manager.open("bucket://x.txt", "w") as file:
        file.write("text")
    assert opened == ["bucket://x.txt"]
    assert (tmp_path / "x.txt").read_text() == "text"
    manager.rm("bucket://x.txt")
    assert not manager.exists(tmp_path / "x.txt")
    Checkpointer(linear(3.0), tmp_path).save("x")
    own = SimpleNamespace(get_local_path=lambda path: tmp_path / path[-5:])
    for find in (manager, own):
        model = linear()
        checkpointer = Checkpointer(model)
        checkpointer.path_manager = find
        checkpointer.load("bucket://x.pth")
        assert model.weight.item() == 3.0


def test_what_the_path_manager_has_downloaded_cannot_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    (tmp_path / "x.txt").write_text("text")
    address = f"file://{tmp_path}/x.txt"
    with PathManager.open(address) as file:
        assert file.read() == "text"
    for change in (
        lambda: PathManager.open(address, "w"),
        lambda: PathManager.open(address, mode="ab"),
        lambda: PathManager.rm(address),
        lambda: PathManager.mkdirs(address),
    ):
        with pytest.raises(ValueError, match="cannot write to 'file://"):
            change()
    assert Path(PathManager.get_local_path(address)).read_text() == "text"


def put_detectron2_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of it as reads files of its model zoo."""

    def read(self: Checkpointer, filename: str) -> State:
        return {"model": {"w": np.ones((1, 1), "f4")}, "matching_heuristics": True}

    def align(model: State, state: State, c2_conversion: bool) -> State:
        assert torch.is_tensor(state["w"])
        assert not c2_conversion
        return dict(zip(model, state.values(), strict=True))

    modules: dict[str, Any] = {
        "": SimpleNamespace(
            DetectionCheckpointer=type("Theirs", (), {"_load_file": read})
        ),
        ".c2_model_loading": SimpleNamespace(align_and_update_state_dicts=align),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"detectron2.checkpoint{name}", module)


def test_detectron2_reads_the_files_of_its_model_zoo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_detectron2_beside(monkeypatch)
    save_file({"model": {"w": torch.full((1, 1), 2.0)}}, tmp_path / "x.pth")
    paths = {"zoo.pkl": 1.0, f"{tmp_path}/x.pth?matching_heuristics=True": 2.0}
    for path, expected in paths.items():
        model = linear()
        DetectionCheckpointer(model, trusted=True).load(path)
        assert model.weight.item() == expected


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize("name", ["zoo.pkl", "zoo.pyth"])
def test_a_file_of_the_model_zoo_runs_no_code_unless_it_is_trusted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_detectron2_beside(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(pickle.dumps({"model": Harmful()}))
    with pytest.raises(CorruptCheckpointError, match=f"{name}.*trusted=True"):
        DetectionCheckpointer(linear()).load(name)
    torch.save({"model": {"weight": torch.ones(1, 1)}}, name)
    model = linear()
    DetectionCheckpointer(model).load(name)
    assert model.weight.item() == 1.0
    assert not Path("harmed").exists()


def outcomes_on_a_rank(folder: Path) -> tuple[str, float]:
    class ReadByOne(Checkpointer):
        def _load_file(self, filename: str) -> State:
            if not comm.is_main_process():
                raise OSError("only the main process can read it")
            return super()._load_file(filename)

    with pytest.raises(OSError, match="only the main") as caught:
        ReadByOne(linear(), folder).resume_or_load("")
    checkpointer = Checkpointer(linear(), folder)
    checkpointer.resume_or_load("")
    return str(caught.value), checkpointer.model.weight.item()


def test_what_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    Checkpointer(linear(2.0), tmp_path).save("model_0000001", iteration=1)
    first, second = run_ranks(outcomes_on_a_rank, 2, tmp_path)
    assert first == second == ("only the main process can read it", 2.0)


class TheirHook:
    """detectron2's HookBase, as an engine that was copied whole has it."""

    trainer: Any = None

    def before_train(self) -> None:
        pass

    def after_train(self) -> None:
        pass

    def before_step(self) -> None:
        pass

    def after_step(self) -> None:
        pass


class TheirCheckpointer(PeriodicCheckpointer, TheirHook):  # type: ignore[misc]
    """As detectron2's hooks.py derives it from fvcore's."""

    def before_train(self) -> None:
        self.max_iter = self.trainer.max_iter

    def after_step(self) -> None:
        self.step(self.trainer.iter)


class TheirTrainer:
    """As much of detectron2's TrainerBase as matters here."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        self.model = model
        self.start_iter, self.iter, self.max_iter = 0, 0, 5

    def register_hooks(self, hooks: list[Any]) -> None:
        for hook in hooks:
            hook.trainer = weakref.proxy(self)
        self._hooks.extend(hooks)

    def train(self) -> None:
        for hook in self._hooks:
            hook.before_train()
        while self.iter < self.max_iter:
            with torch.no_grad():
                self.model.weight += 1
            for hook in self._hooks:
                hook.after_step()
            self.iter += 1
        for hook in self._hooks:
            hook.after_train()


@pytest.mark.parametrize("kind", [PeriodicCheckpointer, TheirCheckpointer])
def test_a_trainer_of_an_engine_that_was_copied_whole_saves(
    kind: Any, tmp_path: Path
) -> None:
    model = linear()
    trainer = TheirTrainer(model)
    trainer.register_hooks([kind(Checkpointer(model, tmp_path), 2, max_to_keep=1)])
    trainer.train()
    saved = {path.name: load_file(path) for path in tmp_path.glob("*.pth")}
    assert {name: content["iteration"] for name, content in saved.items()} == {
        "model_0000003.pth": 3,
        "model_final.pth": 4,
    }
    assert saved["model_final.pth"]["model"]["weight"].item() == 5.0
    assert saved["model_0000003.pth"]["model"]["weight"].item() == 4.0
