"""Background jobs: their order, their errors, and the end of the process."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from hooktrain.utils.background import BackgroundWorker

LIMIT = 20.0


def test_a_second_job_waits_for_the_first() -> None:
    go, worker, order = threading.Event(), BackgroundWorker("job"), []

    def first() -> None:
        assert go.wait(LIMIT)
        order.append("first")

    worker.submit(first)
    assert not worker.wait(seconds=0.01)
    submitted = threading.Event()

    def submit_second() -> None:
        worker.submit(lambda: order.append("second"))
        submitted.set()

    other = threading.Thread(target=submit_second)
    other.start()
    assert not submitted.wait(0.05)  # it waits, since the first job still runs
    go.set()
    other.join()
    assert worker.wait()
    assert order == ["first", "second"]


def fail() -> None:
    raise OSError("disk gone")


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


@pytest.mark.parametrize("job", [fail, lambda: sys.exit("disk gone")])
def test_an_error_is_raised_by_wait_once(
    job: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    worker = BackgroundWorker("saving")
    worker.submit(job)
    with pytest.raises((OSError, SystemExit), match="disk gone"):
        worker.wait()
    worker.wait()
    assert "'saving'" in caplog.text


SCRIPT = """
import sys, threading, time
sys.modules["torch"] = None  # the import would take seconds
import importlib.util
spec = importlib.util.spec_from_file_location("background", sys.argv[1])
background = importlib.util.module_from_spec(spec)
spec.loader.exec_module(background)

def job():
    threading.main_thread().join()  # the main thread has ended, and the interpreter waits
    print("written", flush=True)

background.BackgroundWorker("job").submit(job)
"""


@pytest.mark.parametrize(
    ("call", "printed"),
    [("submit(job)", "written\n"), ("submit(threading.Event().wait, daemon=True)", "")],
)
def test_the_interpreter_waits_at_its_exit_for_the_job(call: str, printed: str) -> None:
    path = sys.modules[BackgroundWorker.__module__].__file__
    command = [sys.executable, "-c", SCRIPT.replace("submit(job)", call), str(path)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert result.stdout == printed
