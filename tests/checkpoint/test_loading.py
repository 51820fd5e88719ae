"""A state into a model whose names or shapes differ, from files of several libraries."""

import copy
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from equality import assert_equal
from gloo import run_ranks
from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    load_checkpoint,
    revise_names,
)
from hooktrain.checkpoint.files import save_file
from hooktrain.checkpoint.folders import save_folder
from hooktrain.checkpoint.loading import load_model_state, read_checkpoint
from hooktrain.model.sharding import shard_model
from hooktrain.utils.tensors import full_tensor
from processes import end, start


@pytest.mark.parametrize("strict", [False, True])
def test_what_differs_is_told_or_refused(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 5)})
    before = copy.deepcopy(dict(model.state_dict()))
    state = {
        "a.weight": torch.ones(2, 3),
        "b.weight": torch.ones(7, 2),
        "b.bias": torch.ones(5),
        "head.bias": torch.ones(4),
    }
    if strict:
        with pytest.raises(ValueError, match="another model") as caught:
            load_model_state(model, state, strict=True)
        assert "strict=False" in str(caught.value)
        told = str(caught.value).splitlines()[1:4]
        assert_equal(dict(model.state_dict()), before)
    else:
        found = load_model_state(model, state)
        assert found.incorrect_shapes == [("b.weight", (7, 2), (5, 2))]
        assert found.missing_keys == ["a.bias"]
        assert found.unexpected_keys == ["head.bias"]
        told = caplog.messages[0].splitlines()[1:]
        after = {**before, "a.weight": torch.ones(2, 3), "b.bias": torch.ones(5)}
        assert_equal(dict(model.state_dict()), after)
    assert told == [
        "missing_keys: ['a.bias']",
        "unexpected_keys: ['head.bias']",
        "incorrect_shapes: [('b.weight', (7, 2), (5, 2))]",
    ]
    assert len(state) == 4  # the caller's dict is as it was


def load_from_own_disks(folder: Path) -> list[Any]:
    """What each rank loads into a sharded model from a path that is on a disk of its own."""
    rank = dist.get_rank()
    model = shard_model(nn.Linear(2, 4, bias=False))
    (folder / str(rank)).mkdir()
    os.chdir(folder / str(rank))
    found = []
    values = [torch.arange(8.0).view(4, 2), torch.full((4, 2), 1.0 + rank)]
    for name, value in zip(("same", "others"), values, strict=True):
        save_file({"model": {"weight": value}}, name)
    if rank == 0:
        save_file({"model": {"weight": values[0]}}, "mine")
    for name in ("same", "others", "mine"):
        try:
            Checkpointer(model).load(name)
            found.append(full_tensor(model.weight).tolist())
        except (CorruptCheckpointError, FileNotFoundError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_machines_with_own_disks_need_equal_files(tmp_path: Path) -> None:
    same, others, mine = run_ranks(load_from_own_disks, 2, tmp_path)[0]
    assert same == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert others == "CorruptCheckpointError: the ranks see different files at others"
    assert mine.startswith("FileNotFoundError")
    assert "'mine'" in mine


class Versioned(nn.Linear):
    """Its first version called the weight ``kernel``."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, metadata, *args)  # type: ignore[no-untyped-call]


def test_the_log_says_what_a_file_has_beside_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hooktrain")
    model, path = nn.Linear(1, 1), tmp_path / "of_timm.pth"
    torch.save(model.state_dict(), path)
    load_checkpoint(model, path)
    assert caplog.messages == []
    weights, average = model.state_dict(), nn.Linear(1, 1).state_dict()
    torch.save({"epoch": 3, "state_dict": weights, "state_dict_ema": average}, path)
    load_checkpoint(model, path)
    others = "['epoch', 'state_dict_ema']"
    assert caplog.messages == [f"{path} also has {others}, which are not loaded"]
    load_checkpoint(model, path, key="state_dict_ema")
    assert torch.equal(model.weight, average["weight"])


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}'"):
        load_checkpoint(nn.Linear(1, 1), tmp_path)


@pytest.mark.parametrize("strict", [False, True])
def test_the_version_in_the_metadata_reaches_the_module(strict: bool) -> None:
    new = nn.Sequential(Versioned(2, 1)).state_dict()
    old = OrderedDict([("0.kernel", torch.ones(1, 2)), ("0.bias", torch.ones(1))])
    old._metadata = OrderedDict([("0", {"version": 1})])  # type: ignore[attr-defined]
    for state in (new, old, revise_names(old, [("^0", "module.0")])):
        model = nn.Sequential(Versioned(2, 1))
        assert load_model_state(model, state, strict) == ([], [], [])
    assert torch.equal(model[0].weight, torch.ones(1, 2))


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("wrap", [nn.DataParallel, checkpoint_wrapper])
def test_the_version_reaches_a_module_inside_of_a_wrapper_or_no_longer_in_one(
    wrap: Callable[[nn.Module], nn.Module], is_wrapped: bool
) -> None:
    bare = nn.Sequential(Versioned(2, 1))
    inside = nn.Sequential(wrap(Versioned(2, 1)))
    source, target = (inside, bare) if is_wrapped else (bare, inside)
    assert load_model_state(target, source.state_dict(), strict=True) == ([], [], [])
    weights = [next(iter(each.state_dict().values())) for each in (source, target)]
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    [
        ("modules_list", False),
        ("modules_list", True),
        ("module2", True),
        ("module", False),
    ],
)
def test_a_model_whose_own_names_look_like_those_of_a_wrapped_one_is_loaded(
    name: str, is_wrapped: bool
) -> None:
    source, target = (nn.ModuleDict({name: nn.Linear(2, 1)}) for _ in range(2))
    state = (nn.DataParallel(source) if is_wrapped else source).state_dict()
    assert load_model_state(target, state, strict=True) == ([], [], [])
    assert torch.equal(target[name].weight, source[name].weight)


class Trainable(nn.Linear):
    """Has a state of its own making."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"weight": self.weight.detach()}


def test_a_model_whose_state_dict_takes_no_arguments_is_loaded() -> None:
    model = Trainable(2, 1)
    # What it leaves out, as adapters leave out the weights that they do not train, is not missing.
    found = load_model_state(model, {"weight": torch.ones(1, 2)}, strict=True)
    assert found == ([], [], [])
    assert torch.equal(model.weight, torch.ones(1, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_a_shared_tensor_under_another_name_is_not_missing() -> None:
    model = Tied()
    assert load_model_state(model, {"embedding.weight": torch.ones(4, 3)}) == (
        [],
        [],
        [],
    )
    assert torch.equal(model.head.weight, torch.ones(4, 3))
    with pytest.raises(ValueError, match="nothing"):
        load_model_state(model, {})


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_nothing_of_other_names_fits_a_network_with_any_norm(norm: Any) -> None:
    state = nn.ModuleDict({"net": nn.Sequential(norm(2), nn.Linear(2, 1))}).state_dict()
    model = nn.Sequential(norm(2), nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"nothing .*'net\.0\.weight'.*revise_keys="):
        load_model_state(model, state)


def test_names_are_revised_one_rule_after_the_other() -> None:
    state = {"a.weight": 1, "ab.weight": 2}
    rules = [(r"weight$", "kernel"), (r"^(a)\.kernel", r"net.\1")]
    assert dict(revise_names(state, rules)) == {"net.a": 1, "ab.kernel": 2}
    assert dict(revise_names(state, [])) == state
    with pytest.raises(ValueError, match=r"'ab\.weight'"):
        revise_names(state, [(r".*\.", "")])


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("key", ["model", "state_dict", None])
@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel])
def test_the_model_is_found_in_files_of_all_kinds(
    key: str | None, wrap: Any, tmp_path: Path
) -> None:
    source = nn.Sequential(nn.Linear(3, 2))
    state = (source if wrap is nn.Sequential else wrap(source)).state_dict()
    content = {key: state, "iteration": 9} if key else state
    path = save(tmp_path / "a.pth", content)
    target, other = (nn.Sequential(nn.Linear(3, 2)) for _ in range(2))
    result = load_checkpoint(target, path, strict=True)
    rest = Checkpointer(other).load(path)
    assert rest == ({"iteration": 9} if key else {})
    assert_equal(result, {"model": state, **rest})
    for model in (target, other):
        assert torch.equal(model[0].weight, source[0].weight)


@pytest.mark.parametrize("key", ["params_ema", "model_state_dict", "module", "net"])
@pytest.mark.parametrize("has_model", [False, True])
def test_weights_of_another_name_are_chosen(
    key: str, has_model: bool, tmp_path: Path
) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    content: dict[str, Any] = {"epoch": 3, key: source.state_dict()}
    if has_model:
        content["model"] = nn.Linear(3, 2).state_dict()
    path = save(tmp_path / "a.pth", content)
    result = load_checkpoint(target, path, strict=True, key=key)
    assert_equal(result, {"model": source.state_dict(), "epoch": 3})
    assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("key", ["", "teachr"])
def test_what_may_be_the_weights_is_named(key: str, tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    content = {"epoch": 3, "student": state, "teacher": state, "args": {"lr": 0.1}}
    path = save(tmp_path / "a.pth", content)
    names = r"key=.*\['student', 'teacher', 'args'\]"
    with pytest.raises(CorruptCheckpointError, match=names) as caught:
        load_checkpoint(nn.Linear(3, 2), path, key=key)
    assert f"no {key or 'model'!r}" in str(caught.value)
    if not key:
        with pytest.raises(CorruptCheckpointError, match=names):
            Checkpointer(nn.Linear(3, 2)).load(path)
    with pytest.raises(CorruptCheckpointError, match="'teacher'"):
        load_checkpoint(nn.Linear(3, 2), save(path, state), key="teacher")


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_what_a_module_keeps_beside_its_tensors_is_loaded(tmp_path: Path) -> None:
    source, target = Counting(2, 1), Counting(2, 1)
    source.seen = 5
    load_checkpoint(target, save(tmp_path / "a.pth", source.state_dict()), strict=True)
    assert target.seen == 5
    assert load_model_state(target, nn.Linear(2, 1).state_dict()).missing_keys == [
        "_extra_state"
    ]


class Remembering(nn.Linear):
    """Has a memory that grows, outside of its buffers."""

    memory = torch.zeros(0, 2)

    def get_extra_state(self) -> Tensor:
        return self.memory

    def set_extra_state(self, state: Tensor) -> None:
        self.memory = state


def test_a_tensor_that_a_module_keeps_beside_its_own_may_have_another_shape(
    tmp_path: Path,
) -> None:
    source, target = Remembering(2, 1), Remembering(2, 1)
    source.memory = torch.tensor([[1.0, 2.0]])
    path = save(tmp_path / "a.pth", source.state_dict())
    load_checkpoint(target, path, strict=True)
    assert torch.equal(target.memory, source.memory)
    assert torch.equal(target.weight, source.weight)


def test_a_part_is_loaded_by_the_names_that_it_has_inside(tmp_path: Path) -> None:
    source, backbone = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {
        f"net.backbone.{name}": value for name, value in source.state_dict().items()
    }
    state["net.head.weight"] = torch.ones(1)
    path = save(tmp_path / "a.pth", {"state_dict": state})
    rules = [(r"^net\.", ""), (r"^backbone\.", "")]
    result = load_checkpoint(backbone, path, revise_keys=rules)
    assert torch.equal(backbone.weight, source.weight)
    assert list(result["model"]) == list(state)
    with pytest.raises(ValueError, match="revise_keys="):
        load_checkpoint(backbone, path)
    with pytest.raises(ValueError, match=r"'head\.weight'"):
        load_checkpoint(backbone, path, strict=True, revise_keys=rules)


@pytest.mark.parametrize("size", [-1, 1])
def test_without_data_only_the_sizes_of_shards_are_compared(
    size: int, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    save_folder({"model": {"x": torch.ones(9)}, "iteration": 3}, folder)
    shard = folder / "__0_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(bytes(len(data)))
    assert read_checkpoint(str(folder), "meta")["iteration"] == 3
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        read_checkpoint(str(folder))
    shard.write_bytes(bytes(len(data) + size))
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        read_checkpoint(str(folder), "meta")


class Keeps(nn.Linear):
    """Keeps what it is given as its extra state, as a hook may do with its state."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return {"rows": torch.full((9, 1024), 5.0)}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Kept:
    """Keeps the state that is loaded."""

    state: Any = None

    def state_dict(self) -> Any:
        return {"queue": [torch.full((9, 1024), 6.0)], "count": 3}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def is_mapped(path: Path) -> bool:
    """Whether memory of this process lies in the file."""
    return path.name in Path("/proc/self/maps").read_text()


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Keeps(1024, 8)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_nothing_that_was_loaded_lies_in_the_file(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver = Checkpointer(model, tmp_path, optimizer=optimizer, mine=Kept())
    more = torch.full((9, 1024), 7.0)
    saver.save("a", more=more)
    expected = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    model = Keeps(1024, 8)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    mine, path = Kept(), tmp_path / "a.pth"
    found = Checkpointer(model, optimizer=optimizer, mine=mine).load(path)
    assert not is_mapped(path)
    os.truncate(path, 0)
    assert_equal((dict(model.state_dict()), optimizer.state_dict()), expected)
    assert_equal(model.kept, {"rows": torch.full((9, 1024), 5.0)})
    assert_equal(mine.state, {"queue": [torch.full((9, 1024), 6.0)], "count": 3})
    assert_equal(found, {"more": more})


class Disturbs(Kept):
    """Does something to the file when it is asked whether its state can be loaded."""

    def __init__(self, disturb: Callable[[], object] = lambda: None) -> None:
        self.disturb = disturb

    def check_state_dict(self, state: Any) -> None:
        self.disturb()


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_file_may_be_replaced_or_deleted_while_it_is_loaded(
    is_gone: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.pth"
    source = nn.Linear(1024, 8)
    Checkpointer(source, tmp_path, mine=Kept()).save("a")
    other = Checkpointer(nn.Linear(1024, 8), tmp_path, mine=Kept())
    model = nn.Linear(1024, 8)
    mine = Disturbs(path.unlink if is_gone else lambda: other.save("a"))
    Checkpointer(model, tmp_path, mine=mine).load(path)
    assert torch.equal(model.weight, source.weight)


def load_what_is_cut(folder: Path) -> None:
    path = folder / "model_0000019.pth"
    mine = Disturbs(lambda: os.truncate(path, 0))
    Checkpointer(nn.Linear(1024, 8), folder, mine=mine).resume_or_load("")


def test_a_page_that_cannot_be_read_ends_the_process_and_the_next_takes_an_older_file(
    tmp_path: Path,
) -> None:
    for iteration in (9, 19):
        saver = Checkpointer(nn.Linear(1024, 8), tmp_path, mine=Kept())
        saver.save(f"model_{iteration:07d}", iteration=iteration)
    before = sorted(tmp_path.iterdir())
    assert end(start(load_what_is_cut, tmp_path)) == -signal.SIGBUS
    assert sorted(tmp_path.iterdir()) == before
    again = Checkpointer(nn.Linear(1024, 8), tmp_path, mine=Kept())
    assert again.resume_or_load("") == {"iteration": 9}


def test_a_file_system_that_maps_no_files_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("unable to mmap 9 bytes from file <a>: No such device (19)")

    source = nn.Linear(2, 1)
    Checkpointer(source, tmp_path).save("a")
    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    model = nn.Linear(2, 1)
    Checkpointer(model).load(tmp_path / "a.pth")
    assert torch.equal(model.weight, source.weight)
