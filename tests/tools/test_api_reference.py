"""What tools/api_reference.py tells pdoc."""

from loading import load_tool

from hooktrain import checkpoint, engine, utils

reference = load_tool("api_reference")


def test_the_page_of_a_package_has_what_people_import_from_it() -> None:
    assert {"Checkpointer", "load_checkpoint", "files"} <= {
        *reference.exports(checkpoint)
    }
    names = reference.exports(engine)
    assert {"SimpleTrainer", "HookBase", "hooks", "train_loop"} <= {*names}
    assert len(names) == len({*names})
    assert {"comm", "events"} <= {*reference.exports(utils)}
