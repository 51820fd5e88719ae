"""Models from files of several kinds."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, load_checkpoint


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    "content",
    [
        lambda state: {"model": state, "iteration": 9},
        lambda state: {"state_dict": state, "meta": {"epoch": 2}},
        lambda state: state,
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
    ],
    ids=["model", "state_dict", "bare", "wrapped", "wrapped state_dict"],
)
def test_the_model_is_found_in_files_of_all_kinds(content: Any, tmp_path: Path) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    path = save(tmp_path / "a.pth", content(source.state_dict()))
    result = load_checkpoint(target, path, strict=True)
    assert torch.equal(target.weight, source.weight)
    expected = {"iteration": 9} if "iteration" in result else {"meta": {"epoch": 2}}
    rest = {key: item for key, item in result.items() if key != "model"}
    assert rest in ({}, expected)
    assert len(result["model"]) == 2
    other = nn.Linear(3, 2)
    Checkpointer(other).load(path)
    assert torch.equal(other.weight, source.weight)


def test_what_a_module_keeps_beside_its_tensors_may_stand_in_a_bare_state(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen = 5

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    path = save(tmp_path / "a.pth", Counting(2, 1).state_dict())
    target = Counting(2, 1)
    target.seen = 0
    load_checkpoint(target, path, strict=True)
    assert target.seen == 5


@pytest.mark.parametrize("content", [[1], {"optimizer": {}}, {"model": 3}, {}])
def test_a_file_without_a_model_is_refused(content: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "a.pth", content)
    with pytest.raises(CorruptCheckpointError, match=r"a\.pth is no checkpoint"):
        load_checkpoint(nn.Linear(1, 1), path)


def test_differences_are_told_and_refused_if_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path / "a.pth", {"weight": torch.ones(2, 3), "gone": torch.ones(1)})
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"(?s)bias.*gone"):
        load_checkpoint(model, path, strict=True)
    assert torch.equal(model.weight, before)
    with caplog.at_level(logging.WARNING):
        load_checkpoint(model, path)
    assert torch.equal(model.weight, torch.ones(2, 3))
    assert [r.getMessage().splitlines()[-1].split()[0] for r in caplog.records] == ["bias", "gone"]


def test_a_part_is_loaded_by_its_prefix_after_names_were_revised(tmp_path: Path) -> None:
    source, backbone = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {f"net.backbone.{name}": value for name, value in source.state_dict().items()}
    state["net.head.weight"] = torch.ones(1)
    path = save(tmp_path / "a.pth", {"state_dict": state})
    for revise, prefix in (((), "net.backbone."), ([(r"^net\.", "")], "backbone")):
        nn.init.zeros_(backbone.weight)
        result = load_checkpoint(backbone, path, strict=True, revise_keys=revise, prefix=prefix)
        assert torch.equal(backbone.weight, source.weight)
        assert list(result["model"]) == list(state)
    with pytest.raises(ValueError, match=r"'neck\.'"):
        load_checkpoint(backbone, path, prefix="neck")


def test_the_result_is_on_the_device_that_was_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pth", {"model": {"weight": torch.ones(1, 1)}, "extra": torch.ones(1)})
    model = nn.Linear(1, 1, bias=False)
    assert load_checkpoint(model, path)["extra"].device.type == "cpu"
    # There is no other device in every machine. Weights that are nowhere cannot be copied.
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        load_checkpoint(model, path, "meta")


def test_a_missing_file_is_an_error_with_a_hint(tmp_path: Path) -> None:
    save(tmp_path / "model_final.pth", {})
    with pytest.raises(FileNotFoundError, match=r"did you mean 'model_final\.pth'") as info:
        load_checkpoint(nn.Linear(1, 1), tmp_path / "model_finl.pth")
    assert info.value.filename == str(tmp_path / "model_finl.pth")
    with pytest.raises(FileNotFoundError, match="nor a folder '/nowhere/deep'"):
        load_checkpoint(nn.Linear(1, 1), "/nowhere/deep/a.pth")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "a.pth", {"weight": torch.full((1, 1), 7.0)})
    model = nn.Linear(1, 1, bias=False)
    load_checkpoint(model, "~/a.pth")
    assert model.weight.item() == 7.0
