"""Jobs beside the main thread: their order, their errors, and the end of the process."""

import logging
import subprocess
import sys
import threading

import pytest

from hooktrain.utils.background import BackgroundWorker

LIMIT = 20.0


def test_the_caller_goes_on_while_a_job_runs() -> None:
    go, worker = threading.Event(), BackgroundWorker("job")
    ended = []
    worker.submit(lambda: ended.append(go.wait(LIMIT)))
    assert not worker.wait(seconds=0.01)
    assert ended == []
    go.set()
    assert worker.wait()
    assert ended == [True]


def test_a_second_job_begins_when_the_first_has_ended() -> None:
    go, worker, order = threading.Event(), BackgroundWorker("job"), []

    def first() -> None:
        assert go.wait(LIMIT)
        order.append("first")

    worker.submit(first)
    submitted = threading.Event()

    def submit_second() -> None:
        worker.submit(lambda: order.append("second"))
        submitted.set()

    other = threading.Thread(target=submit_second)
    other.start()
    assert not submitted.wait(0.05)  # it cannot have been taken, as the first still runs
    go.set()
    other.join()
    worker.wait()
    assert order == ["first", "second"]


def fail() -> None:
    raise OSError("disk gone")


def test_an_error_is_raised_by_wait_and_only_once() -> None:
    worker = BackgroundWorker("job")
    worker.submit(fail)
    with pytest.raises(OSError, match="disk gone"):
        worker.wait()
    worker.wait()


def test_an_error_is_raised_by_the_next_submit_which_starts_nothing() -> None:
    worker, ran = BackgroundWorker("job"), []
    worker.submit(fail)
    with pytest.raises(OSError, match="disk gone"):
        worker.submit(lambda: ran.append(1))
    worker.wait()
    assert ran == []
    worker.submit(lambda: ran.append(2))
    worker.wait()
    assert ran == [2]


def test_a_job_that_exits_is_an_error_too() -> None:
    worker = BackgroundWorker("job")
    worker.submit(lambda: sys.exit(3))
    with pytest.raises(SystemExit):
        worker.wait()


def test_an_error_that_nobody_asks_for_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    worker = BackgroundWorker("saving")
    with caplog.at_level(logging.ERROR):
        worker.submit(fail)
        with pytest.raises(OSError, match="disk gone"):
            worker.wait()
    assert "The background job 'saving' failed: OSError('disk gone')" in caplog.text


def test_no_thread_lives_longer_than_its_job() -> None:
    worker, before = BackgroundWorker("job"), threading.active_count()
    started = []
    worker.submit(lambda: started.append(threading.current_thread()))
    worker.wait()
    assert not started[0].is_alive()
    assert not started[0].daemon
    assert threading.active_count() == before


SCRIPT = """
import sys, threading, time
sys.modules["torch"] = None  # nothing of it is needed here
import importlib.util
spec = importlib.util.spec_from_file_location("background", sys.argv[1])
background = importlib.util.module_from_spec(spec)
spec.loader.exec_module(background)

def job():
    threading.main_thread().join()  # the main thread is at its end, the interpreter is waiting
    print("written", flush=True)

background.BackgroundWorker("job").submit(job)
"""


def test_the_interpreter_does_not_wait_for_a_daemon() -> None:
    path = sys.modules[BackgroundWorker.__module__].__file__
    script = SCRIPT.replace("submit(job)", "submit(threading.Event().wait, daemon=True)")
    result = subprocess.run([sys.executable, "-c", script, str(path)], timeout=LIMIT, check=False)
    assert result.returncode == 0


def test_the_interpreter_waits_at_its_exit_for_the_job_that_runs() -> None:
    path = sys.modules[BackgroundWorker.__module__].__file__
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, timeout=LIMIT
    )
    assert (result.stdout, result.returncode) == ("written\n", 0)
