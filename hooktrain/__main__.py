"""The command ``hooktrain``, which runs the scripts and configurations of the package."""

import os
import sys
from pathlib import Path

from hooktrain import __version__

# An installed package has the scripts and configurations in its own folder, a clone beside it.
_HERE = Path(__file__).parent
_ROOT = _HERE if (_HERE / "tools").is_dir() else _HERE.parent

_SCRIPTS = {
    "train": ["train_net.py"],
    "eval": ["train_net.py", "--eval-only"],
    "plot": ["plot.py"],
    "checkpoint": ["checkpoint.py"],
    "compare": ["compare.py"],
    "new": ["new.py"],
}
_USAGE = f"""usage: hooktrain COMMAND ...

  train --config-file FILE [key=value ...]   train; --help shows all options
  train ... --dry-run --ranks 64             estimate the memory and messages of one of 64 ranks
  eval --config-file FILE --resume | --best  evaluate the newest checkpoint, or the best model
  eval --config-file FILE --follow           evaluate each new checkpoint of a run that is training
  plot RUN ...                               draw the metrics of runs
  checkpoint inspect|verify|... PATH         inspect, verify and convert checkpoints
  compare RUN_A RUN_B                        find where two runs first differ: iteration and layer
  new FOLDER                                 make a folder with a training script to start from
  --version                                  print the version

These come with the package: configs/digits_cnn.py, configs/digits_gan.py,
configs/digits_detection.py, configs/text_gpt.py, configs/imagenet_resnet50.py and
configs/coco_fasterrcnn.py. So does the guide: {_ROOT}/docs/guide/index.md"""


def main() -> None:
    """Run a command; a script replaces this process."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        sys.stdout.write(f"{_USAGE}\n")
    elif name == "--version":
        sys.stdout.write(f"hooktrain {__version__}\n")
    elif name in _SCRIPTS:
        script, *options = _SCRIPTS[name]
        path = str(_ROOT / "tools" / script)
        command = [sys.executable, path, *options, *arguments]
        os.environ["HOOKTRAIN_COMMAND"] = f"hooktrain {name}"  # for the help
        os.execv(command[0], command)
    else:
        raise SystemExit(f"hooktrain: unknown command {name!r}\n\n{_USAGE}")


if __name__ == "__main__":
    main()
