from hooktrain.engine.hooks import CallbackHook
from toys import Idle


def test_each_function_is_called_at_its_event_with_the_trainer_in_each_run() -> None:
    log: list[str] = []

    def note(event: str):  # type: ignore[no-untyped-def]
        return lambda trainer: log.append(f"{event} {trainer.iter}")

    events = (
        "before_train",
        "after_train",
        "before_step",
        "after_backward",
        "after_step",
    )
    trainer = Idle(CallbackHook(**{event: note(event) for event in events}))
    for run in range(2):
        trainer.train(max_iter=run + 1)
        of_step = [
            f"{event} {run}"
            for event in ("before_step", "after_backward", "after_step")
        ]
        assert log == [f"before_train {run}", *of_step, f"after_train {run + 1}"]
        log.clear()
