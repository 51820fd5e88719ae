"""Inspect, verify and convert checkpoints.

    python tools/checkpoint.py inspect PATH                 # a file or a sharded folder
    python tools/checkpoint.py verify PATH
    python tools/checkpoint.py to-file FOLDER FILE.pth      # a sharded folder into one file
    python tools/checkpoint.py to-sharded FILE.pth FOLDER   # and back, for any number of ranks
    python tools/checkpoint.py weights PATH FILE            # only the model: tensors by name
    python tools/checkpoint.py average PATH FILE            # the averaged model of the hook EMA
                                                            # --hook NAME if there are several
    python tools/checkpoint.py upgrade FOLDER               # of an earlier revision, in place

`weights` and `average` also read the checkpoints of other libraries, and can write a
FILE.safetensors if that package is installed. model.load_state_dict(torch.load(FILE)) loads a FILE
of any other name. `upgrade` replaces the folder once the new one is complete, as a save does. PATH
may also be the address of a file, such as s3://bucket/model.pth. One process verifies and reads
everything, without a process group. A conversion holds the whole state in memory. The exit code
is 1 if a checkpoint is broken or cannot be read.
"""

import argparse
import hashlib
import io
import os
import reprlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from hooktrain.checkpoint.files import (
    MANIFEST,
    STATE,
    CorruptCheckpointError,
    check_container,
    is_folder,
    load_file,
    reading,
    save_file,
    verify_file,
)
from hooktrain.checkpoint.folders import CheckpointFolder, save_folder
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.sources import local_path
from hooktrain.utils.file_io import lock_folder, on_disk, unlock_folder
from hooktrain.utils.names import dotted
from hooktrain.utils.tensors import map_leaves, narrow


def inspect(path: Path) -> None:
    """Print a table of the tensors, and a table of the other values."""
    tensors: dict[str, Tensor] = {}

    def take(keys: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors[".".join(map(str, keys))] = leaf
        return leaf

    state = map_leaves(take, read(path, "meta"))
    rows = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append([name, tuple(tensor.shape), dtype, f"{tensor.nbytes:,}"])
    alignment = ("left", "left", "left", "right")
    print(tabulate(rows, ["tensor", "shape", "dtype", "bytes"], colalign=alignment))
    total = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{len(rows)} tensors, {total:,} bytes\n")
    values = [item for item in plain_values(state) if item[0] not in tensors]
    print(tabulate(values, ["other", "value"], disable_numparse=True))


def plain_values(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The dotted names of the values in nested dicts, with short texts of the values."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from plain_values(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, reprlib.repr(value)


def verify(path: Path) -> None:
    """Read every byte and compare all checksums."""
    if path.is_dir():
        CheckpointFolder(path).verify()
        sizes = [file.stat().st_size for file in path.iterdir()]
        print(f"{path} is intact: {len(sizes)} files, {sum(sizes):,} bytes")
    else:
        verify_file(path)
        print(f"{path} is intact: {path.stat().st_size:,} bytes")


def to_file(folder: Path, file: Path) -> None:
    """Convert a sharded folder into one file."""
    refuse_to_replace(file)
    save_file(read(folder), file)


def to_sharded(file: Path, folder: Path) -> None:
    """Convert one file into a sharded folder."""
    refuse_to_replace(folder)
    save_folder(load_file(file), folder)


def weights(path: Path, file: Path) -> None:
    """Write only the weights and buffers of the model."""
    write_weights(read_checkpoint(str(path))["model"], file)


def average(path: Path, file: Path, hook: str | None = None) -> None:
    """Write only the averaged weights and buffers, by the model's names."""
    hooks = read_checkpoint(str(path)).get("trainer", {}).get("hooks", {})
    averages = [name for name, state in hooks.items() if is_average(state)]
    if not averages:
        raise ValueError(
            f"{path} has no averaged model, only the states of {list(hooks)}"
        )
    if hook is None and len(averages) > 1:
        raise ValueError(
            f"{path} has averaged models of {averages}: choose one by --hook"
        )
    if hook is None:
        hook = averages[0]
    if hook not in averages:
        raise ValueError(f"--hook must be one of {averages}, not {hook!r}")
    names = [name for name in hooks[hook] if name.startswith("module.")]
    averaged = {name.removeprefix("module."): hooks[hook][name] for name in names}
    write_weights(averaged, file)


def is_average(state: Any) -> bool:
    """Whether the state of a hook is the state of an averaged model."""
    names = [*state] if isinstance(state, Mapping) else []
    return "steps" in names and any(str(name).startswith("module.") for name in names)


def upgrade(folder: Path) -> None:
    """Rewrite a sharded folder of an earlier revision in place."""
    if not is_folder(folder):
        raise ValueError(f"{folder} is not a sharded folder")
    manifest = load_file(folder / MANIFEST)
    if manifest.keys() != {"files"}:
        print(f"{folder} is of this revision already")
        return
    lock_folder(folder.parent)  # no run may be using it
    try:
        with reading(folder):
            verify_earlier(folder, manifest["files"])
            state = read_earlier(folder, manifest["files"])
        save_folder(state, folder)
    finally:
        unlock_folder(folder.parent)
    print(f"{folder} is of this revision now")


def verify_earlier(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Compare the sizes and the SHA-256 of all files with those in an earlier manifest."""
    for name, (size, expected) in files.items():
        path = folder / name
        if path.name != name:
            raise CorruptCheckpointError(f"{folder} has no file {name!r} in it")
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            if (file.tell(), digest.hexdigest()) != (size, expected):
                raise CorruptCheckpointError(f"{path} was altered")


def read_earlier(folder: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """Read an earlier folder, whose state.pth has the positions of the parts of tensors."""
    content = load_file(folder / STATE)

    def fill(keys: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        tensor = torch.empty_like(leaf, device="cpu")
        filled = torch.zeros(leaf.shape, dtype=torch.bool)
        for offsets, sizes, file, begin, length in content["parts"][dotted(keys)]:
            if file not in files:
                raise ValueError(f"the manifest has no file {file!r}")
            part = narrow(filled, offsets, sizes)
            if part.any():
                raise ValueError(f"parts of {dotted(keys)} overlap")
            part.fill_(True)
            numbers = read_container(folder / file, begin, length)
            narrow(tensor, offsets, sizes).copy_(numbers)
        if not filled.all():
            raise ValueError(f"parts of {dotted(keys)} are missing")
        return tensor

    state: dict[str, Any] = map_leaves(fill, content["state"])
    return state


def read_container(path: Path, begin: int, length: int) -> Tensor:
    """Read a tensor that torch.save has written to a part of a file."""
    with open(path, "rb") as file:
        file.seek(begin)
        container = io.BytesIO(file.read(length))
    check_container(container)
    container.seek(0)
    numbers: Tensor = torch.load(container, weights_only=True)
    return numbers


def write_weights(state: Mapping[str, Any], file: Path) -> None:
    """Write tensors by name."""
    refuse_to_replace(file)
    if file.suffix != ".safetensors":
        save_file(dict(state), file)
        return
    from safetensors import torch as safetensors

    tensors = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            # safetensors refuses tensors that share memory, and layouts such as channels_last.
            tensors[name] = value.clone(memory_format=torch.contiguous_format)
    others = sorted(state.keys() - tensors)
    if others:
        print(f"left out, since {file} can only hold tensors: {others}")
    safetensors.save_file(tensors, file)


def read(path: Path, map_location: str = "cpu") -> Any:
    """Verify and load a file or a folder."""
    if not path.is_dir():
        return load_file(path, map_location)
    folder = CheckpointFolder(path)
    folder.verify()
    return folder.read(None, map_location)


def refuse_to_replace(path: Path) -> None:
    """Raise FileExistsError if the path exists, otherwise create its parent folder."""
    if path.exists():
        raise FileExistsError(
            f"{path} already exists; remove it, or choose another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command and its paths."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("HOOKTRAIN_COMMAND"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function, paths in [
        ("inspect", inspect, ["path"]),
        ("verify", verify, ["path"]),
        ("to-file", to_file, ["folder", "file"]),
        ("to-sharded", to_sharded, ["file", "folder"]),
        ("weights", weights, ["path", "file"]),
        ("average", average, ["path", "file"]),
        ("upgrade", upgrade, ["folder"]),
    ]:
        command = commands.add_parser(name, help=(function.__doc__ or "").strip())
        for path in paths:
            command.add_argument(path)
        if function is average:
            command.add_argument("--hook", help="if there are several averages")
        command.set_defaults(function=function, paths=paths)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code."""
    args = parse(arguments)
    try:
        source, *targets = (getattr(args, name) for name in args.paths)
        options = {"hook": args.hook} if "hook" in args else {}
        args.function(
            Path(local_path(source)),
            *(Path(on_disk(target)) for target in targets),
            **options,
        )
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
