from hooktrain.engine.hooks import CallbackHook
from toy import Idle


def test_each_function_is_called_at_its_event_with_the_trainer() -> None:
    log: list[str] = []

    def note(event: str):  # type: ignore[no-untyped-def]
        return lambda trainer: log.append(f"{event} {trainer.iter}")

    events = ("before_train", "after_train", "before_step", "after_backward", "after_step")
    Idle(CallbackHook(**{event: note(event) for event in events})).train(0, 1)
    assert log == [
        "before_train 0",
        "before_step 0",
        "after_backward 0",
        "after_step 0",
        "after_train 1",
    ]


def test_the_same_trainer_can_be_trained_twice() -> None:
    calls: list[int] = []
    trainer = Idle(CallbackHook(after_train=lambda t: calls.append(t.iter)))
    trainer.train(0, 1)
    trainer.train(max_iter=2)
    assert calls == [1, 2]
