import os
import platform
import subprocess

import numpy as np
import pytest
import torch

import hooktrain
from hooktrain.utils.collect_env import collect_env_info


def row(info: str, name: str) -> str:
    (line,) = [line for line in info.splitlines() if line.startswith(f"{name}  ")]
    return line[len(name) :].strip()


def test_versions_and_the_build_of_torch_are_listed() -> None:
    info = collect_env_info()
    assert row(info, "Python").startswith(platform.python_version())
    assert row(info, "hooktrain").startswith(hooktrain.__version__)
    assert row(info, "numpy") == np.__version__
    assert row(info, "torch").startswith(torch.__version__)
    assert row(info, "CPUs") == str(os.cpu_count())
    assert info.endswith(torch.__config__.show())


def test_only_variables_that_steer_the_run_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "007")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("MY_SECRET_TOKEN", "hush")
    monkeypatch.setattr(subprocess, "Popen", None)  # no other program is run
    info = collect_env_info()
    assert row(info, "$OMP_NUM_THREADS") == "007"
    assert row(info, "$LOCAL_RANK") == "3"
    assert "hush" not in info
