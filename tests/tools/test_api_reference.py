"""What tools/api_reference.py tells pdoc, and what docstrings refer to."""

import re
from pathlib import Path

from loading import load_tool

from hooktrain import checkpoint, engine, utils
from hooktrain.compat import detectron2
from hooktrain.utils.names import locate

reference = load_tool("api_reference")


def test_the_page_of_a_package_has_what_people_import_from_it() -> None:
    assert {"Checkpointer", "load_checkpoint", "files"} <= {
        *reference.exports(checkpoint)
    }
    names = reference.exports(engine)
    assert {"SimpleTrainer", "HookBase", "hooks", "train_loop"} <= {*names}
    assert len(names) == len({*names})
    assert {"comm", "logger"} <= {*reference.exports(utils)}
    ported = {*reference.exports(detectron2)}
    assert "DefaultTrainer" in ported
    assert (
        not {"Any", "Path", "Tensor"} & ported
    )  # they are nobody's to import from there


def test_references_name_what_there_is() -> None:
    for path in Path(utils.__file__).parent.parent.rglob("*.py"):
        text = path.read_text("utf-8")
        for name in re.findall(r":(?:class|func|mod|meth|attr|data):`(.*?)`", text):
            assert "~" not in name, f"{path}: a page would show {name}"
            if name.startswith("hooktrain."):
                locate(name)
